// The parts of the native module, file by file: each function is called once, when the library loads.
#pragma once

#include "std.h"

namespace torch_ext::sim {

// Gives `storage` new memory of `nbytes` and keeps what fits; 0 frees it.
void resize_bytes(c10::StorageImpl& storage, size_t nbytes); // memory_ops.cpp

void install_guard();            // stream.cpp
void install_hooks();            // memory_ops.cpp
void install_pinned_allocator(); // pinned_memory.cpp
void install_allocator();        // allocator.cpp

void bind_memory_history(pybind11::module_& m); // snapshots for torch's memory visualizer
void bind_pinned_memory(pybind11::module_& m);
void bind_simccl(pybind11::module_& m);
void bind_faults(pybind11::module_& m);       // transport/transport.cpp
void bind_gloo_factory(pybind11::module_& m); // transport/choice.cpp
void bind_rpc_agent(pybind11::module_& m);    // defines the agent's class once torch has registered its base
void bind_flight_record(pybind11::module_& m);
void bind_graphs(pybind11::module_& m);    // graph.cpp
void bind_mem_pools(pybind11::module_& m); // mem_pool.cpp
void bind_observer_log(pybind11::module_& m);
void bind_clock(pybind11::module_& m);
void bind_dry(pybind11::module_& m);
void bind_disk(pybind11::module_& m);

// A Python exit function: see Note [Threads at exit] in finalization.cpp. Call it without the GIL, from the thread that
// will finalize Python. Never raises.
void before_finalization() noexcept;

namespace races {
void bind_races(pybind11::module_& m); // races/report.cpp
} // namespace races

} // namespace torch_ext::sim
