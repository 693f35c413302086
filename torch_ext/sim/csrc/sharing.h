// Device memory that processes share: see Note [Shared tensors] in _sharing.py.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

void bind_sharing(pybind11::module_& m);

} // namespace torch_ext::sim
