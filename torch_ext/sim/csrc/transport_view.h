// Views for the transport: the host tensors that it moves in place of the device tensors of a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch_ext::sim {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// An alias in one dimension, in the order of memory: ranks have to agree on the number of elements only. Raises
// RuntimeError for a tensor that is not on a sim device, ValueError for one with holes and AcceleratorError for one
// whose memory is gone (Note [Bounds] in bounds.h). name: of the operation, for messages.
at::Tensor transport_view(const at::Tensor& tensor, const std::string& name);
Tensors transport_view(const Tensors& tensors, const std::string& name);

// The parts of a tensor's view for each of `parts` ranks, equal in size.
Tensors transport_parts(const at::Tensor& tensor, int64_t parts, const std::string& name);

// Likewise, of as many rows (slices of dimension 0) as `rows` says, rank by rank; in equal parts where it is empty.
// Raises ValueError where the rows do not add up.
Tensors transport_rows(
    const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t parts, const std::string& name);

std::vector<int64_t> numels(const Tensors& tensors);

} // namespace torch_ext::sim
