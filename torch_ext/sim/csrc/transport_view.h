// Views for the transport: the host tensors that it moves in place of the device tensors of a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ext::sim {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// An alias in one dimension, in the order of memory: ranks have to agree on the number of elements only. Raises
// RuntimeError for a tensor that is not on a sim device and ValueError for one with holes.
at::Tensor transport_view(const at::Tensor& tensor);
Tensors transport_view(const Tensors& tensors);

// The parts of a tensor's view for each of `parts` ranks, equal in size.
Tensors transport_parts(const at::Tensor& tensor, int64_t parts);

// Likewise, of as many rows (slices of dimension 0) as `rows` says, rank by rank; in equal parts where it is empty.
// Raises ValueError where the rows do not add up.
Tensors transport_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t parts);

std::vector<int64_t> numels(const Tensors& tensors);

} // namespace torch_ext::sim
