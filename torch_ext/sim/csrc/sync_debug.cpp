#include "sync_debug.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <string_view>

namespace torch_ext::sim {
namespace {

std::atomic<SyncDebug> current_mode{SyncDebug::kOff};

} // namespace

void set_sync_debug(SyncDebug mode) noexcept {
  current_mode = mode;
}

SyncDebug sync_debug() noexcept {
  return current_mode.load(std::memory_order_relaxed);
}

void tell_host_blocks(std::string_view what) {
  if (C10_LIKELY(sync_debug() == SyncDebug::kOff)) {
    return;
  }
  TORCH_CHECK(sync_debug() != SyncDebug::kError, "called a synchronizing sim operation: ", what);
  TORCH_WARN("called a synchronizing sim operation: ", what);
}

} // namespace torch_ext::sim
