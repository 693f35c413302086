// Whether tensors lie inside their storages.
//
// Note [Bounds]
// A storage can lose its memory, or part of it, while tensors still refer to it: FSDP frees parameters by
// `untyped_storage().resize_(0)`. Metadata of such a tensor may be asked for and views of it be made, as on a GPU. A
// kernel must not read or write it: a GPU ends the program with an illegal memory access, and a host would read on past
// the storage. So every kernel's tensors are looked at before it runs, and the error says where the memory went. The
// one exception to what GPUs do: a tensor that is passed as `out=`, and would be resized, is looked at as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_ext::sim {

// How many bytes from the start of its storage `tensor`, which has elements, reaches.
inline size_t reach_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  if (tensor.is_contiguous()) {
    last += tensor.numel() - 1;
  } else {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
  }
  return static_cast<size_t>(last + 1) * tensor.dtype().itemsize();
}

// True for tensors without elements or without a storage of their own.
inline bool is_in_bounds(const at::Tensor& tensor) {
  return tensor.numel() == 0 || !tensor.has_storage() || reach_of(tensor) <= tensor.storage().nbytes();
}

// Raises AcceleratorError for a defined tensor that is out of bounds. argument: its name, if that is known.
[[noreturn]] void refuse_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument = "");
inline void check_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument = "") {
  if (C10_UNLIKELY(!is_in_bounds(tensor))) {
    refuse_bounds(kernel, tensor, argument);
  }
}

// Where in the program `storage` was made smaller: " freed by resize_(0) at" and lines. Empty if it was not.
std::string why_too_small(const c10::Storage& storage);

// Returns `memory` with a note of where in the program its storage was made smaller, which errors quote.
c10::DataPtr note_shrinking(c10::DataPtr memory);

} // namespace torch_ext::sim
