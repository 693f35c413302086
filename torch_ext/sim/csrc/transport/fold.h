// Reduces the tensors of several ranks to one, in an order that does not depend on timing.
//
//   TORCH_EXT_SIM_REDUCE   order in which an element of ranks 0 to n-1 is combined
//   rank (default)         ((x0 + x1) + x2) + ...
//   ring                   in n equal parts, part p from rank p + 1 round to rank p, as rings do it
//   tree                   (x0 + x1) + (x2 + x3), ...
//   random:SEED            in an order drawn anew for each collective
//
// Partial results have the tensor's own type, as on the wire, and are rounded after each step.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "../std.h"

namespace torch_ext::sim {

struct FoldOrder {
  enum class Kind : uint8_t { kRank, kRing, kTree, kRandom };
  Kind kind = Kind::kRank;
  uint64_t seed = 0;

  // Raises ValueError for a text that is none of the above.
  static FoldOrder parse(const std::string& text);
};

struct Fold {
  FoldOrder order;
  c10d::ReduceOp::RedOpType op; // likewise
  at::ScalarType type;          // one that gloo has too
  uint64_t elements;            // of the whole tensor
  uint64_t number;              // of the collective

  // Writes elements [begin, end) of the result to `to`, the first of them at `to[0]`. from: the whole tensor of each
  // rank; `to` may lie in one of them.
  void run(std::byte* to, const std::vector<const std::byte*>& from, uint64_t begin, uint64_t end) const;
};

} // namespace torch_ext::sim
