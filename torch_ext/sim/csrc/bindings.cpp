// The native module. Loading it registers the device and starts nothing: see device.h.
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <tuple>

#include "allocator.h"
#include "device.h"
#include "finalization.h"
#include "flight_record.h"
#include "generated.h"
#include "generator.h"
#include "hooks.h"
#include "kernel_scope.h"
#include "machine_memory.h"
#include "memory_snapshot.h"
#include "observer_log.h"
#include "pinned_memory.h"
#include "profiler.h"
#include "races/rank_threads.h"
#include "races/report.h"
#include "races/trace.h"
#include "rpc_agent.h"
#include "sharing.h"
#include "simccl.h"
#include "stream.h"
#include "sync_debug.h"

namespace torch_ext::sim {

PYBIND11_MODULE(_native, m) {
  install_guard();
  install_hooks();
  install_pinned_allocator();
  install_allocator();
  install_host_override();

  m.def("request_devices", &request_devices);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("index_among_all", [](int index) {
    return static_cast<int>(index_among_all(checked_index(static_cast<c10::DeviceIndex>(index))));
  });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int index) { set_current_device(checked_index(static_cast<c10::DeviceIndex>(index))); });
  m.def("check_index", [](int index) { checked_index(static_cast<c10::DeviceIndex>(index)); });
  m.def("init", &ensure_initialized);
  m.def("is_initialized", &is_initialized);
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_memory_limit", [](int index, size_t nbytes) {
    set_memory_limit(static_cast<c10::DeviceIndex>(index), nbytes);
  });
  m.def("memory_limit", [](int index) { return memory_limit(static_cast<c10::DeviceIndex>(index)); });
  m.def("use_memory_page", &use_memory_page);
  m.def("machine_memory", [] {
    const auto memory = machine_memory();
    return std::make_tuple(memory.cap, memory.run, memory.process);
  });
  m.def("before_finalization", &before_finalization, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("set_poison", [](bool enabled) { set_poison(PoisonFor::kUser, enabled); });
  m.def("set_memory_fraction", [](int index, double fraction) {
    set_memory_fraction(static_cast<c10::DeviceIndex>(index), fraction);
  });
  m.def("memory_fraction", [](int index) { return memory_fraction(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_sync_debug", [](int mode) { set_sync_debug(static_cast<SyncDebug>(mode)); });
  m.def("sync_debug", [] { return static_cast<int>(sync_debug()); });
  m.def("sleep", &sleep);
  bind_memory_snapshot(m);
  bind_pinned_memory(m);
  bind_sharing(m);
  register_profiler();
  bind_simccl(m);
  bind_rpc_agent(m);
  bind_flight_record(m);
  bind_observer_log(m);
  bind_generated(m);
  races::bind_races(m);
  races::bind_rank_threads(m);
  races::bind_trace(m);
}

} // namespace torch_ext::sim
