// Note [Bounds]
// A storage can lose memory while tensors still refer to it: FSDP frees parameters by `untyped_storage().resize_(0)`.
// As on a GPU, a program may make views of such a tensor, and no kernel may use it: a GPU ends the program with an
// illegal memory access, and the host would read on past the storage. So every kernel's tensors are checked before it
// runs, `out=` tensors that would be resized too, and the error names the place that freed the memory.
//
// Device checks, as strict as those of a GPU: see Note [Strict devices] in checks.cpp.
#pragma once

#include "device.h"
#include "std.h"
#include "symmetric_memory.h"

namespace torch_ext::sim {

// Bytes from the start of the storage to the end of `tensor`'s last element. `tensor` must have elements.
inline size_t reach_of(const at::Tensor& tensor) {
  const size_t offset = static_cast<size_t>(tensor.storage_offset()), itemsize = tensor.dtype().itemsize();
  if (tensor.is_contiguous()) {
    return (offset + static_cast<size_t>(tensor.numel())) * itemsize;
  }
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), itemsize, offset);
}

// True for tensors without elements or without their own storage.
inline bool is_in_bounds(const at::Tensor& tensor) {
  return tensor.numel() == 0 || !tensor.has_storage() ||
      (reach_of(tensor) <= tensor.storage().nbytes() &&
       (!symmetric::exists.load(std::memory_order_relaxed) || symmetric::why_gone(tensor.storage().data()).empty()));
}

// Raises AcceleratorError for a defined tensor that is out of bounds. argument: its name, if known.
[[noreturn]] void refuse_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument = "");
inline void check_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument = "") {
  if (C10_UNLIKELY(!is_in_bounds(tensor))) {
    refuse_bounds(kernel, tensor, argument);
  }
}

// Calls that CUDA refuses and the host's kernels accept: element types that CUDA's kernel lacks, such as integers in
// products of matrices, operators without one, and, under torch.use_deterministic_algorithms, kernels whose result
// depends on the order of threads. See refusals.cpp.
struct Refusal;
using Refusals = std::span<const Refusal>;

// The refusals of an operator by its name ("aten::mm"); empty if CUDA accepts all of its calls.
Refusals refusals_of(const std::string& name);

// Raises NotImplementedError for an element type or a missing kernel, and RuntimeError (or warns) for a kernel that is
// not deterministic, in CUDA's words.
void check_refusals(Refusals refusals, c10::ArrayRef<c10::IValue> arguments);

// Raises NotImplementedError if `type` is an integer. kernel: as CUDA's message names it.
void refuse_integers(const char* kernel, at::ScalarType type);

// The place in the program that shrank `storage`: " freed by resize_(0) at" and lines. Empty if nothing shrank it.
std::string why_too_small(const c10::Storage& storage);

// Returns `memory` with a note, which errors quote, of the place in the program that shrank its storage.
c10::DataPtr note_shrinking(c10::DataPtr memory);

// Visits the tensors in an argument or a result, lists included.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) {
        visit(element.toTensor());
      }
    }
  }
}

// Replaces every tensor in an argument or a result, lists included.
template <typename Replace>
void replace_tensors(c10::IValue& value, Replace&& replace) {
  if (value.isTensor()) {
    value = replace(std::move(value).toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    value = c10::IValue(); // so that nothing else holds the tensors
    c10::List<at::Tensor> replaced;
    for (auto& tensor : tensors) {
      replaced.push_back(replace(std::move(tensor)));
    }
    value = std::move(replaced);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (auto& tensor : value.toOptionalTensorVector()) {
      replaced.push_back(tensor.has_value() ? std::make_optional(replace(std::move(*tensor))) : std::nullopt);
    }
    value = std::move(replaced);
  }
}

// Facts that the fallback needs about an operator, derived once from its schema.
struct OperatorFacts {
  std::string name;
  std::vector<bool> written;  // per argument: the operator writes to it
  std::vector<bool> fresh;    // per result: none of the arguments, nor a view of one
  bool is_view = false;       // touches no memory: results are views of arguments, or it compares metadata
  bool host_reads = false;    // the op synchronizes: its result is on the host, its size depends on data, or it raises
  int check_errors = -1;      // position of the argument that makes it raise, so that it synchronizes; -1 without one
  int reads_by = -1;          // position of the argument that decides whether the op synchronizes; -1 without one
  int generator = -1;         // position of the Generator argument, -1 without one
  bool makes_results = false; // some result is a new tensor
  bool may_convert = false;   // has an argument `dtype`, to which it converts its input first
  bool has_host_kernel = false;
  bool host_indices = false; // tensors in its tensor lists may live on the host
  bool is_indexing = false;  // its tensor lists are indices
  Refusals refusals;
};

const OperatorFacts& facts_of(const c10::OperatorHandle& op);

// The device of all tensors in `arguments`; the current device without a tensor. Raises RuntimeError if they are on
// several, and AcceleratorError for a tensor whose memory is gone (Note [Bounds]).
c10::DeviceIndex common_device(
    const OperatorFacts& facts, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

// Whether the host waits for the stream in this call, because it reads values or must move some to the device.
bool host_waits(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments);

// Raises RuntimeError. what: the checked arguments, for the message.
[[noreturn]] void refuse_devices(
    c10::Device common, c10::Device other, std::string_view argument, std::string_view name);

// Raises NotImplementedError: `op` has no kernel for tensors of a sparse layout.
[[noreturn]] void refuse_sparse(const c10::OperatorHandle& op);

} // namespace torch_ext::sim
