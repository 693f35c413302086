#include "kernel_scope.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstring>
#include <string_view>

#include "allocator.h"

namespace torch_ext::sim {
namespace {

constexpr c10::DeviceIndex kNoKernel = -1;

thread_local c10::DeviceIndex kernel_device = kNoKernel;
thread_local std::string_view kernel_name;

class HostOverride final : public c10::Allocator {
 public:
  explicit HostOverride(c10::Allocator* host) { host_ = host; }
  c10::DataPtr allocate(size_t nbytes) override {
    if (kernel_device == kNoKernel) {
      return host_->allocate(nbytes);
    }
    return allocate_on(kernel_device, nbytes, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_raw; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  // Raw memory may be freed outside the scope it was allocated in (libraries keep scratch space), so the pointer itself
  // has to say where it came from.
  static void delete_raw(void* data) {
    if (device_of_pointer(data).has_value()) {
      free_on_device(data);
    } else {
      host_->raw_deleter()(data);
    }
  }

  static c10::Allocator* host_;
};

c10::Allocator* HostOverride::host_ = nullptr;

} // namespace

KernelScope::KernelScope(c10::DeviceIndex device, std::string_view name) noexcept
    : previous_(kernel_device), previous_name_(kernel_name) {
  kernel_device = device;
  kernel_name = name;
}

KernelScope::~KernelScope() {
  kernel_device = previous_;
  kernel_name = previous_name_;
}

bool in_kernel() noexcept {
  return kernel_device != kNoKernel;
}

std::string_view current_kernel() noexcept {
  return kernel_name;
}

void install_host_override() {
  // Torch registers its own allocator with priority 0; a higher one wins and stays.
  constexpr uint8_t kPriority = 1;
  c10::SetCPUAllocator(new HostOverride(c10::GetCPUAllocator()), kPriority);
}

} // namespace torch_ext::sim
