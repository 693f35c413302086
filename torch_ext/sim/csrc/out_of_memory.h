// What a program is told when a device runs out of memory.
#pragma once

#include <cstddef>

#include "block_pool.h"

namespace torch_ext::sim {

// Raises OutOfMemoryError, which says whose memory is short and what holds that of `pool`. Called with no lock held.
[[noreturn]] void raise_out_of_memory(BlockPool& pool, size_t nbytes, Short whose);

} // namespace torch_ext::sim
