// The host tensors that a transport moves and reduces in place of the device tensors of a collective.
//
// Reductions that a transport lacks are built from its own reductions:
//
//   wanted                   before                 transport     after
//   AVG                      -                      SUM           divide by the group's size (integers: towards zero)
//   PREMUL_SUM(f)            multiply by f          SUM           -
//   bool SUM, MAX, BOR       as bytes               MAX           -
//   bool PRODUCT, MIN, BAND  as bytes               MIN           -
//   bool BXOR                as bytes               BXOR          -
//   complex SUM, AVG         as pairs of reals      SUM           as above
//   float8                   as float32             same          convert back
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "std.h"

namespace torch_ext::sim {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// An unowned alias in one dimension, in memory order: ranks have to agree on the number of elements only. Raises
// RuntimeError for a tensor that is not on a sim device, ValueError for one with holes and AcceleratorError for one
// whose memory is gone (Note [Bounds] in checks.h). name: of the operation, for messages.
at::Tensor transport_view(const at::Tensor& tensor, const std::string& name);
Tensors transport_view(const Tensors& tensors, const std::string& name);

// The same for the tensors of a list, in the order of their elements: those that are not contiguous keep their strides,
// with holes or without. As NCCL, which copies a list to or from one flat tensor; but tensors of unequal sizes are
// `transport_view`s.
Tensors transport_list(const Tensors& tensors, const std::string& name);

// Raises ValueError, as ProcessGroupNCCL does for tensors that it hands over as they are.
void check_contiguous(const Tensors& tensors);

// The parts of a tensor's view for each of `parts` ranks, equal in size.
Tensors transport_parts(const at::Tensor& tensor, int64_t parts, const std::string& name);

// Likewise, with `rows[r]` rows (slices of dimension 0) for rank r; equal parts if `rows` is empty. Raises ValueError
// where the rows do not add up.
Tensors transport_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t parts);

std::vector<int64_t> numels(const Tensors& tensors);

// Raises for a reduction that ProcessGroupNCCL refuses, in its words.
void check_known_to_nccl(const c10d::ReduceOp& wanted, at::ScalarType type);

class Reduction {
 public:
  // Raises ValueError for a combination that has no meaning, such as AVG of booleans.
  Reduction(const c10d::ReduceOp& wanted, at::ScalarType type, int group_size);

  c10d::ReduceOp::RedOpType wanted() const { return wanted_; }
  const c10d::ReduceOp& transport_op() const { return op_; }

  // The elements that ranks combine, in one dimension. May alias `host`.
  at::Tensor source(const at::Tensor& host) const;
  uint64_t source_bytes(const at::Tensor& host) const;

  // The destination of the combined elements, in one dimension: aliases `host`, or is a separate tensor for a type that
  // has to be converted. `finish` turns the elements into the result.
  at::Tensor target(const at::Tensor& host) const;

  // Turns the reduced `buffer` (or a slice of it) into the result in `host`.
  void finish(const at::Tensor& buffer, const at::Tensor& host) const;

 private:
  at::Tensor same_bytes(const at::Tensor& host) const;

  c10d::ReduceOp::RedOpType wanted_;
  c10d::ReduceOp op_;
  at::ScalarType type_;
  std::optional<at::ScalarType> staging_type_;
  std::optional<at::Tensor> factor_;
  int divisor_ = 1;
};

} // namespace torch_ext::sim
