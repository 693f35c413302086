// Views for the transport: the host tensors that it moves in place of the device tensors of a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ext::sim {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// An alias in row-major order, of the tensor's own sizes where it is contiguous and in one dimension elsewhere. Raises
// RuntimeError for a tensor that is not on a sim device and ValueError for one with holes.
at::Tensor checked_alias(const at::Tensor& tensor);

// For transfers that compute nothing: like `checked_alias`, but element types that the transport does not know travel
// as bytes. Keeps dimension 0 of a tensor with more than one dimension, whose rows may be split.
at::Tensor transport_rows(const at::Tensor& tensor);

// Like `transport_rows`, in one dimension, because ranks have to agree on the number of elements only.
at::Tensor transport_view(const at::Tensor& tensor);
Tensors transport_view(const Tensors& tensors);
TensorLists transport_view(const TensorLists& lists);

// Turns `splits`, counted in rows of `tensor`, into rows of `host`, its `transport_rows`. A 1D tensor that travels as
// bytes is split by bytes.
std::vector<int64_t> transport_splits(std::vector<int64_t> splits, const at::Tensor& tensor, const at::Tensor& host);

} // namespace torch_ext::sim
