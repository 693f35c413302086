// The fallback: runs the host kernel of any operator on aliases of its device tensors.

#include "alias.h"
#include "allocator.h"
#include "checks.h"
#include "device.h"
#include "generator.h"
#include "graph.h"
#include "kernel.h"
#include "replaced_kernels.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// Replaces the device tensors of one call by aliases, and its results by device tensors.
class Call {
 public:
  explicit Call(c10::DeviceIndex device) : device_(device) {}

  void to_host(c10::IValue& value) {
    if (value.isTensor()) {
      if (on_sim(value.toTensor())) {
        value = alias(value.toTensor());
      }
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), [this](auto& t) { return alias_if_sim(t); });
      value = c10::List<at::Tensor>(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliased;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        aliased.push_back(tensor.has_value() ? std::make_optional(alias_if_sim(*tensor)) : std::nullopt);
      }
      value = std::move(aliased);
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }

  void draw_from_device(const OperatorFacts& facts, c10::IValue& generator) {
    if (facts.generator >= 0) {
      std::optional<at::Generator> given;
      if (generator.isGenerator()) {
        given = generator.toGenerator();
      }
      generator = host_generator(given, device_, static_cast<uint64_t>(std::max<int64_t>(largest_, 1)));
    }
  }

  void to_device(c10::IValue& value) {
    if (value.isTensor()) {
      at::Tensor host = std::move(value).toTensor();
      value = aliases_.result(std::move(host), device_);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      auto hosts = std::move(value).toTensorVector();
      value = c10::IValue();
      for (auto& host : hosts) {
        results.push_back(aliases_.result(std::move(host), device_));
      }
      value = std::move(results);
    }
  }

  void publish() { aliases_.publish(device_); }

 private:
  at::Tensor alias(const at::Tensor& tensor) {
    largest_ = std::max(largest_, tensor.numel());
    return aliases_.alias(tensor);
  }
  at::Tensor alias_if_sim(const at::Tensor& tensor) { return on_sim(tensor) ? alias(tensor) : tensor; }

  c10::DeviceIndex device_;
  AliasSet aliases_;
  int64_t largest_ = 0;
};

void refuse_missing(const c10::OperatorHandle& op, c10::DeviceIndex device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The operator '", toString(op.operator_name()), "' is not implemented for the device " SIM_NAME ":",
      static_cast<int>(device), ": it has no host kernel that could serve it. Move its inputs to the host with .cpu() ",
      "or register a kernel for " C10_STRINGIZE(SIM_KEY) ".");
}

bool is_sparse(const c10::IValue& value) {
  bool found = false;
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    found = found || (tensor.defined() && tensor.layout() != c10::kStrided);
  });
  return found;
}

// Skips host tensors (numbers and indices): the host has read them when the call returns.
void account(Kernel& kernel, const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (on_sim(tensor)) {
        facts.written[i] ? kernel.writes(tensor) : kernel.reads(tensor);
      }
    });
  }
}

void account_results(Kernel& kernel, const OperatorFacts& facts, c10::ArrayRef<c10::IValue> results) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (facts.fresh[i]) {
      for_each_tensor(results[i], [&](const at::Tensor& tensor) { kernel.wrote(tensor); });
    }
  }
}

// See Note [Scratch memory] in allocator.h.
Allocations allocations_of(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  if (facts.makes_results) {
    return Allocations::kMayBeResults;
  }
  if (facts.may_convert && arguments.front().isTensor() && arguments.back().isTensor()) {
    const auto from = arguments.front().toTensor().scalar_type(), to = arguments.back().toTensor().scalar_type();
    const bool in_one_kernel = (from == at::kHalf || from == at::kBFloat16) && to == at::kFloat;
    return from == to || in_one_kernel ? Allocations::kScratch : Allocations::kCounted;
  }
  return Allocations::kScratch;
}

void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& facts = facts_of(op);
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  const auto device = common_device(facts, schema, arguments);
  if (!facts.has_host_kernel) {
    refuse_missing(op, device);
  }
  check_refusals(facts.refusals, arguments);
  Call call(device);
  Kernel kernel(facts.name);
  kernel.on(device);
  if (host_waits(facts, arguments)) {
    kernel.host_reads();
  }
  if (facts.is_view) {
    kernel.touches_nothing();
  } else if (kernel.is_watched()) {
    account(kernel, facts, arguments);
  }
  const size_t first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    if (is_sparse((*stack)[first + i])) {
      refuse_sparse(op);
    }
    call.to_host((*stack)[first + i]);
  }
  if (facts.generator >= 0) {
    call.draw_from_device(facts, (*stack)[first + facts.generator]);
  }
  kernel.allocates(allocations_of(facts, arguments)).launch();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.publish();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (is_sparse((*stack)[stack->size() - 1 - i])) {
      refuse_sparse(op);
    }
    call.to_device((*stack)[stack->size() - 1 - i]);
  }
  if (kernel.is_watched() && !facts.is_view) {
    account_results(kernel, facts, torch::jit::last(*stack, schema.returns().size()));
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (C10_LIKELY(!is_capturing())) {
    run_now(op, stack);
    return;
  }
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const auto device = common_device(facts_of(op), op.schema(), arguments);
  const auto run = [op](torch::jit::Stack values) {
    run_now(op, &values);
    return values;
  };
  for (auto& result : run_kernels(device, run, arguments)) {
    stack->push_back(std::move(result));
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  replace_kernels<&run_on_host, c10::DispatchKey::PrivateUse2>(c10::DispatchKey::SIM_KEY);
}

// Operators with a kernel for the host and a decomposition for every other device. The host's kernel is faster, and its
// results equal the host's bit for bit.
TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  for (const char* name :
       {"addr", "mish_backward", "mse_loss", "native_group_norm", "native_layer_norm", "silu_backward",
        "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

} // namespace torch_ext::sim
