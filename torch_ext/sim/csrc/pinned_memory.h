// Pinned host memory: see pinned_memory.cpp. Safe to call from any thread.
#pragma once

#include <c10/core/Allocator.h>

#include "device.h"

namespace torch_ext::sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
void install_pinned_allocator();

} // namespace torch_ext::sim
