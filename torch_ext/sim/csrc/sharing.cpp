#include "sharing.h"

#include <c10/core/StorageImpl.h>
#include <torch/csrc/DynamicTypes.h>

#include <cstring>

#include "allocator.h"
#include "device.h"
#include "kernel.h"

namespace torch_ext::sim {
namespace {

namespace py = pybind11;

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

// The host storage whose memory `device_storage` has been given; None where it has memory of its own.
py::object shared_host_storage(const py::handle& device_storage) {
  const auto& memory = storage_from(device_storage).data_ptr();
  if (memory.get_deleter() != &release_host) {
    return py::none();
  }
  c10::raw::intrusive_ptr::incref(static_cast<c10::StorageImpl*>(memory.get_context()));
  return to_python(
      c10::Storage(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(memory.get_context()))));
}

// Moves the bytes of `device_storage` to `host_storage`, of the same size, and lets it, and so every tensor on it, use
// them there.
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

py::object storage_over(const py::handle& host_storage, int index) {
  const auto host = storage_from(host_storage);
  const c10::Device device(kSim, checked_index(static_cast<c10::DeviceIndex>(index)));
  return to_python(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), host.nbytes(), memory_of(host, device), device_allocator(),
          /*resizable=*/false));
}

} // namespace

void bind_sharing(py::module_& m) {
  m.def("shared_host_storage", &shared_host_storage);
  m.def("move_to_shared", &move_to_shared);
  m.def("storage_over", &storage_over);
}

} // namespace torch_ext::sim
