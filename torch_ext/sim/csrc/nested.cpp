// Nested tensors of torch.nested's strided layout. Torch's kernels for nested tensors on the host call operators on
// their buffers, whatever device these lie on: so they serve here as they are. Those of the jagged layout are made in
// Python.
#include <ATen/NestedTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_nested_view_from_buffer.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "alias.h"
#include "device.h"
#include "kernel.h"

namespace torch_ext::sim {
namespace {

constexpr auto kNestedOnHost = c10::DispatchKey::NestedTensorCPU;

// Host kernels that read and write memory themselves.
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
      "' is not implemented for nested tensors of the strided layout, neither on the device sim nor on the host. Make ",
      "them with layout=torch.jagged, or pad them (torch.nested.to_padded_tensor).");
  if (std::find(kDirect.begin(), kDirect.end(), name.name) != kDirect.end()) {
    run_direct(op, stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(kNestedOnHost), stack);
  }
}

// Makes nested tensors of others, as views or by operators on them.
void make_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_buffers>());
}

// Those that have a decomposition, too, which is for dense tensors and goes before a fallback.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(kNestedOnHost)) {
    if (name.getNamespace() == "aten") {
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_buffers>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"_nested_from_padded", "_nested_tensor_from_mask", "_nested_view_from_buffer"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&make_nested>());
  }
}

} // namespace torch_ext::sim
