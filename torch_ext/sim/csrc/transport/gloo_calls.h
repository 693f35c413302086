// How gloo expresses the collectives of a transport.
//
// What gloo lacks is made of what it has: element types that it does not know travel as bytes, lists of unequal sizes
// as broadcasts, a reduce-scatter as an all-reduce.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <vector>

#include "transport.h"

namespace torch_ext::sim {

// gloo's works of a collective, and the step that runs once when all of them have succeeded.
struct GlooWorks {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::function<void()> then = nullptr;
};

// Begins a collective, and does not wait. A barrier has nothing to begin: ranks meet when they compare what they
// called.
GlooWorks begin_on_gloo(c10d::Backend& gloo, Call& call);

} // namespace torch_ext::sim
