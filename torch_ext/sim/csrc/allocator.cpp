#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "device.h"
#include "kernel_observer.h"
#include "kernel_scope.h"
#include "machine_memory.h"
#include "memory_history.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr int kPoisonByte = 0xff;
constexpr const char* kLimitVariable = "TORCH_EXT_SIM_MEMORY";
constexpr size_t kDefaultLimit = size_t{16} << 30;

std::atomic<uint8_t> poison{0}; // one bit for each PoisonFor

using Pools = std::array<std::unique_ptr<BlockPool>, kMaxDevices>;

Pools& pools() {
  static auto* all = [] {
    const size_t limit = bytes_of_variable(kLimitVariable, kDefaultLimit);
    auto* created = new Pools();
    for (size_t index = 0; index < created->size(); ++index) {
      (*created)[index] = std::make_unique<BlockPool>(static_cast<c10::DeviceIndex>(index), limit);
    }
    return created;
  }();
  return *all;
}

BlockPool& pool_of(c10::DeviceIndex device) {
  return *pools().at(static_cast<size_t>(checked_index(device)));
}

// Takes addresses and sizes, not the block: once it is back in its pool another thread may own it.
void report(void* data, int64_t change, const Totals& totals, c10::DeviceIndex device) {
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, change, totals.allocated, totals.reserved, c10::Device(kSim, device));
  }
}

// While somebody wants poison, a block that is not held is poisoned throughout, so a request fills at most new memory.
void fill_with_poison(Block& block) {
  if (poison.load(std::memory_order_relaxed) != 0) {
    std::memset(block.data(), kPoisonByte, block.capacity);
    block.poisoned = true;
  }
}

// Before anybody else can own it.
void note(MemoryEvent::Kind kind, const Block& block) {
  if (is_recording_memory()) {
    note_memory({kind, block.pool->device(), block.data(), block.rounded, block.home, 0, 0, nullptr});
  }
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_on(current_device(), nbytes, c10::Device(kSim, current_device()));
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      pool_of(index).empty();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    checked_index(stream.device());
    // Memory may belong to another tensor, over whose storage this one was made, and need not be a device's at all.
    Block* block = data.get() == nullptr ? nullptr : block_at(data.get());
    if (block != nullptr) {
      block->pool->add_user(block, stream);
      tell([&](Observer& to) { to.used_on(block->data(), stream); });
    }
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return pool_of(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { pool_of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { pool_of(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t limit = pool_of(device).limit();
    const size_t reserved = pool_of(device).reserved();
    return {limit > reserved ? limit - reserved : 0, limit};
  }
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new Allocator();
  return allocator;
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes, c10::Device owner) {
  ensure_initialized();
  if (nbytes == 0) {
    return {nullptr, owner};
  }
  BlockPool& pool = pool_of(device);
  const auto [block, totals] = pool.take(nbytes, current_stream(pool.device()));
  if (!block->poisoned) {
    fill_with_poison(*block);
  }
  block->poisoned = false;
  block->tag = tag_of(current_kernel());
  report(block->data(), static_cast<int64_t>(block->rounded), totals, pool.device());
  note(MemoryEvent::Kind::kAllocate, *block);
  tell([&](Observer& to) { to.allocated(block->data(), block->rounded, current_stream(pool.device())); });
  return {block->data(), block->data(), &free_on_device, owner};
}

void free_on_device(void* data) {
  auto* block = Block::of(data);
  tell([&](Observer& to) { to.freed(data, block->pool->device()); });
  note(MemoryEvent::Kind::kFree, *block);
  fill_with_poison(*block);
  BlockPool& pool = *block->pool;
  const auto size = static_cast<int64_t>(block->rounded);
  const Totals totals = pool.give_back(block);
  report(data, -size, totals, pool.device());
}

void set_memory_limit(c10::DeviceIndex device, size_t nbytes) {
  // Said before the first use, it must not fix the devices: the program may choose them yet.
  if (!is_initialized() && !is_in_bad_fork() && device >= 0 && device < device_count()) {
    pools()[static_cast<size_t>(device)]->set_limit(nbytes);
    return;
  }
  pool_of(device).set_limit(nbytes);
}

size_t memory_limit(c10::DeviceIndex device) {
  return pool_of(device).limit();
}

void set_memory_fraction(c10::DeviceIndex device, double fraction) {
  pool_of(device).set_fraction(fraction);
}

double memory_fraction(c10::DeviceIndex device) {
  return pool_of(device).fraction();
}

std::vector<BlockFacts> blocks_on(c10::DeviceIndex device) {
  return pool_of(device).blocks();
}

void set_poison(PoisonFor whom, bool enabled) {
  const auto bit = static_cast<uint8_t>(1U << static_cast<uint8_t>(whom));
  if (enabled) {
    poison.fetch_or(bit);
  } else {
    poison.fetch_and(static_cast<uint8_t>(~bit));
  }
}

std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer) {
  const Block* block = block_at(pointer);
  if (block == nullptr || !block->live.load(std::memory_order_acquire)) {
    return std::nullopt;
  }
  return block->pool->device();
}

void install_allocator() {
  c10::SetAllocator(kSim, device_allocator());
}

} // namespace torch_ext::sim
