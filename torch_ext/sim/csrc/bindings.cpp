// The native module. Loading it registers the device and starts nothing: see device.h.
#include "bindings.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "device.h"
#include "dry.h"
#include "generator.h"
#include "kernel.h"
#include "machine_memory.h"
#include "profiler.h"
#include "std.h"
#include "stream.h"
#include "symmetric_memory.h"

namespace torch_ext::sim {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;
using c10::DeviceIndex;

// --- kernels that Inductor generates: see Note [Generated kernels] in _inductor.py ---

// roles: a letter for each argument: r for a read tensor, w for a written one, any other letter for a number.
pybind11::object run_generated(
    const pybind11::function& code, const std::string& name, const std::string& roles,
    const pybind11::args& arguments) {
  TORCH_INTERNAL_ASSERT(roles.size() == arguments.size(), name, " was generated with other arguments");
  Kernel kernel(name);
  for (size_t i = 0; i < roles.size(); ++i) {
    if (roles[i] == 'r' || roles[i] == 'w') {
      const auto tensor = arguments[i].cast<at::Tensor>();
      const bool is_number = tensor.device().type() == c10::DeviceType::CPU && tensor.dim() == 0;
      if (!is_number) {
        roles[i] == 'w' ? kernel.writes(tensor) : kernel.reads(tensor);
      }
    }
  }
  kernel.launch();
  return is_dry() ? pybind11::object(pybind11::none()) : code(*arguments);
}

// --- device memory that processes share: see Note [Shared tensors] in _sharing.py ---

void release_host(void* context) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context));
}

// Memory of a host storage, as memory of a device.
c10::DataPtr memory_of(const c10::Storage& host, c10::Device device) {
  void* data = host.mutable_data();
  auto* context = c10::Storage(host).unsafeReleaseStorageImpl();
  return {data, context, &release_host, device};
}

c10::Storage storage_from(const py::handle& object) {
  return torch::createStorage(object.ptr());
}

py::object to_python(const c10::Storage& storage) {
  return py::reinterpret_steal<py::object>(torch::createPyObject(storage));
}

// The host storage whose memory `device_storage` uses; None if it does not use shared memory.
py::object shared_host_storage(const py::handle& device_storage) {
  const auto& memory = storage_from(device_storage).data_ptr();
  if (memory.get_deleter() != &release_host) {
    return py::none();
  }
  auto* host = static_cast<c10::StorageImpl*>(memory.get_context());
  return to_python(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host)));
}

// Moves the bytes of `device_storage` to `host_storage`, of the same size, and makes `device_storage`, and so every
// tensor on it, use them there.
void move_to_shared(const py::handle& device_storage, const py::handle& host_storage) {
  const auto storage = storage_from(device_storage), host = storage_from(host_storage);
  const auto device = storage.device();
  TORCH_INTERNAL_ASSERT(host.nbytes() == storage.nbytes());
  {
    Kernel kernel("aten::share_memory_");
    kernel.on(device.index()).reads(storage.data(), storage.nbytes()).host_reads().launch();
    std::memcpy(host.mutable_data(), storage.data(), storage.nbytes());
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(memory_of(host, device));
}

py::object storage_over(const py::handle& host_storage, c10::DeviceIndex index) {
  const auto host = storage_from(host_storage);
  const c10::Device device(kSim, checked_index(index));
  return to_python(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), host.nbytes(), memory_of(host, device), device_allocator(),
          /*resizable=*/false));
}

// --- storages, which torch makes and resizes for CUDA in code that builds without CUDA lack ---

py::object new_storage(size_t nbytes, c10::DeviceIndex index) {
  ensure_initialized();
  const c10::DeviceGuard current(c10::Device(kSim, checked_index(index)));
  return to_python(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), nbytes, device_allocator(), /*resizable=*/true));
}

} // namespace

PYBIND11_MODULE(_native, m) {
  install_guard();
  install_hooks();
  install_pinned_allocator();
  install_allocator();
  symmetric::install();
  register_profiler();

  // Functions of `torch.sim` have their documentation here.
  m.def(
      "request_devices", &request_devices, "count"_a,
      "Ask for at least ``count`` devices. ``TORCH_EXT_SIM_DEVICES`` takes precedence if it is set. Initialises "
      "nothing, and has no effect once this process has used a device.\n\n"
      "Raises:\n    ValueError: ``count`` is not between 1 and 64.");
  m.def(
      "device_count", &device_count,
      "Return the number of devices: ``TORCH_EXT_SIM_DEVICES`` if it is set, otherwise as many as were requested, and "
      "at least 4. The first use of a device fixes the number; asking for it does not.");
  m.def("index_among_all", [](DeviceIndex index) { return index_among_all(checked_index(index)); });
  m.def("current_device", &current_device, "Return the index of the current device of this thread.");
  m.def("set_device", [](DeviceIndex index) { set_current_device(checked_index(index)); });
  m.def("init", &ensure_initialized, "Initialise the device, as its first use would.");
  m.def("is_initialized", &is_initialized, "Whether this process has used a device.");
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("default_generator", &default_generator);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_limit", [](DeviceIndex index) { return pool_of(index).amounts().limit; });
  m.def("set_memory_fraction", [](DeviceIndex index, double fraction) { pool_of(index).set_fraction(fraction); });
  m.def("memory_fraction", [](DeviceIndex index) { return pool_of(index).fraction(); });
  m.def("fail_allocation", &fail_allocation);
  m.def("set_poison", [](bool enabled) { set_poison(PoisonFor::kUser, enabled); });
  m.def("use_memory_page", &use_memory_page);
  m.def("machine_memory", [] {
    const auto memory = machine_memory();
    return std::make_tuple(memory.cap, memory.run, memory.process);
  });
  m.def("before_finalization", &before_finalization, py::call_guard<py::gil_scoped_release>());
  m.def("stream_priority", &priority_of);
  m.def("stream_with_handle", [](DeviceIndex device, uintptr_t handle) {
    return stream_with_handle(checked_index(device), handle);
  });
  m.def("set_sync_debug", [](int mode) { sync_debug = static_cast<SyncDebug>(mode); });
  m.def("get_sync_debug_mode", [] { return static_cast<int>(sync_debug.load()); }, "Return the mode as a number.");
  m.def("sleep", &sleep);
  m.def("stop_stream_clock", &stop_stream_clock);
  m.def("run_generated", &run_generated);
  m.def("shared_host_storage", &shared_host_storage);
  m.def("move_to_shared", &move_to_shared);
  m.def("storage_over", &storage_over);
  m.def("new_storage", &new_storage);
  m.def("resize_storage", [](const py::handle& storage, size_t nbytes) {
    resize_bytes(*storage_from(storage).unsafeGetStorageImpl(), nbytes);
  });
  bind_memory_history(m);
  bind_pinned_memory(m);
  bind_simccl(m);
  bind_faults(m);
  bind_gloo_factory(m);
  bind_rpc_agent(m);
  bind_flight_record(m);
  bind_graphs(m);
  bind_mem_pools(m);
  bind_observer_log(m);
  bind_clock(m);
  bind_dry(m);
  bind_disk(m);
  symmetric::bind_signals(m);
  races::bind_races(m);
}

} // namespace torch_ext::sim
