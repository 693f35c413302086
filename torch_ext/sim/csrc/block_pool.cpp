#include "block_pool.h"

#include "device.h"
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "allocator.h"
#include "machine_memory.h"
#include "out_of_memory.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kSmallBytes = size_t{1} << 20;
// Past this much idle memory all of it goes back to the host.
constexpr size_t kIdleBytes = size_t{512} << 20;

std::atomic<IsDangerous> danger{nullptr};
std::atomic<uint64_t> next_serial{1};

// All blocks of the process by address. Written when memory comes from the host or goes back, read for bare pointers.
struct Index {
  std::shared_mutex mutex;
  std::map<const char*, Block*> blocks; // by the start of their data
};

Index& block_index() {
  static auto* index = new Index();
  return *index;
}

size_t round_up(size_t nbytes) {
  return (nbytes + kRoundBytes - 1) / kRoundBytes * kRoundBytes;
}

uint64_t shelf(c10::StreamId home, size_t capacity) {
  return capacity / kRoundBytes * (kStreamCount + 1) + static_cast<uint64_t>(home);
}

template <typename Change>
void update(StatArray& stats, size_t size, Change change) {
  const auto kind = size <= kSmallBytes ? StatType::SMALL_POOL : StatType::LARGE_POOL;
  change(stats[static_cast<size_t>(StatType::AGGREGATE)]);
  change(stats[static_cast<size_t>(kind)]);
}

// size: decides which kind of blocks is counted.
void increase(StatArray& stats, size_t size, size_t amount) {
  update(stats, size, [amount](Stat& stat) { stat.increase(amount); });
}

void decrease(StatArray& stats, size_t size, size_t amount) {
  update(stats, size, [amount](Stat& stat) { stat.decrease(amount); });
}

size_t total(const StatArray& stats) {
  return static_cast<size_t>(stats[static_cast<size_t>(StatType::AGGREGATE)].current);
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

} // namespace

std::pair<Block*, Totals> BlockPool::take(size_t nbytes, c10::Stream stream) {
  const size_t rounded = round_up(nbytes);
  std::unique_lock<std::mutex> lock(mutex_);
  poll();
  Block* block = dangerous_.empty() ? nullptr : take_dangerous(rounded, stream);
  if (block == nullptr) {
    block = take_idle(rounded, stream.id());
  }
  auto whose = Short::kDevice;
  if (block == nullptr) {
    block = take_fresh(nbytes, rounded, whose);
  }
  if (block == nullptr && whose == Short::kMachine) {
    lock.unlock(); // other devices of this process may hold idle memory
    device_allocator()->emptyCache();
    lock.lock();
    block = take_fresh(nbytes, rounded, whose);
  }
  if (block == nullptr) {
    stats_.num_ooms += 1;
    lock.unlock();
    raise_out_of_memory(*this, nbytes, whose);
  }
  block->requested = nbytes;
  block->rounded = rounded;
  block->home = stream.id();
  block->live.store(true, std::memory_order_release);
  count_taken(*block);
  return {block, totals()};
}

Totals BlockPool::give_back(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  block->live.store(false, std::memory_order_release);
  decrease(stats_.allocation, block->rounded, 1);
  decrease(stats_.allocated_bytes, block->rounded, block->rounded);
  int64_t until = 0;
  if (block->users != nullptr) {
    for (const auto& user : *block->users) {
      until = std::max(until, busy_until(user));
    }
    block->users.reset();
  }
  if (until > stream_clock()) {
    in_use_.push_back({block, until});
  } else {
    settle(block);
  }
  return totals();
}

void BlockPool::add_user(Block* block, c10::Stream stream) {
  if (stream.device_index() == device_ && stream.id() == block->home) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (block->users == nullptr) {
    block->users = std::make_unique<std::vector<c10::Stream>>();
  }
  if (std::find(block->users->begin(), block->users->end(), stream) == block->users->end()) {
    block->users->push_back(stream);
  }
}

void BlockPool::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  release_idle();
}

void BlockPool::set_limit(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = nbytes;
}

size_t BlockPool::limit() {
  std::lock_guard<std::mutex> lock(mutex_);
  return limit_;
}

void BlockPool::set_fraction(double fraction) {
  std::lock_guard<std::mutex> lock(mutex_);
  fraction_ = fraction;
}

double BlockPool::fraction() {
  std::lock_guard<std::mutex> lock(mutex_);
  return fraction_;
}

size_t BlockPool::allowed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return allowance();
}

size_t BlockPool::allowance() const {
  return fraction_ < 1 ? static_cast<size_t>(static_cast<double>(limit_) * fraction_) : limit_;
}

std::vector<BlockFacts> BlockPool::blocks() {
  using State = BlockFacts::State;
  std::vector<BlockFacts> facts;
  std::lock_guard<std::mutex> lock(mutex_);
  poll();
  std::unordered_set<const Block*> in_use;
  for (const auto& each : in_use_) {
    in_use.insert(each.block);
  }
  std::shared_lock<std::shared_mutex> index_lock(block_index().mutex);
  for (const auto& [start, block] : block_index().blocks) {
    if (block->pool == this) {
      const auto state = block->live ? State::kLive : in_use.count(block) != 0 ? State::kInUse : State::kIdle;
      facts.push_back(
          {block->data(), block->capacity, block->requested, block->rounded, block->home, block->tag, state});
    }
  }
  return facts;
}

size_t BlockPool::reserved() {
  std::lock_guard<std::mutex> lock(mutex_);
  return total(stats_.reserved_bytes);
}

DeviceStats BlockPool::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  poll();
  return stats_;
}

void BlockPool::reset_accumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
}

void BlockPool::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_peak(); });
}

Totals BlockPool::totals() const {
  return {total(stats_.allocated_bytes), total(stats_.reserved_bytes)};
}

Block* BlockPool::take_idle(size_t rounded, c10::StreamId home) {
  const auto found = idle_.find(shelf(home, rounded));
  if (found == idle_.end() || found->second.empty()) {
    return nullptr;
  }
  Block* block = found->second.back();
  found->second.pop_back();
  idle_bytes_ -= block->capacity;
  return block;
}

// See Note [Dangerous blocks]. Those that are not any more join the idle ones.
Block* BlockPool::take_dangerous(size_t rounded, c10::Stream stream) {
  const auto found = dangerous_.find(stream.id());
  if (found == dangerous_.end()) {
    return nullptr;
  }
  auto blocks = std::move(found->second);
  dangerous_.erase(found);
  const auto ask = danger.load();
  const auto safe = std::stable_partition(blocks.begin(), blocks.end(), [&](Block* block) {
    return ask != nullptr && ask(block->data(), stream);
  });
  const std::vector<Block*> safe_blocks(safe, blocks.end());
  blocks.erase(safe, blocks.end());
  Block* chosen = nullptr;
  const auto newest = std::find_if(blocks.rbegin(), blocks.rend(), [&](Block* block) {
    return block->capacity >= rounded;
  });
  if (newest != blocks.rend()) {
    chosen = *newest;
    blocks.erase(std::next(newest).base());
  }
  if (!blocks.empty()) {
    dangerous_[stream.id()] = std::move(blocks);
  }
  std::for_each(safe_blocks.begin(), safe_blocks.end(), [this](Block* block) { make_idle(block); });
  return chosen;
}

Block* BlockPool::take_fresh(size_t nbytes, size_t rounded, Short& whose) {
  void* memory = take_from_host(rounded, whose);
  if (memory == nullptr) {
    stats_.num_alloc_retries += 1;
    release_idle();
    memory = take_from_host(rounded, whose);
  }
  if (memory == nullptr) {
    return nullptr;
  }
  auto* block = new (memory) Block{this, rounded, nbytes, rounded, next_serial.fetch_add(1), 0, nullptr};
  {
    std::unique_lock<std::shared_mutex> lock(block_index().mutex);
    block_index().blocks[static_cast<const char*>(block->data())] = block;
  }
  increase(stats_.reserved_bytes, rounded, rounded);
  increase(stats_.segment, rounded, 1);
  stats_.num_device_alloc += 1;
  return block;
}

void* BlockPool::take_from_host(size_t rounded, Short& whose) const {
  const size_t held = total(stats_.reserved_bytes), allowed = allowance();
  if (held > allowed || rounded > allowed - held) {
    whose = Short::kDevice;
    return nullptr;
  }
  whose = Short::kMachine;
  if (!take_from_machine(rounded)) {
    return nullptr;
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kBlockAlignment, sizeof(Block) + rounded) != 0) {
    return_to_machine(rounded);
    return nullptr;
  }
  return memory;
}

// No stream uses the block any more.
void BlockPool::settle(Block* block) {
  decrease(stats_.active, block->rounded, 1);
  decrease(stats_.active_bytes, block->rounded, block->rounded);
  decrease(stats_.requested_bytes, block->rounded, block->requested);
  const auto ask = danger.load();
  const auto home = c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device_), block->home);
  if (ask != nullptr && ask(block->data(), home)) {
    dangerous_[block->home].push_back(block);
  } else {
    make_idle(block);
  }
}

void BlockPool::make_idle(Block* block) {
  idle_[shelf(block->home, block->capacity)].push_back(block);
  idle_bytes_ += block->capacity;
  if (idle_bytes_ > kIdleBytes) {
    release_idle();
  }
}

// Finds blocks whose users are done. Tells the host nothing: see Note [Lives of a block] in races/checker.h.
void BlockPool::poll() {
  if (in_use_.empty()) {
    return;
  }
  const int64_t moment = stream_clock();
  const auto over = std::stable_partition(in_use_.begin(), in_use_.end(), [&](const InUse& each) {
    return each.until > moment;
  });
  const std::vector<InUse> done(over, in_use_.end());
  in_use_.erase(over, in_use_.end());
  for (const auto& each : done) {
    settle(each.block);
  }
}

void BlockPool::release_idle() {
  for (const auto& each : std::exchange(in_use_, {})) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::max<int64_t>(each.until - stream_clock(), 0)));
    settle(each.block);
  }
  idle_bytes_ = 0;
  const auto idle = std::exchange(idle_, {});
  for (auto& [home, blocks] : std::exchange(dangerous_, {})) {
    std::for_each(blocks.begin(), blocks.end(), [this](Block* block) { release(block); });
  }
  for (const auto& [key, blocks] : idle) {
    std::for_each(blocks.begin(), blocks.end(), [this](Block* block) { release(block); });
  }
}

void BlockPool::release(Block* block) {
  if (block->pins.load(std::memory_order_acquire) != 0) {
    idle_[shelf(block->home, block->capacity)].push_back(block);
    idle_bytes_ += block->capacity;
    return;
  }
  decrease(stats_.reserved_bytes, block->capacity, block->capacity);
  decrease(stats_.segment, block->capacity, 1);
  stats_.num_device_free += 1;
  {
    std::unique_lock<std::shared_mutex> lock(block_index().mutex);
    block_index().blocks.erase(static_cast<const char*>(block->data()));
  }
  return_to_machine(block->capacity);
  block->~Block();
  std::free(block);
}

void BlockPool::count_taken(const Block& block) {
  increase(stats_.allocation, block.rounded, 1);
  increase(stats_.active, block.rounded, 1);
  increase(stats_.allocated_bytes, block.rounded, block.rounded);
  increase(stats_.active_bytes, block.rounded, block.rounded);
  increase(stats_.requested_bytes, block.rounded, block.requested);
}

Block* block_at(const void* pointer) {
  auto& index = block_index();
  const auto* wanted = static_cast<const char*>(pointer);
  std::shared_lock<std::shared_mutex> lock(index.mutex);
  const auto after = index.blocks.upper_bound(wanted);
  if (after == index.blocks.begin()) {
    return nullptr;
  }
  const auto& [start, block] = *std::prev(after);
  return wanted < start + block->capacity ? block : nullptr;
}

void PinnedBlocks::add(const void* pointer) {
  Block* block = pointer == nullptr ? nullptr : block_at(pointer);
  if (block != nullptr) {
    block->pins.fetch_add(1, std::memory_order_acq_rel);
    blocks_.push_back(block);
  }
}

void PinnedBlocks::clear() noexcept {
  for (Block* block : blocks_) {
    block->pins.fetch_sub(1, std::memory_order_acq_rel);
  }
  blocks_.clear();
}

void set_danger(IsDangerous ask) {
  danger = ask;
}

} // namespace torch_ext::sim
