// Device tensors in RPC: the agent that torch_ext/sim/_rpc.py makes where workers have device maps.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ext::sim {

// Adds the agent's class to the module, once torch has registered those that it derives from.
void bind_rpc_agent(pybind11::module_& m);

} // namespace torch_ext::sim
