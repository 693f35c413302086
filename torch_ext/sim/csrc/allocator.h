// Device memory: one pool per device, with statistics, a limit, and poisoning on demand. A pool consists of blocks:
// those that tensors hold, those that streams still use, and idle ones.
//
// Ownership: a block belongs to the DataPtr that carries it as context and returns to its pool when that dies. Pools
// are never destroyed, because tensors may outlive every static object. All functions are safe to call from any thread.
//
// Note [Pools by stream]
// A block belongs to the stream that was current at its allocation, as with CUDA's caching allocator. After a free, it
// is the first choice for the next request of its size on that stream: work on one stream is in order, so the new owner
// waits for nothing. Other streams that use the block must be named (`record_stream`); then the block becomes idle when
// their work from before the free is over. A program that omits this has its memory overwritten, as on a GPU.
//
// Note [Dangerous blocks]
// The race checker knows the blocks on which a stream could race with an earlier owner's work. The allocator hands
// these out first, also to smaller requests, so any later request shows an unsafe free. A correct program has none.
//
// Note [All memory in the arena]
// A host kernel that works for a device allocates results and temporaries with torch's host allocator. Our override of
// that allocator serves them from the device's pool inside a KernelScope; the fallback then relabels results as device
// memory without a copy. So statistics, limit and poison see every byte, except what worker threads allocate in a
// kernel's parallel region: the scope is per thread.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

constexpr size_t kBlockAlignment = 64;

class BlockPool;

// Which memory a request exhausts: the device's or the machine's (machine_memory.h).
enum class Short : uint8_t { kDevice, kMachine };

// Lies in front of its data, so that a data pointer alone leads to it: library kernels allocate raw memory, which
// torch's interface frees without a context.
struct alignas(kBlockAlignment) Block {
  BlockPool* pool;
  size_t capacity;  // bytes of data
  size_t requested; // by its owner
  size_t rounded;   // bytes charged to its owner; at most the capacity
  uint64_t serial;  // unique in the process, never used again
  c10::StreamId home;
  std::unique_ptr<std::vector<c10::Stream>> users; // streams named since its allocation
  std::atomic<bool> live{false};
  bool poisoned = false;         // all of its bytes, since its last free
  std::atomic<uint16_t> pins{0}; // operations under way that use its memory, freed or not: see PinnedBlocks
  uint32_t tag = 0;              // of the kernel that allocated it: see memory_history.h

  void* data() { return this + 1; }
  const void* data() const { return this + 1; }
  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
};
static_assert(sizeof(Block) == kBlockAlignment, "data must start aligned");

// Whether an earlier owner's work on the block at `data` could race with an owner on `stream`.
using IsDangerous = bool (*)(const void* data, c10::Stream stream);

// A snapshot of a block.
struct BlockFacts {
  enum class State : uint8_t { kLive, kInUse, kIdle }; // kInUse: freed, but streams still use it
  const void* data;
  size_t capacity;
  size_t requested;
  size_t rounded;
  c10::StreamId home;
  uint32_t tag;
  State state;
};

// Bytes of a pool. Every change reports the first two to the profiler.
struct Amounts {
  size_t allocated;
  size_t reserved;
  size_t limit;
  size_t allowed; // the part of the limit that this process may use

  size_t left() const { return allowed > reserved ? allowed - reserved : 0; }
};

// Safe to call from any thread.
class BlockPool {
 public:
  BlockPool(c10::DeviceIndex device, size_t limit) : device_(device), limit_(limit) {}

  c10::DeviceIndex device() const { return device_; }

  // A block of at least `nbytes` for `stream`. Raises OutOfMemoryError past the allowed amount.
  std::pair<Block*, Amounts> take(size_t nbytes, c10::Stream stream);
  Amounts give_back(Block* block);

  // Records that `stream`, besides the home, uses the block, which must be live.
  void add_user(Block* block, c10::Stream stream);

  // Returns idle blocks to the host, after waiting for those that streams still use.
  void empty();

  void set_limit(size_t nbytes);
  // Allows a part of the limit, 0 to 1, as torch.cuda.set_per_process_memory_fraction does.
  void set_fraction(double fraction);
  double fraction();
  Amounts amounts();
  std::vector<BlockFacts> blocks();
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_accumulated();
  void reset_peaks();

 private:
  struct InUse {
    Block* block;
    int64_t until; // nanoseconds on the clock of streams
  };

  // All of these require the lock.
  Amounts totals() const;
  Block* take_idle(size_t rounded, c10::StreamId home);
  Block* take_dangerous(size_t rounded, c10::Stream stream);
  Block* take_fresh(size_t nbytes, size_t rounded, Short& whose); // nullptr past the allowed amount
  void* take_from_host(size_t rounded, Short& whose) const;       // likewise
  void settle(Block* block);
  void make_idle(Block* block);
  void poll();
  void release_idle();
  void release(Block* block);

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  size_t limit_;
  double fraction_ = 1;
  size_t idle_bytes_ = 0;
  std::unordered_map<uint64_t, std::vector<Block*>> idle_;           // by home and capacity, newest last
  std::unordered_map<c10::StreamId, std::vector<Block*>> dangerous_; // by home, newest last
  std::vector<InUse> in_use_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// The block, live or idle, whose data contains `pointer`; nullptr if it is not device memory.
Block* block_at(const void* pointer);

// Keeps the blocks that contain the pointers from going back to the host, freed or not, while an operation still writes
// to them. The allocator may hand them out again meanwhile, as on a GPU. Ignores host memory.
class PinnedBlocks {
 public:
  PinnedBlocks() = default;
  ~PinnedBlocks() { clear(); }
  C10_DISABLE_COPY_AND_ASSIGN(PinnedBlocks);

  void add(const void* pointer);
  void clear() noexcept;

 private:
  std::vector<Block*> blocks_;
};

// Sets the check that runs at every free and request; nullptr turns it off.
void set_danger(IsDangerous ask);

// Every block is rounded up to a multiple of this many bytes, as on GPUs, so that memory numbers are comparable.
constexpr size_t kRoundBytes = 512;

c10::DeviceAllocator* device_allocator();

// Memory of `device` behind a DataPtr that names `owner` as its device (the device itself, or the host for an alias).
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes, c10::Device owner);

// Returns the memory at `data`, which came from `allocate_on`, to its pool. A DataPtr does so by itself.
void free_on_device(void* data);

// The pool of `device`, or of the current one for -1.
BlockPool& pool_of(c10::DeviceIndex device);
void set_memory_limit(c10::DeviceIndex device, size_t nbytes);

// Fills fresh and freed blocks with 0xff bytes while either party has it on: NaN in every float type, -1 in signed
// integers.
enum class PoisonFor : uint8_t { kUser, kRaces };
void set_poison(PoisonFor whom, bool enabled);

// The device whose live block contains `pointer`.
std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer);

struct RunningKernel {
  c10::DeviceIndex device = -1; // -1: none is running
  std::string_view name;
};

// The kernel that this thread is running.
extern constinit thread_local RunningKernel running_kernel;

// While alive, host allocations of this thread come from the pool of the kernel's device.
class KernelScope {
 public:
  // name: of the kernel; must outlive the object.
  KernelScope(c10::DeviceIndex device, std::string_view name) noexcept
      : previous_(std::exchange(running_kernel, {device, name})) {}
  ~KernelScope() { running_kernel = previous_; }
  C10_DISABLE_COPY_AND_ASSIGN(KernelScope);

 private:
  const RunningKernel previous_;
};

} // namespace torch_ext::sim
