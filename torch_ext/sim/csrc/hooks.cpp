// What torch's device-neutral code asks of an accelerator.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "allocator.h"
#include "bounds.h"
#include "device.h"
#include "generator.h"
#include "kernel.h"
#include "pinned_memory.h"

namespace torch_ext::sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return is_initialized(); }
  void init() const override { ensure_initialized(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(checked_index(device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device();
    set_current_device(checked_index(device));
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(checked_index(device));
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto device = device_of_pointer(data);
    TORCH_CHECK(device.has_value(), "The pointer ", data, " is not memory of a sim device.");
    return {kSim, *device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_bytes(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

} // namespace

void resize_bytes(c10::StorageImpl& storage, size_t nbytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const auto device = storage.device();
  c10::DataPtr fresh = allocate_on(device.index(), nbytes, device);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0 && storage.data() != nullptr) {
    Kernel kernel("aten::resize_");
    kernel.on(device.index()).reads(storage.data(), kept).writes(fresh.get(), kept).launch();
    std::memcpy(fresh.mutable_get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(nbytes < storage.nbytes() ? note_shrinking(std::move(fresh)) : std::move(fresh));
  storage.set_nbytes(nbytes);
}

void install_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

} // namespace torch_ext::sim
