// Dry runs: the memory and the time of a program, without its values.
//
// Note [Dry runs]
// In a dry run host kernels get tensors of the meta device in place of aliases of device memory (alias.cpp), so that
// torch's shape functions run instead of kernels. Results are allocated, kernels and collectives take virtual time and
// obey the checks for devices, bounds and groups; but no page of device memory is read or written. A group has no peers
// (transport/dry.cpp). What depends on values asks `assumed`: host reads, and sizes of results that depend on data.
//
// Memory of the host stays real. The machine's memory bounds nothing, because pages stay untouched; past the memory of
// a device the allocator goes on, so that a run says how much is missing (BlockPool::take_beyond).
#pragma once

#include "std.h"

namespace torch_ext::sim {

extern std::atomic<bool> dry_run; // set before the first use of a device, and never unset

inline bool is_dry() noexcept {
  return dry_run.load(std::memory_order_relaxed);
}

// In a dry run: what `kernel` would read of a device. None: the host's value is right as it is, because no rank has
// another one. Raises RuntimeError if the program's user has given no value, or if the kernel needs a size; not for a
// mask that torch itself fills with ones.
std::optional<double> assumed(std::string_view kernel, bool is_size = false);

} // namespace torch_ext::sim
