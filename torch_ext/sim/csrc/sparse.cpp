// Sparse tensors: their parts are dense device tensors, and everything computed with them runs on copies on the host.
//
// What makes a sparse tensor, takes it apart or changes its size is torch's own code, which serves any device. For all
// else the call's tensors are copied to the host, the host's kernel runs, and results and written arguments are copied
// back. Kernels that make sparse tensors of dense ones are on the same way, by name.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "device.h"

namespace torch_ext::sim {
namespace {

// A copy of `tensor` on `device`, of any layout; itself if it is not on `from`.
at::Tensor moved(const at::Tensor& tensor, c10::DeviceType from, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() != from) {
    return tensor;
  }
  const auto options = tensor.options().device(device);
  if (tensor.layout() == c10::kSparse) {
    return at::_sparse_coo_tensor_unsafe(
        tensor._indices().to(device), tensor._values().to(device), tensor.sizes(), options, tensor.is_coalesced());
  }
  if (tensor.layout() == c10::kStrided) {
    return tensor.to(device);
  }
  const bool by_row = tensor.layout() == c10::kSparseCsr || tensor.layout() == c10::kSparseBsr;
  const auto compressed = by_row ? tensor.crow_indices() : tensor.ccol_indices();
  const auto plain = by_row ? tensor.col_indices() : tensor.row_indices();
  return at::_sparse_compressed_tensor_unsafe(
      compressed.to(device), plain.to(device), tensor.values().to(device), tensor.sizes(), options);
}

// Replaces every tensor in `value`, lists included.
template <typename Replace>
void replace_tensors(c10::IValue& value, Replace replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (const auto& tensor : value.toTensorVector()) {
      replaced.push_back(replace(tensor));
    }
    value = std::move(replaced);
  }
}

c10::Device device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (c10::IValue argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kSim) {
      found = argument.toDevice();
    }
    replace_tensors(argument, [&](const at::Tensor& tensor) {
      if (!found.has_value() && tensor.defined() && tensor.device().type() == kSim) {
        found = tensor.device();
      }
      return tensor;
    });
  }
  const bool has_index = found.has_value() && found->has_index();
  return has_index ? *found : c10::Device(kSim, current_device());
}

// Copies between devices are torch's own code, so that no operator that gets here may have both.
void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, c10::Device device) {
  for (c10::IValue argument : arguments) {
    replace_tensors(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          !tensor.defined() || tensor.device() == device || (tensor.is_cpu() && tensor.dim() == 0),
          "Expected all tensors to be on the same device, but '", toString(op.operator_name()), "' got tensors on ",
          device, " and ", tensor.device(), ".");
      return tensor;
    });
  }
}

void run_on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // A collective would go on with the copies after its call has returned.
  if (op.operator_name().getNamespace() != "aten") {
    refuse_sparse(op);
  }
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  const auto given = torch::jit::last(*stack, count).vec();
  const auto device = device_of(given);
  check_devices(op, given, device);
  for (size_t i = 0; i < count; ++i) {
    auto& argument = (*stack)[first + i];
    replace_tensors(argument, [](const at::Tensor& tensor) { return moved(tensor, kSim, at::kCPU); });
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

// A new sparse tensor's parts are made on the current device, whatever device was asked for.
using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<c10::Device>;

CurrentDevice making_on(const Device& device) {
  return CurrentDevice(device.has_value() ? checked_index(*device) : current_device());
}

at::Tensor with_dims(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size, Type type, Layout layout, Device device,
    std::optional<bool> pinned) {
  const auto guard = making_on(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, type, layout, device, pinned);
}

at::Tensor with_parts(
    int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices,
    const at::Tensor& values, Type type, Layout layout, Device device, std::optional<bool> pinned,
    std::optional<bool> coalesced) {
  const auto guard = making_on(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, type, layout, device, pinned, coalesced);
}

at::Tensor empty_sparse_on(
    c10::SymIntArrayRef size, Type type, Layout layout, Device device, std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  const auto guard = making_on(device);
  return at::native::empty_sparse_symint(size, type, layout, device, pinned, format);
}

at::Tensor& copy_compressed(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  return at::native::copy_sparse_compressed_(self, source, non_blocking);
}

// Registers run_on_copies for the operators that the host has a kernel for in this layout, and that torch also composes
// of others for any device. A fallback does not come before such a composition, which does not know the layout: it
// returned a sum that was not summed, and made results in the layout of the first argument whatever their own is.
void run_composed_on_copies(torch::Library& m, c10::DispatchKey host, c10::DispatchKey here) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(host)) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op.has_value() || !op->hasKernelForDispatchKey(host) ||
        op->hasKernelForDispatchKey(here)) {
      continue;
    }
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
    }
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", TORCH_FN(with_dims));
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(with_parts));
  m.impl("empty.memory_format", TORCH_FN(empty_sparse_on));
  m.impl("empty_like", TORCH_FN(at::native::empty_like_sparse_coo));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("indices", TORCH_FN(at::native::indices_sparse));
  m.impl("values", TORCH_FN(at::native::values_sparse));
  m.impl("sparse_resize_", TORCH_FN(at::native::sparse_resize_));
  m.impl("sparse_resize_and_clear_", TORCH_FN(at::native::sparse_resize_and_clear_));
  m.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
  m.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
  run_composed_on_copies(m, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparsePrivateUse1);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(at::native::empty_sparse_compressed_symint));
  m.impl("empty_like", TORCH_FN(at::native::empty_like_sparse_csr));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse_csr));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse_csr));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse_csr));
  m.impl("crow_indices", TORCH_FN(at::native::crow_indices_sparse_csr));
  m.impl("col_indices", TORCH_FN(at::native::col_indices_sparse_csr));
  m.impl("ccol_indices", TORCH_FN(at::native::ccol_indices_sparse_csr));
  m.impl("row_indices", TORCH_FN(at::native::row_indices_sparse_csr));
  m.impl("values", TORCH_FN(at::native::values_sparse_csr));
  m.impl("copy_", TORCH_FN(copy_compressed));
  run_composed_on_copies(m, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrPrivateUse1);
}

// What makes sparse tensors of dense ones. The gradient of bags of embeddings is a sparse one where that is asked for:
// torch's own code makes it of other operators.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_embedding_bag_backward", TORCH_FN(at::native::_embedding_bag_backward_symint));
  for (const char* name :
       {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
        "sparse_mask"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
  }
}

} // namespace torch_ext::sim
