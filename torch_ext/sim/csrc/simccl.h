// The process group backend `simccl`: see simccl.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

void bind_simccl(pybind11::module_& m);

} // namespace torch_ext::sim
