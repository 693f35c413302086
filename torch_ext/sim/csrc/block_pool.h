// The allocator of one device: the algorithm of CUDA's caching allocator, so that addresses within a segment,
// statistics, fragmentation and out-of-memory errors are those of a GPU for the same sequence of calls.
//
//   request        rounded up to 512 bytes; pool of small requests up to 1 MiB, of large ones above, for each stream
//   choice         the smallest idle block of the stream that suffices; of equal ones the one in the oldest segment
//                  (the lowest addresses, where a driver hands out rising ones); then the one in front
//   split          if at least 512 bytes remain of a small block, or more than 1 MiB of a large one
//   new segment    2 MiB for small requests, 20 MiB for those below 10 MiB, else rounded up to 2 MiB
//   no room        oversize blocks, then all segments without a live block go back to the host, then the request fails
//
// PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) changes these, through torch's own parser. For expandable segments
// see blocks.h.
//
// Note [Pools of graphs]
// A capture allocates from the pool of its graph, or of several. Its segments serve no other request, and stay until
// the last of the graphs is gone: replays use the memory of blocks that are free by then. In a capture, a block with
// users stays in use until the end, since no clock tells when their work will be done.
//
// Note [Pools by stream]
// A segment serves only the stream that was current at its making: work on one stream is in order, so the new owner of
// a block waits for nothing. Other streams that use the block must be named (`record_stream`); then the block becomes
// idle at the first request after their earlier work is over. A program that omits this has its memory overwritten, as
// on a GPU.
//
// Note [Dangerous blocks]
// The race checker knows the memory on which a stream could race with an earlier owner's work. The allocator hands out
// such memory first, from the first such byte of a block on, so any later request that fits shows an unsafe free: even
// while a collective holds up the streams named for the block, so that the report does not depend on peers. A correct
// program has no such memory, and gets CUDA's blocks.
#pragma once

#include "blocks.h"
#include "kernel_observer.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {

// Which memory a request exhausts: the device's or the machine's (machine_memory.h).
enum class Short : uint8_t { kDevice, kMachine };

// The bytes of a new segment for a request.
size_t segment_size(size_t nbytes);

// Snapshots of a block and of a segment.
struct BlockFacts {
  const void* data;
  size_t size;
  size_t requested;
  const std::string* kernel; // null: none
  Block::State state;
};
struct SegmentFacts {
  const void* start;
  size_t size;
  c10::StreamId home;
  bool is_small;
  MempoolId mempool;
  bool is_expandable;
  std::vector<BlockFacts> blocks;
};

// Visits every statistic, in the order of torch's struct.
template <typename Stats, typename Visit>
void for_each_stat(Stats& stats, Visit visit) {
  for (auto* array :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    std::ranges::for_each(*array, visit);
  }
  visit(stats.oversize_allocations);
  visit(stats.oversize_segments);
}

// Bytes of a pool.
struct Amounts {
  size_t allocated;
  size_t reserved;
  size_t limit;
  size_t allowed; // the part of the limit that this process may use

  size_t left() const { return allowed > reserved ? allowed - reserved : 0; }
};

// Safe to call from any thread. Never destroyed, because tensors may outlive every static object.
class BlockPool {
 public:
  BlockPool(c10::DeviceIndex device, size_t limit) : device_(device), limit_(limit) {}
  C10_DISABLE_COPY_AND_ASSIGN(BlockPool);

  c10::DeviceIndex device() const { return device_; }

  // A block of at least `nbytes` for `stream`. Raises OutOfMemoryError past the allowed amount. With `is_scratch`, it
  // counts in statistics after `count_result` only.
  Block* take(size_t nbytes, c10::Stream stream, MempoolId mempool = {}, bool is_scratch = false);
  void count_result(Block* block);
  void give_back(Block* block);

  // Records that `stream`, besides the home, uses the block, which must be live.
  void add_user(Block* block, c10::Stream stream);
  void add_pending(Block* block, const std::shared_ptr<Elsewhere>& operation);

  // Returns segments without a live block to the host, after waiting for streams that still use their blocks.
  void empty();
  void drop_idle_pages();

  // See Note [Pools of graphs]. `begin_capture` adds a graph, which `drop_graph` removes.
  void begin_capture(MempoolId mempool);
  void end_capture(MempoolId mempool);
  void drop_graph(MempoolId mempool);
  // A pool of the user's: `lends` idle blocks where memory is short, and its segments stay whole with `is_whole`.
  // `close` returns what is idle to the host.
  void open(MempoolId mempool, bool lends, bool is_whole);
  void close(MempoolId mempool);
  int use_count(MempoolId mempool);
  // Fills the live blocks that a capture has allocated.
  void fill_blocks_of(uint64_t capture, int byte);

  void set_limit(size_t nbytes) { limit_ = nbytes; }
  // Allows a part of the limit, 0 to 1, as torch.cuda.set_per_process_memory_fraction does.
  void set_fraction(double fraction) { fraction_ = fraction; }
  double fraction() const { return fraction_; }
  Amounts amounts();
  std::vector<SegmentFacts> segments();
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_accumulated();
  void reset_peaks();

 private:
  struct Fit {
    MempoolId mempool;
    c10::StreamId home;
    size_t size;

    bool is_served_by(const Block* block) const {
      return block->segment->home == home && block->segment->mempool == mempool;
    }
  };
  struct ByFit {
    using is_transparent = void;
    using Key = std::tuple<MempoolId, c10::StreamId, size_t, uint64_t, const char*>;
    static Key key(const Block* block) {
      const auto& segment = *block->segment;
      return {segment.mempool, segment.home, block->size, segment.serial, block->start};
    }
    static Key key(Fit fit) { return {fit.mempool, fit.home, fit.size, 0, nullptr}; }
    template <typename One, typename Other>
    bool operator()(One one, Other other) const {
      return key(one) < key(other);
    }
  };
  struct Idle {
    std::set<Block*, ByFit> blocks;
    int64_t searches = 0; // counted for the garbage collection only
  };
  struct InUse {
    Block* block;
    int64_t until;                                 // on the clock of streams
    std::vector<std::weak_ptr<Elsewhere>> pending; // those of the block, and the work that its users waited for

    bool is_held_up() const;
  };

  // All of these require the lock.
  Amounts totals() const;
  Idle& idle_of(bool is_small) { return is_small ? small_ : large_; }
  Block* take_idle(bool is_small, Fit fit);
  Block* take_dangerous(bool is_small, Fit fit, Observer& watching);
  Block* take_fresh(bool is_small, Fit fit, Short& whose); // nullptr past the allowed amount
  Block* new_segment(bool is_small, Fit fit, Short& whose);
  Block* take_beyond(bool is_small, Fit fit); // in a dry run: past the limit
  Block* take_lent(bool is_small, Fit fit);
  Block* expand(bool is_small, Fit fit, Short& whose);
  Block* find_room(bool is_small, Fit fit);
  Block* map(Block* block, size_t size);
  bool unmap(Block* block);
  void hand_out(Block* block, size_t size, size_t requested, bool is_scratch);
  void count_allocated(const Block* block, int64_t by);
  void count_active(const Block* block, int64_t by);
  void settle(Block* block);
  Block* join(Block* block);
  void insert(Block* block);
  void remove(Block* block);
  void count_inactive(bool is_small, int64_t blocks, int64_t bytes);
  void advance_users();
  void poll();
  void collect_garbage();
  bool release_oversize(bool is_small, Fit fit);
  void release_cached();
  void release_idle(const std::function<bool(const Block*)>& chosen);
  bool release(Block* block);
  bool is_captured(MempoolId mempool) const;
  bool is_whole(MempoolId mempool) const;
  bool is_dangerous(const Block* block) const;
  bool collects_garbage() const; // CUDA does so for a fraction only

  const c10::DeviceIndex device_;
  std::atomic<size_t> limit_;
  std::atomic<double> fraction_ = 1;
  std::mutex mutex_; // guards what follows
  Idle small_;
  Idle large_;
  size_t dangerous_ = 0; // idle blocks that are
  std::map<uint64_t, DeviceSegment*> segments_;
  std::vector<InUse> in_use_;
  struct Graphs {
    int count = 0;
    int captures = 0; // under way
    bool lends = false;
    bool is_whole = false;
  };
  std::map<MempoolId, Graphs> graphs_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

} // namespace torch_ext::sim
