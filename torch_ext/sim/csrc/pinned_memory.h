// Pinned host memory: see pinned_memory.cpp. Safe to call from any thread.
#pragma once

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

c10::Allocator* pinned_allocator();

struct PinnedBlock {
  const void* start;
  uint64_t serial; // unique in the process, never used again
};

// The live block that contains `pointer`.
std::optional<PinnedBlock> pinned_block_at(const void* pointer);

// The number of blocks made so far. Cheap.
uint64_t pinned_blocks_made();

} // namespace torch_ext::sim
