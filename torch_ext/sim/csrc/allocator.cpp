#include "allocator.h"

#include "block_pool.h"
#include "blocks.h"
#include "device.h"
#include "graph.h"
#include "kernel_observer.h"
#include "machine_memory.h"
#include "mem_pool.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr int kPoisonByte = 0xff;
constexpr const char* kLimitVariable = "TORCH_EXT_SIM_MEMORY";
constexpr size_t kDefaultLimit = size_t{16} << 30;

std::array<std::atomic<bool>, 2> poison{}; // by PoisonFor
std::atomic<int64_t> until_failure{0};     // allocations, that one included; 0: none is to fail

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

// Takes addresses and sizes, not the block: once the block is back in its pool, another thread may own it. Ignores
// scratch memory, of size 0.
void report(void* data, int64_t change, BlockPool& pool) {
  if (change != 0 && c10::memoryProfilingEnabled()) {
    const auto totals = pool.amounts();
    c10::reportMemoryUsageToProfiler(data, change, totals.allocated, totals.reserved, c10::Device(kSim, pool.device()));
  }
}

void fill_with_poison(Block& block) {
  if (poison[0].load(std::memory_order_relaxed) || poison[1].load(std::memory_order_relaxed)) {
    std::memset(block.start, kPoisonByte, block.size);
    block.is_poisoned = true;
  }
}

// Call it while no other thread can own the block.
void note(MemoryEvent::Kind kind, const Block& block) {
  if (is_recording_memory() && !block.is_scratch) {
    const auto& segment = *block.segment;
    note_memory({kind, segment.pool->device(), block.start, block.requested, block.size, segment.home, 0, 0, nullptr});
  }
}

void report_allocation(const Block& block) {
  report(block.start, static_cast<int64_t>(block.size), *block.segment->pool);
  note(MemoryEvent::Kind::kAllocate, block);
  trace([&](const auto& to) { to.trace_gpu_memory_allocation(kSim, address_of(block.start)); });
}

// Returns the memory at `data`, which came from `allocate_on`, to its pool.
void free_on_device(void* data) {
  Block* block = block_at(data);
  BlockPool& pool = *block->segment->pool;
  notify([&](Observer& to) { to.freed(data, pool.device()); });
  note(MemoryEvent::Kind::kFree, *block);
  fill_with_poison(*block);
  const auto size = static_cast<int64_t>(block->is_scratch ? 0 : block->size);
  if (size != 0) {
    trace([&](const auto& to) { to.trace_gpu_memory_deallocation(kSim, address_of(data)); });
  }
  pool.give_back(block);
  report(data, -size, pool);
}

class HostOverride final : public c10::Allocator {
 public:
  static inline c10::Allocator* host = nullptr; // torch's own

  explicit HostOverride(bool for_aliases) : for_aliases_(for_aliases) {}

  c10::DataPtr allocate(size_t nbytes) override {
    const auto allocations = for_aliases_ ? Allocations::kCounted : running_kernel.allocations;
    if (running_kernel.device < 0 || allocations == Allocations::kScratch || is_replaying) {
      return host->allocate(nbytes);
    }
    const bool may_be_scratch = allocations == Allocations::kMayBeResults;
    return allocate_on(running_kernel.device, nbytes, c10::Device(c10::DeviceType::CPU), may_be_scratch);
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
      host->raw_deleter()(data);
    }
  }

  const bool for_aliases_; // which a kernel grows
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kSim, current_device());
    if (is_replaying) {
      c10::DataPtr data = HostOverride::host->allocate(nbytes);
      data.unsafe_set_device(device);
      return data;
    }
    return allocate_on(device.index(), nbytes, device);
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
      block->segment->pool->add_user(block, stream);
      notify([&](Observer& to) { to.used_on(block->start, stream); });
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

} // namespace

constinit thread_local RunningKernel running_kernel;

BlockPool& pool_of(c10::DeviceIndex device) {
  return *pools().at(static_cast<size_t>(checked_index(device)));
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new Allocator();
  return allocator;
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes, c10::Device owner, bool may_be_scratch) {
  ensure_initialized();
  if (nbytes == 0) {
    return {nullptr, owner};
  }
  if (until_failure.load(std::memory_order_relaxed) > 0 && until_failure.fetch_sub(1) == 1) {
    C10_THROW_ERROR(
        OutOfMemoryError,
        c10::str(kSimTitle, " out of memory. A planted fault fails this allocation of ", nbytes, " bytes."));
  }
  BlockPool& pool = pool_of(device);
  const auto stream = current_stream(pool.device());
  const auto capture = is_capturing() ? capture_of(stream) : nullptr;
  const bool is_captured = capture != nullptr && capture->origin().device_index() == pool.device();
  const Route* route = route_on(pool.device(), is_captured);
  if (route != nullptr && route->allocator != nullptr) {
    c10::DataPtr data = route->allocator->allocate(nbytes);
    data.unsafe_set_device(owner);
    return data;
  }
  const auto mempool = route != nullptr ? route->mempool : is_captured ? capture->mempool() : MempoolId{};
  Block* const block = pool.take(nbytes, stream, mempool, may_be_scratch);
  block->capture = is_captured ? capture->serial() : 0;
  if (!block->is_poisoned) {
    fill_with_poison(*block);
  }
  block->is_poisoned = false;
  block->kernel = lasting_name(running_kernel.name);
  char* const data = block->start;
  if (!may_be_scratch) {
    report_allocation(*block);
  }
  notify([&](Observer& to) { to.allocated(data, block->size, stream); });
  return {data, data, &free_on_device, owner};
}

void count_result(const void* data) {
  Block* block = block_at(data);
  if (block != nullptr && block->is_scratch) {
    block->segment->pool->count_result(block);
    report_allocation(*block);
  }
}

void keep_until_over(const void* data, const std::shared_ptr<Elsewhere>& operation) {
  if (Block* block = block_at(data)) {
    block->segment->pool->add_pending(block, operation);
  }
}

void set_memory_limit(c10::DeviceIndex device, size_t nbytes) {
  // A call before the first use must not freeze the devices: the program may still choose them.
  if (!is_initialized() && !is_in_bad_fork() && device >= 0 && device < device_count()) {
    pools()[static_cast<size_t>(device)]->set_limit(nbytes);
    return;
  }
  pool_of(device).set_limit(nbytes);
}

void fail_allocation(int64_t number) {
  until_failure = number;
}

void set_poison(PoisonFor whom, bool enabled) {
  poison.at(static_cast<size_t>(whom)) = enabled;
}

c10::Allocator* alias_allocator() {
  static auto* allocator = new HostOverride(/*for_aliases=*/true);
  return allocator;
}

std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer) {
  const Block* block = block_at(pointer);
  if (block == nullptr || block->state != Block::State::kLive) {
    return std::nullopt;
  }
  return block->segment->pool->device();
}

void install_allocator() {
  // See Note [Results in the arena]. Torch registers its own allocators with priority 0; the highest priority wins.
  constexpr uint8_t kPriority = 1;
  // Settings that mean nothing here. A build with CUDA's allocator knows them.
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  std::unordered_set<std::string> unread{
      "backend",
      "release_lock_on_cudamalloc",
      "pinned_use_cuda_host_register",
      "pinned_use_hip_host_register",
      "pinned_num_register_threads",
      "pinned_reserve_segment_size_mb",
      "graph_capture_record_stream_reuse",
      "per_process_memory_fraction",
      "throw_on_cudamalloc_oom",
      "pinned_free_catch_all"};
  std::erase_if(unread, [](const std::string& name) { return Config::getKeys().contains(name); });
  auto hook = Config::getConfigParserHook();
  // Torch refuses unknown names only where it has a hook.
  Config::registerDeviceConfigParserHook(hook ? std::move(hook) : [](const std::string& /*settings*/) {}, unread);
  c10::SetAllocator(kSim, device_allocator(), kPriority);
  HostOverride::host = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new HostOverride(/*for_aliases=*/false), kPriority);
}

} // namespace torch_ext::sim
