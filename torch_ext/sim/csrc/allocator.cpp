#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "kernel_observer.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kAlignment = 64;
constexpr size_t kSmallBytes = size_t{1} << 20;
constexpr size_t kDefaultLimit = size_t{16} << 30;
// Freed blocks are kept for the next request of the same size. Past this much idle memory they all go back to the host.
constexpr size_t kIdleBytes = size_t{512} << 20;
constexpr int kPoisonByte = 0xff;

std::atomic<bool> poison{false};

struct Pool;

// Stands in front of its data, so that a data pointer alone leads to it: kernels of libraries allocate raw memory,
// which torch's interface frees without a context.
struct alignas(kAlignment) Block {
  Pool* pool;
  size_t requested;
  size_t rounded;
  Block* previous = nullptr;
  Block* next = nullptr;

  void* data() { return this + 1; }
  const void* data() const { return this + 1; }
  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
};
static_assert(sizeof(Block) == kAlignment, "data must start aligned");

size_t round_up(size_t nbytes) {
  return (nbytes + kRoundBytes - 1) / kRoundBytes * kRoundBytes;
}

template <typename Change>
void update(StatArray& stats, const Block& block, Change change) {
  const auto kind = block.rounded <= kSmallBytes ? StatType::SMALL_POOL : StatType::LARGE_POOL;
  change(stats[static_cast<size_t>(StatType::AGGREGATE)]);
  change(stats[static_cast<size_t>(kind)]);
}

void increase(StatArray& stats, const Block& block, size_t amount) {
  update(stats, block, [amount](Stat& stat) { stat.increase(amount); });
}

void decrease(StatArray& stats, const Block& block, size_t amount) {
  update(stats, block, [amount](Stat& stat) { stat.decrease(amount); });
}

int64_t total(const StatArray& stats) {
  return stats[static_cast<size_t>(StatType::AGGREGATE)].current;
}

// What the profiler is told with every change, read under the pool's lock.
struct Totals {
  size_t allocated; // bytes
  size_t reserved;  // bytes
};

struct Pool {
  std::mutex mutex;
  c10::DeviceIndex device = 0;
  size_t limit = kDefaultLimit;
  size_t idle_bytes = 0;
  Block* live = nullptr;
  std::unordered_map<size_t, std::vector<Block*>> idle;
  DeviceStats stats;

  std::pair<Block*, Totals> take(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t rounded = round_up(nbytes);
    Block* block = take_idle(rounded);
    if (block == nullptr) {
      block = take_fresh(nbytes, rounded);
    }
    block->requested = nbytes;
    link(block);
    count_taken(*block);
    return {block, totals()};
  }

  Totals give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex);
    unlink(block);
    count_given_back(*block);
    idle[block->rounded].push_back(block);
    idle_bytes += block->rounded;
    if (idle_bytes > kIdleBytes) {
      release_idle();
    }
    return totals();
  }

  // Requires the lock. Returns every idle block to the host.
  void release_idle() {
    for (auto& [size, blocks] : idle) {
      for (Block* block : blocks) {
        decrease(stats.reserved_bytes, *block, block->rounded);
        decrease(stats.segment, *block, 1);
        stats.num_device_free += 1;
        std::free(block);
      }
    }
    idle.clear();
    idle_bytes = 0;
  }

 private:
  Totals totals() const {
    return {static_cast<size_t>(total(stats.allocated_bytes)), static_cast<size_t>(total(stats.reserved_bytes))};
  }

  Block* take_idle(size_t rounded) {
    const auto found = idle.find(rounded);
    if (found == idle.end() || found->second.empty()) {
      return nullptr;
    }
    Block* block = found->second.back();
    found->second.pop_back();
    idle_bytes -= rounded;
    return block;
  }

  Block* take_fresh(size_t nbytes, size_t rounded) {
    if (static_cast<size_t>(total(stats.reserved_bytes)) + rounded > limit && idle_bytes > 0) {
      stats.num_alloc_retries += 1;
      release_idle();
    }
    void* memory = nullptr;
    const size_t reserved = static_cast<size_t>(total(stats.reserved_bytes));
    if (reserved + rounded > limit || posix_memalign(&memory, kAlignment, sizeof(Block) + rounded) != 0) {
      raise_out_of_memory(nbytes);
    }
    auto* block = new (memory) Block{this, nbytes, rounded};
    increase(stats.reserved_bytes, *block, rounded);
    increase(stats.segment, *block, 1);
    stats.num_device_alloc += 1;
    return block;
  }

  [[noreturn]] void raise_out_of_memory(size_t nbytes) {
    stats.num_ooms += 1;
    const auto in_use = static_cast<size_t>(total(stats.reserved_bytes));
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", nbytes,
        " bytes. Device sim:", static_cast<int>(device), " has a capacity of ", limit, " bytes of which ",
        limit > in_use ? limit - in_use : 0, " bytes are free; ", total(stats.allocated_bytes),
        " bytes are allocated by tensors. Raise the capacity with torch.sim.set_memory_limit or free tensors.");
    std::abort(); // the check above always throws
  }

  void link(Block* block) {
    block->previous = nullptr;
    block->next = live;
    if (live != nullptr) {
      live->previous = block;
    }
    live = block;
  }

  void unlink(Block* block) {
    (block->previous != nullptr ? block->previous->next : live) = block->next;
    if (block->next != nullptr) {
      block->next->previous = block->previous;
    }
  }

  void count_taken(const Block& block) {
    increase(stats.allocation, block, 1);
    increase(stats.active, block, 1);
    increase(stats.allocated_bytes, block, block.rounded);
    increase(stats.active_bytes, block, block.rounded);
    increase(stats.requested_bytes, block, block.requested);
  }

  void count_given_back(const Block& block) {
    decrease(stats.allocation, block, 1);
    decrease(stats.active, block, 1);
    decrease(stats.allocated_bytes, block, block.rounded);
    decrease(stats.active_bytes, block, block.rounded);
    decrease(stats.requested_bytes, block, block.requested);
  }
};

std::array<Pool, kMaxDevices>& pools() {
  static auto* all = [] {
    auto* created = new std::array<Pool, kMaxDevices>();
    for (size_t index = 0; index < created->size(); ++index) {
      (*created)[index].device = static_cast<c10::DeviceIndex>(index);
    }
    return created;
  }();
  return *all;
}

Pool& pool_of(c10::DeviceIndex device) {
  return pools().at(static_cast<size_t>(checked_index(device)));
}

// Takes addresses and sizes, not the block: once it is back in its pool another thread may own it.
void report(void* data, int64_t change, const Totals& totals, c10::DeviceIndex device) {
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, change, totals.allocated, totals.reserved, c10::Device(kSim, device));
  }
}

template <typename Reset>
void for_each_stat(DeviceStats& stats, Reset reset) {
  for (StatArray* array :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (Stat& stat : *array) {
      reset(stat);
    }
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
      std::lock_guard<std::mutex> lock(pools()[index].mutex);
      pools()[index].release_idle();
    }
  }
  // Kernels run to their end before the call that started them returns, so no stream can still be using a block whose
  // last tensor dies; what is left to do is to refuse a stream of another device type.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    checked_index(stream.device());
    if (data.get() != nullptr) {
      tell([&](Observer& to) { to.used_on(data.get(), stream); });
    }
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Pool& pool = pool_of(device);
    std::lock_guard<std::mutex> lock(pool.mutex);
    return pool.stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Pool& pool = pool_of(device);
    std::lock_guard<std::mutex> lock(pool.mutex);
    for_each_stat(pool.stats, [](Stat& stat) { stat.reset_accumulated(); });
    pool.stats.num_alloc_retries = 0;
    pool.stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Pool& pool = pool_of(device);
    std::lock_guard<std::mutex> lock(pool.mutex);
    for_each_stat(pool.stats, [](Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Pool& pool = pool_of(device);
    std::lock_guard<std::mutex> lock(pool.mutex);
    const auto reserved = static_cast<size_t>(total(pool.stats.reserved_bytes));
    return {pool.limit > reserved ? pool.limit - reserved : 0, pool.limit};
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
  Pool& pool = pool_of(device);
  const auto [block, totals] = pool.take(nbytes);
  if (poison.load(std::memory_order_relaxed)) {
    std::memset(block->data(), kPoisonByte, block->rounded);
  }
  report(block->data(), static_cast<int64_t>(block->rounded), totals, pool.device);
  tell([&](Observer& to) { to.allocated(block->data(), block->rounded, current_stream(pool.device)); });
  return {block->data(), block->data(), &free_on_device, owner};
}

void free_on_device(void* data) {
  auto* block = Block::of(data);
  tell([&](Observer& to) { to.freed(data, block->pool->device); });
  if (poison.load(std::memory_order_relaxed)) {
    std::memset(block->data(), kPoisonByte, block->rounded);
  }
  Pool& pool = *block->pool;
  const auto size = static_cast<int64_t>(block->rounded);
  const Totals totals = pool.give_back(block);
  report(data, -size, totals, pool.device);
}

void set_memory_limit(c10::DeviceIndex device, size_t nbytes) {
  Pool& pool = pool_of(device);
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.limit = nbytes;
}

size_t memory_limit(c10::DeviceIndex device) {
  Pool& pool = pool_of(device);
  std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.limit;
}

void set_poison(bool enabled) {
  poison = enabled;
}

std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer) {
  const auto* wanted = static_cast<const char*>(pointer);
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    Pool& pool = pools()[index];
    std::lock_guard<std::mutex> lock(pool.mutex);
    for (const Block* block = pool.live; block != nullptr; block = block->next) {
      const auto* start = static_cast<const char*>(block->data());
      if (wanted >= start && wanted < start + block->rounded) {
        return index;
      }
    }
  }
  return std::nullopt;
}

void install_allocator() {
  c10::SetAllocator(kSim, device_allocator());
}

} // namespace torch_ext::sim
