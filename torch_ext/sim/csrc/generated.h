// Kernels that Inductor generates: see Note [Generated kernels] in _inductor.py.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

void bind_generated(pybind11::module_& m);

} // namespace torch_ext::sim
