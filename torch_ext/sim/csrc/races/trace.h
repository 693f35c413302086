// The checker for tests: fed with events by hand, over memory that does not exist.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_ext::sim::races {

// Adds the class RaceTrace to the native module.
void bind_trace(pybind11::module& m);

} // namespace torch_ext::sim::races
