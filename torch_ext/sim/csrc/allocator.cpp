#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "device.h"
#include "kernel_observer.h"
#include "machine_memory.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kSmallBytes = size_t{1} << 20;
// Above this much idle memory, all of it goes back to the host.
constexpr size_t kIdleBytes = size_t{512} << 20;

std::atomic<IsDangerous> danger{nullptr};
std::atomic<uint64_t> next_serial{1};

// All blocks of the process by address. Written when memory comes from or goes back to the host, read for raw pointers.
struct Index {
  std::shared_mutex mutex;
  std::map<const char*, Block*> blocks; // by the start of their data
};

Index& block_index = *new Index(); // never freed: threads may outlive static objects

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

// size: selects the small or large counters.
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

// Takes addresses and sizes, not the block: once the block is back in its pool, another thread may own it.
void report(void* data, int64_t change, const Amounts& totals, c10::DeviceIndex device) {
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, change, totals.allocated, totals.reserved, c10::Device(kSim, device));
  }
}

// While poison is on, all bytes of a free block are poisoned, so a request fills at most new memory.
void fill_with_poison(Block& block) {
  if (poison.load(std::memory_order_relaxed) != 0) {
    std::memset(block.data(), kPoisonByte, block.capacity);
    block.poisoned = true;
  }
}

// Call it while no other thread can own the block.
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
    // The memory may belong to another tensor, over whose storage this one was made, and need not be device memory.
    Block* block = data.get() == nullptr ? nullptr : block_at(data.get());
    if (block != nullptr) {
      block->pool->add_user(block, stream);
      notify([&](Observer& to) { to.used_on(block->data(), stream); });
    }
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return pool_of(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { pool_of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { pool_of(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto amounts = pool_of(device).amounts();
    return {amounts.limit > amounts.reserved ? amounts.limit - amounts.reserved : 0, amounts.limit};
  }
};

class HostOverride final : public c10::Allocator {
 public:
  explicit HostOverride(c10::Allocator* host) { host_ = host; }
  c10::DataPtr allocate(size_t nbytes) override {
    if (running_kernel.device < 0) {
      return host_->allocate(nbytes);
    }
    return allocate_on(running_kernel.device, nbytes, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_raw; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  // Raw memory may be freed outside the scope of its allocation (libraries keep scratch space), so look the pointer up
  // to find its owner.
  static void delete_raw(void* data) {
    if (device_of_pointer(data).has_value()) {
      free_on_device(data);
    } else {
      host_->raw_deleter()(data);
    }
  }

  static inline c10::Allocator* host_ = nullptr;
};

} // namespace

constinit thread_local RunningKernel running_kernel;

std::pair<Block*, Amounts> BlockPool::take(size_t nbytes, c10::Stream stream) {
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
  increase(stats_.allocation, rounded, 1);
  increase(stats_.active, rounded, 1);
  increase(stats_.allocated_bytes, rounded, rounded);
  increase(stats_.active_bytes, rounded, rounded);
  increase(stats_.requested_bytes, rounded, nbytes);
  return {block, totals()};
}

Amounts BlockPool::give_back(Block* block) {
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

void BlockPool::set_fraction(double fraction) {
  std::lock_guard<std::mutex> lock(mutex_);
  fraction_ = fraction;
}

double BlockPool::fraction() {
  std::lock_guard<std::mutex> lock(mutex_);
  return fraction_;
}

Amounts BlockPool::amounts() {
  std::lock_guard<std::mutex> lock(mutex_);
  poll();
  return totals();
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
  std::shared_lock<std::shared_mutex> index_lock(block_index.mutex);
  for (const auto& [start, block] : block_index.blocks) {
    if (block->pool == this) {
      const auto state = block->live ? State::kLive : in_use.count(block) != 0 ? State::kInUse : State::kIdle;
      facts.push_back(
          {block->data(), block->capacity, block->requested, block->rounded, block->home, block->tag, state});
    }
  }
  return facts;
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

Amounts BlockPool::totals() const {
  const auto allowed = fraction_ < 1 ? static_cast<size_t>(static_cast<double>(limit_) * fraction_) : limit_;
  return {total(stats_.allocated_bytes), total(stats_.reserved_bytes), limit_, allowed};
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

// See Note [Dangerous blocks]. Blocks that are no longer dangerous become idle.
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
  for (Block* block : safe_blocks) {
    make_idle(block);
  }
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
    std::unique_lock<std::shared_mutex> lock(block_index.mutex);
    block_index.blocks[static_cast<const char*>(block->data())] = block;
  }
  increase(stats_.reserved_bytes, rounded, rounded);
  increase(stats_.segment, rounded, 1);
  stats_.num_device_alloc += 1;
  return block;
}

void* BlockPool::take_from_host(size_t rounded, Short& whose) const {
  const auto amounts = totals();
  if (amounts.reserved > amounts.allowed || rounded > amounts.left()) {
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
  const auto home = stream_of(device_, block->home);
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

// Finds blocks whose users are done. Orders nothing for the host: see Note [Lives of a block] in races/checker.h.
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
  const auto release_one = [this](Block* block) { release(block); };
  idle_bytes_ = 0;
  const auto idle = std::exchange(idle_, {});
  for (auto& [home, blocks] : std::exchange(dangerous_, {})) {
    std::ranges::for_each(blocks, release_one);
  }
  for (const auto& [key, blocks] : idle) {
    std::ranges::for_each(blocks, release_one);
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
    std::unique_lock<std::shared_mutex> lock(block_index.mutex);
    block_index.blocks.erase(static_cast<const char*>(block->data()));
  }
  return_to_machine(block->capacity);
  block->~Block();
  std::free(block);
}

Block* block_at(const void* pointer) {
  const auto* wanted = static_cast<const char*>(pointer);
  std::shared_lock<std::shared_mutex> lock(block_index.mutex);
  const auto after = block_index.blocks.upper_bound(wanted);
  if (after == block_index.blocks.begin()) {
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

BlockPool& pool_of(c10::DeviceIndex device) {
  return *pools().at(static_cast<size_t>(checked_index(device)));
}

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
  block->tag = tag_of(running_kernel.name);
  report(block->data(), static_cast<int64_t>(block->rounded), totals, pool.device());
  note(MemoryEvent::Kind::kAllocate, *block);
  notify([&](Observer& to) { to.allocated(block->data(), block->rounded, current_stream(pool.device())); });
  return {block->data(), block->data(), &free_on_device, owner};
}

void free_on_device(void* data) {
  auto* block = Block::of(data);
  notify([&](Observer& to) { to.freed(data, block->pool->device()); });
  note(MemoryEvent::Kind::kFree, *block);
  fill_with_poison(*block);
  BlockPool& pool = *block->pool;
  const auto size = static_cast<int64_t>(block->rounded);
  const Amounts totals = pool.give_back(block);
  report(data, -size, totals, pool.device());
}

void set_memory_limit(c10::DeviceIndex device, size_t nbytes) {
  // A call before the first use must not freeze the devices: the program may still choose them.
  if (!is_initialized() && !is_in_bad_fork() && device >= 0 && device < device_count()) {
    pools()[static_cast<size_t>(device)]->set_limit(nbytes);
    return;
  }
  pool_of(device).set_limit(nbytes);
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
  // See Note [All memory in the arena]. Torch registers its own allocators with priority 0; the highest priority wins.
  constexpr uint8_t kPriority = 1;
  c10::SetAllocator(kSim, device_allocator(), kPriority);
  c10::SetCPUAllocator(new HostOverride(c10::GetCPUAllocator()), kPriority);
}

} // namespace torch_ext::sim
