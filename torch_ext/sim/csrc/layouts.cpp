// Sparse tensors, whose parts are dense device tensors. Operators that make one, take it apart or change its size are
// torch's own code, which serves any device. All others copy their tensors to the host, run the host's kernel, and copy
// results and written arguments back. So do kernels that make sparse tensors of dense ones, listed by name.
//
// Nested tensors of the strided layout. Torch's host kernels for them call operators on their buffers, on any device,
// so they serve here unchanged. Python code makes those of the jagged layout.
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_nested_view_from_buffer.h>

#include "alias.h"
#include "checks.h"
#include "device.h"
#include "dry.h"
#include "kernel.h"
#include "replaced_kernels.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

// A copy of `tensor` on `device`, of any layout; `tensor` itself if it is not on `from`.
at::Tensor moved(const at::Tensor& tensor, c10::DeviceType from, c10::Device device) {
  return tensor.defined() && tensor.device().type() == from ? tensor.to(device) : tensor;
}

c10::Device device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kSim) {
      found = argument.toDevice();
    }
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!found.has_value() && tensor.defined() && tensor.device().type() == kSim) {
        found = tensor.device();
      }
    });
  }
  return {kSim, found.has_value() ? checked_index(*found) : current_device()};
}

void run_on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // A collective would still use the copies after its call has returned.
  if (op.operator_name().getNamespace() != "aten") {
    refuse_sparse(op);
  }
  if (is_dry()) {
    assumed(facts_of(op).name, /*is_size=*/true); // indices are values, and host kernels trust them
  }
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  const auto given = torch::jit::last(*stack, count).vec();
  // Copies between devices are torch's own code, so no operator that gets here may have tensors of both.
  const c10::Device device(kSim, common_device(facts_of(op), schema, given));
  for (size_t i = 0; i < count; ++i) {
    auto& argument = (*stack)[first + i];
    replace_tensors(argument, [](const at::Tensor& tensor) {
      auto copy = moved(tensor, kSim, at::kCPU);
      // _sparse_mm_reduce_impl saves what its backward reads only where an argument requires a gradient.
      if (!copy.is_same(tensor) && tensor.requires_grad()) {
        copy.set_requires_grad(true);
      }
      return copy;
    });
    if (argument.isDevice() && argument.toDevice().type() == kSim) {
      argument = c10::Device(at::kCPU);
    }
  }
  const auto copies = torch::jit::last(*stack, count).vec();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  const auto back = [device](const at::Tensor& tensor) { return moved(tensor, at::kCPU, device); };
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && given[i].isTensor() && given[i].toTensor().defined()) {
      at::Tensor written = given[i].toTensor();
      written.copy_(back(copies[i].toTensor()));
    }
  }
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& result = (*stack)[results + i];
    const auto* alias = schema.returns()[i].alias_info();
    for (size_t j = 0; alias != nullptr && j < count; ++j) {
      if (result.isTensor() && copies[j].isTensor() && copies[j].toTensor().is_same(result.toTensor())) {
        result = given[j];
      }
    }
    replace_tensors(result, back);
  }
}

// Runs torch's own code for the host, which is composed of other operators and so serves any device. It makes the parts
// of a new tensor on the current device.
template <c10::DispatchKey host>
void run_code_of_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::DeviceGuard guard(device_of(torch::jit::last(*stack, op.schema().arguments().size())));
  op.redispatchBoxed(c10::DispatchKeySet(host), stack);
}

using Names = std::initializer_list<const char*>;

template <c10::DispatchKey host>
void run_code_of_host(torch::Library& m, Names names) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_code_of_host<host>>());
  }
}

// Registers run_code_of_host for `parts`, and run_on_copies for the other operators that have a host kernel for this
// layout and a composition of other operators for any device. The composition would take precedence over a fallback,
// and does not know the layout: it returned a sum that was not summed.
template <c10::DispatchKey host>
void run_layout(torch::Library& m, Names parts) {
  run_code_of_host<host>(m, parts);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(host)) {
    const auto op = dispatcher.findOp(name);
    const auto is_named = [&name](const char* part) { return toString(name) == c10::str("aten::", part); };
    if (name.getNamespace() != "aten" || !op.has_value() || !op->hasKernelForDispatchKey(host) ||
        std::any_of(parts.begin(), parts.end(), is_named)) {
      continue;
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
    }
  }
}

constexpr auto kNestedOnHost = c10::DispatchKey::NestedTensorCPU;

// Host kernels that access memory directly, without other operators.
constexpr std::array<std::string_view, 5> kDirect = {
    "aten::_native_multi_head_attention", "aten::_transform_bias_rescale_qkv", "aten::_transformer_encoder_layer_fwd",
    "aten::native_layer_norm", "aten::native_layer_norm_backward"};

// The same nested tensor over another buffer.
at::Tensor over(const at::Tensor& buffer, const at::native::NestedTensorImpl& like) {
  return at::_nested_view_from_buffer(
      buffer, like.get_nested_sizes(), like.get_nested_strides(), like.get_storage_offsets());
}

// Runs a host kernel on host tensors that share the memory of its arguments.
void run_direct(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Kernel kernel(op.operator_name().name);
  AliasSet aliases;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& argument = (*stack)[i];
    if (!argument.isTensor() || argument.toTensor().device().type() != kSim) {
      continue;
    }
    const at::Tensor tensor = argument.toTensor();
    if (tensor.is_nested()) {
      const auto& nested = *at::native::get_nested_tensor_impl(tensor);
      kernel.reads(nested.get_buffer());
      argument = over(aliases.alias(nested.get_buffer()), nested);
    } else {
      kernel.reads(tensor);
      argument = aliases.alias(tensor);
    }
  }
  const auto device = kernel.launch();
  op.redispatchBoxed(c10::DispatchKeySet(kNestedOnHost), stack);
  aliases.publish(device);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& result = (*stack)[i];
    if (!result.isTensor() || !result.toTensor().defined()) {
      continue;
    }
    const at::Tensor host = std::move(result).toTensor();
    if (host.is_nested()) {
      const auto& nested = *at::native::get_nested_tensor_impl(host);
      const at::Tensor buffer = aliases.result(nested.get_buffer(), device);
      kernel.wrote(buffer);
      result = over(buffer, nested);
    } else {
      result = aliases.result(at::Tensor(host), device);
      kernel.wrote(result.toTensor());
    }
  }
}

void run_on_buffers(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(kNestedOnHost), "The operator '", toString(name),
      "' is not implemented for nested tensors of the strided layout, neither on the device ", kSimName,
      " nor on the host. Make them with layout=torch.jagged, or pad them (torch.nested.to_padded_tensor).");
  if (std::ranges::count(kDirect, name.name) > 0) {
    run_direct(op, stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(kNestedOnHost), stack);
  }
}

} // namespace

SIM_LIBRARY_IMPL(_, kSimSparseKey, m) {
  register_fallback<&run_on_copies, c10::DispatchKey::SparsePrivateUse2>(m, kSimSparseKey);
}

SIM_LIBRARY_IMPL(_, kSimSparseCsrKey, m) {
  register_fallback<&run_on_copies, c10::DispatchKey::SparseCsrPrivateUse2>(m, kSimSparseCsrKey);
}

SIM_LIBRARY_IMPL(_, kSimNestedKey, m) {
  register_fallback<&run_on_buffers, c10::DispatchKey::NestedTensorPrivateUse2>(m, kSimNestedKey);
}

SIM_LIBRARY_IMPL(aten, kSimSparseKey, m) {
  run_layout<c10::DispatchKey::SparseCPU>(
      m,
      {"_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "empty.memory_format", "empty_like",
       "sparse_dim", "dense_dim", "_nnz", "is_coalesced", "_coalesced_", "_indices", "_values", "indices", "values",
       "sparse_resize_", "sparse_resize_and_clear_", "copy_", "copy_sparse_to_sparse_"});
}

SIM_LIBRARY_IMPL(aten, kSimSparseCsrKey, m) {
  run_layout<c10::DispatchKey::SparseCsrCPU>(
      m,
      {"empty.memory_format", "empty_like", "sparse_dim", "dense_dim", "_nnz", "crow_indices", "col_indices",
       "ccol_indices", "row_indices", "values", "copy_"});
}

// Operators that also have a decomposition, which is for dense tensors and takes precedence over a fallback.
SIM_LIBRARY_IMPL(aten, kSimNestedKey, m) {
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(kNestedOnHost)) {
    if (name.getNamespace() == "aten") {
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_buffers>());
    }
  }
}

// Operators that make sparse and nested tensors of dense ones. The gradient of EmbeddingBag is sparse with
// `sparse=True`.
SIM_LIBRARY_IMPL(aten, kSimKey, m) {
  run_code_of_host<c10::DispatchKey::CPU>(
      m, {"_embedding_bag_backward", "_nested_from_padded", "_nested_tensor_from_mask", "_nested_view_from_buffer"});
  for (const char* name :
       {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
        "sparse_mask"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
  }
}

} // namespace torch_ext::sim
