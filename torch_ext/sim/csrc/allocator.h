// Device memory as torch sees it: the allocator of each device (block_pool.h) behind torch's interfaces, with a limit,
// and poisoning on demand.
//
// Ownership: a block belongs to the DataPtr that carries its address as context and returns to its pool when that dies.
// All functions are safe to call from any thread.
//
// Note [Results in the arena]
// A host kernel allocates results and temporaries with torch's host allocator. Our override of that allocator serves
// them from the device's pool inside a KernelScope that makes results; the fallback then relabels results as device
// memory without a copy. The scope is per thread, so worker threads of a kernel's parallel region allocate on the host.
//
// Note [Scratch memory]
// A device's kernel converts types as it reads. So the temporaries of a host kernel count against the host:
//
//   results exist already     All allocations come from the host. Most operators run this way: torch makes the result
//                             on the device, then calls the `out=` form.
//   kernel makes results      Allocations come from the device's pool, as results must. A block counts in statistics
//                             once its tensor turns out to be a result.
//   input is converted first  `sum`, `cumsum` and others with an argument `dtype` make that copy on GPUs too. All
//                             allocations count. GPUs sum half precision in float without a copy.
#pragma once

#include "block_pool.h"
#include "device.h"
#include "std.h"

namespace torch_ext::sim {

c10::DeviceAllocator* device_allocator();

// Memory of `device` behind a DataPtr that names `owner` as its device (the device itself, or the host for an alias).
// With `may_be_scratch`, it counts in statistics after `count_result` only.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes, c10::Device owner, bool may_be_scratch = false);

// Counts the block at `data`, which a kernel allocated, in statistics. Does nothing for other memory.
void count_result(const void* data);

// The allocator of aliases: a kernel that grows one gets memory of its device.
c10::Allocator* alias_allocator();

// Keeps the block at `data`, freed or not, from being handed out again before `operation` is over.
void keep_until_over(const void* data, const std::shared_ptr<Elsewhere>& operation);

// The pool of `device`, or of the current one for -1.
BlockPool& pool_of(c10::DeviceIndex device);
void set_memory_limit(c10::DeviceIndex device, size_t nbytes);

// Fills fresh and freed blocks with 0xff bytes while either party has it on: NaN in every float type, -1 in signed
// integers.
enum class PoisonFor : uint8_t { kUser, kRaces };
void set_poison(PoisonFor whom, bool enabled);

// Fails the `number`-th allocation on any device from now on, as if memory was short; 0: none.
void fail_allocation(int64_t number);

// The device whose live block contains `pointer`.
std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer);

// What a kernel's allocations are: see Note [Scratch memory].
enum class Allocations : uint8_t { kScratch, kMayBeResults, kCounted };

struct RunningKernel {
  c10::DeviceIndex device = -1; // -1: none is running
  std::string_view name;
  Allocations allocations = Allocations::kMayBeResults;
};

// The kernel that this thread is running.
extern constinit thread_local RunningKernel running_kernel;

// While alive, host allocations of this thread are those of a kernel.
class KernelScope {
 public:
  // name: of the kernel; must outlive the object.
  KernelScope(c10::DeviceIndex device, std::string_view name, Allocations allocations) noexcept
      : previous_(std::exchange(running_kernel, {device, name, allocations})) {}
  ~KernelScope() { running_kernel = previous_; }
  C10_DISABLE_COPY_AND_ASSIGN(KernelScope);

 private:
  const RunningKernel previous_;
};

} // namespace torch_ext::sim
