// Tells of operations that block the host, where a program asks for it: torch.sim.set_sync_debug_mode.
//
// As with CUDA: host reads such as `item()` and `nonzero()`, copies between host and device that are not asked not to
// block, and `Stream.synchronize()`; not `torch.sim.synchronize()`, which says by its name what it does.
#pragma once

#include <cstdint>
#include <string_view>

namespace torch_ext::sim {

enum class SyncDebug : uint8_t { kOff, kWarn, kError };
void set_sync_debug(SyncDebug mode) noexcept;
SyncDebug sync_debug() noexcept;

// Warns, or raises RuntimeError. Called before the host blocks.
void tell_host_blocks(std::string_view what);

} // namespace torch_ext::sim
