// An observer that writes down what it is told, for tests and for looking at a program: `torch.sim` has no other use
// for it.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

void bind_observer_log(pybind11::module_& m);

} // namespace torch_ext::sim
