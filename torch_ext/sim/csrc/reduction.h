// Reductions that the transport lacks, built from those that it has.
//
//   wanted                   before                 transport     after
//   AVG                      -                      SUM           divide by the group's size (integers: towards zero)
//   PREMUL_SUM(f)            multiply by f          SUM           -
//   bool SUM, MAX, BOR       as bytes               MAX           -
//   bool PRODUCT, MIN, BAND  as bytes               MIN           -
//   bool BXOR                as bytes               BXOR          -
//   complex SUM, AVG         as pairs of reals      SUM           as above
//   int16, uint16            as int32               same          convert back
//   uint32, uint64           as int64               same          convert back
//   float8                   as float32             same          convert back
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace torch_ext::sim {

class Reduction {
 public:
  // Raises ValueError for a combination that has no meaning, such as AVG of booleans.
  Reduction(const c10d::ReduceOp& wanted, at::ScalarType type, int group_size);

  c10d::ReduceOp::RedOpType wanted() const { return wanted_; }
  const c10d::ReduceOp& transport_op() const { return op_; }

  // For a transport that copies what it reduces: the elements that ranks combine, in one dimension. Over the memory of
  // `host` where nothing has to be changed, so it must not be written.
  at::Tensor source(const at::Tensor& host) const;
  uint64_t source_bytes(const at::Tensor& host) const;

  // Where the combined elements go, in one dimension: over the memory of `host`, or for a type that has to be converted
  // in memory of its own. `finish` turns them into the result.
  at::Tensor target(const at::Tensor& host) const;

  // The tensor to reduce: over the memory of `host` where possible, otherwise a converted copy. Applies the factor.
  at::Tensor prepare(const at::Tensor& host) const;

  // Like `prepare`, but never over the memory of `host`.
  at::Tensor prepare_copy(const at::Tensor& host) const;

  // Turns the reduced `buffer` (as prepared, or a slice of it) into the result in `host`.
  void finish(const at::Tensor& buffer, const at::Tensor& host) const;

 private:
  at::Tensor same_bytes(const at::Tensor& host) const;
  void scale(at::Tensor& buffer) const;

  c10d::ReduceOp::RedOpType wanted_;
  c10d::ReduceOp op_;
  at::ScalarType type_;
  std::optional<at::ScalarType> staging_type_;
  std::optional<at::Tensor> factor_;
  int divisor_ = 1;
};

} // namespace torch_ext::sim
