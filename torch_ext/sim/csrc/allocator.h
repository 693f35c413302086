// Device memory: one pool per device (block_pool.h), with statistics, a limit, and poisoning on demand.
//
// Ownership: a block belongs to the DataPtr that carries it as context and returns to its pool when that dies. Pools
// are never destroyed, because tensors may outlive every static object. All functions are safe to call from any thread.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "block_pool.h"
#include "device.h"

namespace torch_ext::sim {

// Every block is rounded up to a multiple of this many bytes, as on GPUs, so that memory numbers are comparable.
constexpr size_t kRoundBytes = 512;

c10::DeviceAllocator* device_allocator();

// Memory of `device` behind a DataPtr that names `owner` as its device (the device itself, or the host for an alias).
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes, c10::Device owner);

// Returns the memory at `data`, which came from `allocate_on`, to its pool. A DataPtr does so by itself.
void free_on_device(void* data);

void set_memory_limit(c10::DeviceIndex device, size_t nbytes);
size_t memory_limit(c10::DeviceIndex device);

// Allows a part of the memory, 0 to 1, as torch.cuda.set_per_process_memory_fraction does.
void set_memory_fraction(c10::DeviceIndex device, double fraction);
double memory_fraction(c10::DeviceIndex device);

std::vector<BlockFacts> blocks_on(c10::DeviceIndex device);

// Fill fresh and freed blocks with 0xff bytes, as long as somebody wants it: NaN in every float type, -1 in signed
// integers.
enum class PoisonFor : uint8_t { kUser, kRaces };
void set_poison(PoisonFor whom, bool enabled);

// The device whose live block contains `pointer`.
std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer);

// Makes this the allocator of sim devices. Called once, when the library loads.
void install_allocator();

} // namespace torch_ext::sim
