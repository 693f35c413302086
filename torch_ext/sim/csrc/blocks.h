// The memory of devices: segments, which come from the host, and the blocks that divide each of them.
//
//               take              give_back, and streams still use it          they are done
//     idle -------------> live ------------------------------------> in use ----------------> idle
//                           \--- give_back ------------------------------------------------> idle
//
// An idle block may be split in two, and merges with its idle neighbours. So the blocks of a segment have no gap, and
// of two neighbours at most one is idle.
//
// Note [Pages on demand]
// The host gives a segment addresses, and pages only where they are written. A fresh block is the front of an idle one,
// so the bytes of an idle block that may have pages are a prefix of it (`backed`). Only those count as memory of the
// machine: a rank with a few small tensors reserves 2 MiB for each stream, as with CUDA, and uses some KiB.
// `drop_pages` gives the pages of an idle block back and leaves its addresses, so a program's blocks do not depend on
// what the machine has left.
//
// Note [Expandable segments]
// With `expandable_segments:True`, a stream has one segment for small and one for large requests, with addresses for
// 9/8 of the device. Blocks of it are unmapped until a request needs them: then a multiple of the unit (2 or 20 MiB) is
// mapped at the lowest addresses that suffice, together with idle neighbours. `empty_cache` unmaps whole idle units.
//
// Note [The block at an address]
// Kernels and observers have addresses only. A table of all address ranges of 2 MiB leads to the segment, and a table
// behind the segment's memory, with an entry for each 512 bytes, to the block that starts there. Readers take no lock.
#pragma once

#include "std.h"

namespace torch_ext::sim {

// Blocks are aligned and rounded up to a multiple of this many bytes, as CUDA's.
constexpr size_t kRoundBytes = 512;

// Up to the next multiple of `unit`.
size_t round_to(size_t nbytes, size_t unit);

// Names a pool of graphs, as torch does; {0, 0}: none.
using MempoolId = std::pair<unsigned long long, unsigned long long>;

class BlockPool;
class Elsewhere;
struct Block;

struct DeviceSegment {
  BlockPool* pool; // of its device
  char* start;
  size_t size;
  size_t mapped;   // bytes, with the table of blocks
  uint64_t serial; // unique in the process, never used again
  c10::StreamId home;
  bool is_small;     // of the pool for small requests
  MempoolId mempool; // serves its captures only
  bool is_expandable;
  std::atomic<uint32_t> pins{0};

  bool contains(const void* pointer) const { return pointer >= start && pointer < start + size; }
  std::atomic<Block*>& block_from(const void* pointer) const;
};

struct Block {
  // kInUse: freed, but streams still use it. kUnmapped: see Note [Expandable segments].
  enum class State : uint8_t { kLive, kInUse, kIdle, kUnmapped };

  DeviceSegment* segment;
  char* start;
  size_t size;
  Block* before = nullptr; // the neighbours in the segment
  Block* after = nullptr;
  std::atomic<State> state{State::kIdle};
  size_t requested = 0;             // by its owner
  std::vector<c10::Stream> users{}; // streams named since its allocation
  // Operations that use it and that nothing waits for. Not owned: their destructors would need the pool's lock.
  std::vector<std::weak_ptr<Elsewhere>> pending{};
  uint64_t capture = 0;                // the capture that allocated it; 0: none
  const std::string* kernel = nullptr; // the name of the one that allocated it, if any
  size_t backed = 0;                   // bytes from its start that may have pages
  int64_t idle_since = 0;              // the number of searches in its pool by then
  bool is_poisoned = false;            // all of its bytes, since its last free
  bool is_scratch = false;             // a kernel's, and no result so far: see Note [Scratch memory] in allocator.h
  bool is_dangerous = false;           // see Note [Dangerous blocks] in block_pool.h

  bool is_split() const { return before != nullptr || after != nullptr; }
};

// A new segment of one block, idle or, if the segment is expandable, unmapped; nullptr if the host refuses.
Block* map_segment(
    BlockPool* pool, size_t size, c10::StreamId home, bool is_small, MempoolId mempool, bool is_expandable);
// Returns the segment of an idle block that is not split to the host.
void unmap_segment(Block* block);

// Shortens a block to `size` bytes. Returns a new block with the rest, in the same state.
Block* split(Block* block, size_t size);
// Joins a block and the one after it, in the same state, into the first.
void merge_with_next(Block* block);

// Counts the bytes of an idle block that are about to get their first pages, up to `size`. False, and nothing is
// counted, if the machine's memory does not suffice.
bool back(Block* block, size_t size);
void drop_pages(Block* block);

// The segment, or the block in any state, whose memory contains `pointer`; nullptr if it is not device memory. A caller
// holds that memory.
DeviceSegment* segment_at(const void* pointer);
Block* block_at(const void* pointer);

// Keeps the segment that contains `pointer` from going back to the host while an operation still writes there. The
// allocator may hand the block out again meanwhile, as on a GPU. Returns nullptr for other memory.
DeviceSegment* pin(const void* pointer);
void unpin(DeviceSegment* segment) noexcept;

} // namespace torch_ext::sim
