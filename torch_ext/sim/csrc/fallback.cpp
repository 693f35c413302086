// The fallback: runs the host kernel of any operator on aliases of its device tensors.

#include <ATen/native/Resize.h>

#include "alias.h"
#include "allocator.h"
#include "checks.h"
#include "device.h"
#include "dry.h"
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

void refuse_missing(const c10::OperatorHandle& op, c10::DeviceIndex device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The operator '", toString(op.operator_name()), "' is not implemented for the device ", kSimName, ":",
      static_cast<int>(device), ": it has no host kernel that could serve it. Move its inputs to the host with .cpu() ",
      "or register a kernel for ", kSimKey, ".");
}

void refuse_if_sparse(const c10::OperatorHandle& op, const c10::IValue& value) {
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.layout() != c10::kStrided) {
      refuse_sparse(op);
    }
  });
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

bool is_mask(const c10::IValue& index) {
  return index.isTensor() && index.toTensor().defined() &&
      (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte);
}

// Whether the sizes of the results depend on values.
bool has_unknown_sizes(const c10::OperatorHandle& op, const OperatorFacts& facts, c10::ArrayRef<c10::IValue> args) {
  constexpr size_t kIndices = 1;
  return facts.is_indexing
      ? facts.makes_results && std::ranges::any_of(args[kIndices].toListRef(), &is_mask)
      : op.hasTag(at::Tag::dynamic_output_shape);
}

// In place of a host kernel, whose arguments are tensors of the meta device: see Note [Dry runs].
void run_dry(const c10::OperatorHandle& op, const OperatorFacts& facts, Stack* stack) {
  const auto& returns = op.schema().returns();
  if (facts.host_reads && returns.size() == 1 && returns.front().type() == c10::BoolType::get()) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(assumed(facts.name).value_or(1) != 0);
    return;
  }
  if (returns.empty()) { // it fills its arguments
    torch::jit::drop(*stack, op.schema().arguments().size());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta), "A dry run cannot run ", toString(op.operator_name()),
      ": torch has no shape function for it. Register one (torch.library.register_fake).");
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
}

// The argument that result number `result` is, by the schema; null if it is none. Some of torch's shape functions for
// `out=` return another tensor.
const c10::IValue* argument_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> given, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  for (size_t i = 0; alias != nullptr && alias->isWrite() && i < given.size(); ++i) {
    const auto* of_argument = schema.arguments()[i].alias_info();
    if (of_argument != nullptr && *of_argument == *alias && given[i].isTensor()) {
      return &given[i];
    }
  }
  return nullptr;
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
  Kernel kernel(facts.name);
  kernel.on(device);
  if (host_waits(facts, arguments)) {
    kernel.host_reads();
    if (is_dry() && has_unknown_sizes(op, facts, arguments)) {
      assumed(facts.name, /*is_size=*/true); // raises, but for some masks of torch's own
    }
  }
  if (facts.is_view) {
    kernel.touches_nothing();
  } else if (kernel.is_watched()) {
    account(kernel, facts, arguments);
  }
  const auto given = is_dry() ? arguments.vec() : std::vector<c10::IValue>();
  AliasSet aliases;
  int64_t largest = -1; // without a tensor
  const size_t first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    refuse_if_sparse(op, value);
    replace_tensors(value, [&](at::Tensor&& tensor) {
      largest = on_sim(tensor) ? std::max(largest, tensor.numel()) : largest;
      return on_sim(tensor) || (is_dry() && tensor.defined() && tensor.dim() > 0)
          ? aliases.alias(tensor)
          : std::move(tensor);
    });
    if (value.isDevice() && value.toDevice().type() == kSim) {
      value = c10::Device(is_dry() ? c10::DeviceType::Meta : c10::DeviceType::CPU);
    }
  }
  if (facts.generator >= 0) {
    auto& generator = (*stack)[first + facts.generator];
    generator = host_generator(generator.toOptional<at::Generator>(), device, static_cast<uint64_t>(std::abs(largest)));
    if (is_dry()) { // it has advanced; shape functions take none
      generator = c10::IValue();
    }
  }
  const auto allocations = allocations_of(facts, arguments);
  kernel.allocates(allocations).launch();
  at::Tensor converted; // its memory, in a dry run
  if (is_dry() && allocations == Allocations::kCounted) {
    const auto nbytes = arguments.front().toTensor().numel() * arguments.back().toTensor().element_size();
    converted = at::empty({nbytes}, at::TensorOptions(at::kByte).device(c10::Device(kSim, device)));
  }
  if (is_dry()) {
    run_dry(op, facts, stack);
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.publish(device);
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[stack->size() - 1 - i];
    if (const auto* argument = argument_of(schema, given, schema.returns().size() - 1 - i)) {
      value = *argument;
    }
    refuse_if_sparse(op, value);
    replace_tensors(value, [&](at::Tensor&& host) { return aliases.result(std::move(host), device); });
  }
  if (kernel.is_watched() && !facts.is_view) {
    account_results(kernel, facts, torch::jit::last(*stack, schema.returns().size()));
  }
}

} // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (C10_LIKELY(!is_capturing())) {
    run_now(op, stack);
    return;
  }
  const size_t count = op.schema().arguments().size();
  const auto device = common_device(facts_of(op), op.schema(), torch::jit::last(*stack, count));
  run_kernels(device, count, stack, [op](torch::jit::Stack* values) { run_now(op, values); });
}

namespace {

bool is_half(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kComplexHalf);
}

at::Tensor cast(const at::Tensor& tensor, c10::ScalarType type) {
  return tensor.to(tensor.is_complex() ? c10::toComplexType(type) : type);
}

// Runs a kernel that GPUs have in half precision and the host does not: in float, rounded once.
void run_in_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const auto given = torch::jit::last(*stack, schema.arguments().size()).vec();
  bool has_half = false;
  for (size_t i = first; i < stack->size(); ++i) {
    replace_tensors((*stack)[i], [&has_half](at::Tensor&& given) {
      has_half = has_half || is_half(given);
      return is_half(given) ? cast(given, at::kFloat) : std::move(given);
    });
  }
  run_on_host(op, stack);
  const size_t count = schema.returns().size();
  for (size_t i = 0; has_half && i < count; ++i) {
    auto& value = (*stack)[stack->size() - count + i];
    if (const auto* argument = argument_of(schema, given, i)) {
      const at::Tensor out = argument->toTensor();
      at::native::resize_output(out, value.toTensor().sizes());
      out.copy_(value.toTensor());
      value = out;
    } else {
      replace_tensors(value, [](at::Tensor&& made) { return cast(made, at::kHalf); });
    }
  }
}

// input, dimensions, normalization, ... as of at::_fft_r2c and its like. The limit and the words are cuFFT's. A fourth
// argument that is a number is the length of a result of real numbers.
void run_fft(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor input = (*stack)[first].toTensor();
  const auto& length = (*stack)[first + 3];
  if (is_half(input)) {
    const auto dims = (*stack)[first + 1].toIntVector();
    for (size_t i = 0; i < dims.size(); ++i) {
      const int64_t size = i + 1 == dims.size() && length.isInt() ? length.toInt() : input.size(dims[i]);
      TORCH_CHECK(
          (size & (size - 1)) == 0,
          "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a "
          "signal size of ",
          size);
    }
  }
  run_in_float(op, stack);
}

} // namespace

SIM_LIBRARY_IMPL(_, kSimKey, m) {
  register_fallback<&run_on_host, c10::DispatchKey::PrivateUse2>(m, kSimKey);
}

// Operators with a kernel for the host and a decomposition for every other device, whose results would round
// differently, and operators whose code for every device depends on the device's name (`conj_physical_`, `mode.values`)
// or on the address of a C++ reference (`addr_`). The host's code serves for both.
SIM_LIBRARY_IMPL(aten, kSimKey, m) {
  for (const char* name :
       {"addr", "addr.out", "addr_", "conj_physical_", "mish_backward", "mode.values", "mse_loss", "native_group_norm",
        "silu_backward", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  for (const char* name :
       {"multi_margin_loss", "multi_margin_loss.out", "multi_margin_loss_backward",
        "multi_margin_loss_backward.grad_input"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_in_float>());
  }
  for (const char* name : {"_fft_r2c", "_fft_r2c.out", "_fft_c2r", "_fft_c2r.out", "_fft_c2c", "_fft_c2c.out"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_fft>());
  }
}

} // namespace torch_ext::sim
