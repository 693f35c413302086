// Pinned host memory: see pinned_memory.cpp. Safe to call from any thread.
#pragma once

#include <c10/core/Allocator.h>

#include <pybind11/pybind11.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

struct PinnedBlock {
  const void* start;
  uint64_t serial; // no other block of the process has, or will have, the same
};

// The live block that contains `pointer`.
std::optional<PinnedBlock> pinned_block_at(const void* pointer);

// How many blocks have ever been made. Cheap.
uint64_t pinned_blocks_made();
void install_pinned_allocator();

void bind_pinned_memory(pybind11::module_& m);

} // namespace torch_ext::sim
