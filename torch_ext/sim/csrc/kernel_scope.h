// Gives a device the memory that host kernels allocate while they work for it.
//
// Note [All memory in the arena]
// A host kernel that works for a device allocates its results and temporaries with torch's host allocator. An override
// stands in front of that allocator and, inside a KernelScope, serves from the device's pool instead; the fallback then
// relabels results as device memory without a copy. So statistics, limit and poison see every byte. Allocations on
// worker threads inside a kernel's parallel region are the exception: the flag is per thread.
#pragma once

#include <string_view>

#include "device.h"

namespace torch_ext::sim {

// While alive, host allocations of this thread come from the pool of `device`.
class KernelScope {
 public:
  // name: of the kernel; must outlive the object.
  KernelScope(c10::DeviceIndex device, std::string_view name) noexcept;
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  c10::DeviceIndex previous_;
  std::string_view previous_name_;
};

// Whether this thread is working for a device.
bool in_kernel() noexcept;

// The name of the kernel that this thread is working on; empty outside of one.
std::string_view current_kernel() noexcept;

// Puts the allocator that obeys KernelScope in front of torch's host allocator. Called once, when the library loads.
void install_host_override();

} // namespace torch_ext::sim
