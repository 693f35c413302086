// What travels: the host tensors that a transport gets in place of the device tensors of a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ext::sim {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// An alias in row-major order, of the tensor's own sizes where it is contiguous and in one dimension elsewhere. Raises
// RuntimeError for a tensor that is not on a sim device and ValueError for one with holes.
at::Tensor checked_alias(const at::Tensor& tensor);

// For transfers that do not compute: as `checked_alias`, but element types that the transport does not know travel as
// bytes. Keeps dimension 0 of tensors with more than one, whose rows may be split.
at::Tensor movable_rows(const at::Tensor& tensor);

// As `movable_rows`, in one dimension, since only the number of elements has to agree between ranks.
at::Tensor movable(const at::Tensor& tensor);
Tensors movable(const Tensors& tensors);
TensorLists movable(const TensorLists& lists);

// `splits` of the rows of `tensor` as those of `host`, its `movable_rows`: where rows of one dimension travel as bytes
// they count bytes.
std::vector<int64_t> movable_splits(std::vector<int64_t> splits, const at::Tensor& tensor, const at::Tensor& host);

} // namespace torch_ext::sim
