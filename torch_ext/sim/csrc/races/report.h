// What Python sees of the checker: start, stop, and the races found.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_ext::sim::races {

void bind_races(pybind11::module& m);

} // namespace torch_ext::sim::races
