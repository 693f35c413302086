// What torch's memory visualizer reads: blocks of all devices and the trace of allocations, as Python objects.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

void bind_memory_snapshot(pybind11::module_& m);

} // namespace torch_ext::sim
