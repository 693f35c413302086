#include "blocks.h"

#include "device.h"
#include "dry.h"
#include "machine_memory.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr unsigned kPlaceBits = 21; // of the addresses within a place: 2 MiB
constexpr unsigned kLeafBits = 34;
constexpr unsigned kAddressBits = 48;
constexpr size_t kPlaceBytes = size_t{1} << kPlaceBits;

constexpr size_t kLeafPlaces = size_t{1} << (kLeafBits - kPlaceBits);

using Leaf = std::array<std::atomic<DeviceSegment*>, kLeafPlaces>;

// The segments by place. Leaves are never freed.
constinit std::array<std::atomic<Leaf*>, size_t{1} << (kAddressBits - kLeafBits)> places{};

std::atomic<uint64_t> next_serial{1};

std::atomic<DeviceSegment*>& place_of(const char* address) {
  static auto* mutex = new std::mutex();
  auto& entry = places.at(address_of(address) >> kLeafBits);
  if (entry.load() == nullptr) {
    std::lock_guard<std::mutex> lock(*mutex);
    if (entry.load() == nullptr) {
      entry = new Leaf();
    }
  }
  return (*entry.load())[(address_of(address) >> kPlaceBits) % kLeafPlaces];
}

void enter(const DeviceSegment& segment, DeviceSegment* entry) {
  for (const char* place = segment.start; place < segment.start + segment.size; place += kPlaceBytes) {
    place_of(place) = entry;
  }
}

// Addresses that start a place, so that no two segments share one; nullptr if the host refuses.
char* map_places(size_t nbytes, int flags) {
  flags |= MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, nbytes + kPlaceBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  auto* const first = static_cast<char*>(mapped);
  char* start = first + (round_to(address_of(first), kPlaceBytes) - address_of(first));
  if (start > first) {
    munmap(first, static_cast<size_t>(start - first));
  }
  if (start < first + kPlaceBytes) {
    munmap(start + nbytes, static_cast<size_t>(first + kPlaceBytes - start));
  }
  return start;
}

} // namespace

size_t round_to(size_t nbytes, size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

std::atomic<Block*>& DeviceSegment::block_from(const void* pointer) const {
  auto* table = reinterpret_cast<std::atomic<Block*>*>(start + round_to(size, kPlaceBytes));
  return table[static_cast<size_t>(static_cast<const char*>(pointer) - start) / kRoundBytes];
}

Block* map_segment(
    BlockPool* pool, size_t size, c10::StreamId home, bool is_small, MempoolId mempool, bool is_expandable) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t table = size / kRoundBytes * sizeof(std::atomic<Block*>);
  const size_t mapped = round_to(size, kPlaceBytes) + round_to(table, page);
  char* start =
      map_places(mapped, is_expandable || is_dry() ? MAP_NORESERVE : 0); // or the host counts addresses as memory
  if (start == nullptr) {
    return nullptr;
  }
  if (is_small || is_dry()) {
    madvise(start, mapped, MADV_NOHUGEPAGE); // a first small tensor must not take 2 MiB of the machine
  }
  auto* segment =
      new DeviceSegment{pool, start, size, mapped, next_serial.fetch_add(1), home, is_small, mempool, is_expandable};
  auto* block = new Block{segment, start, size};
  block->state = is_expandable ? Block::State::kUnmapped : Block::State::kIdle;
  segment->block_from(start) = block;
  enter(*segment, segment);
  return block;
}

void unmap_segment(Block* block) {
  DeviceSegment* segment = block->segment;
  return_to_machine(block->backed);
  enter(*segment, nullptr);
  munmap(segment->start, segment->mapped);
  delete block;
  delete segment;
}

Block* split(Block* block, size_t size) {
  auto* rest = new Block{block->segment, block->start + size, block->size - size, block, block->after};
  rest->state = block->state.load();
  rest->backed = block->backed - std::min(block->backed, size);
  rest->is_poisoned = block->is_poisoned;
  rest->is_dangerous = block->is_dangerous;
  block->size = size;
  block->backed = std::min(block->backed, size);
  block->after = rest;
  if (rest->after != nullptr) {
    rest->after->before = rest;
  }
  rest->segment->block_from(rest->start).store(rest, std::memory_order_release);
  return rest;
}

void merge_with_next(Block* block) {
  Block* next = block->after;
  if (block->backed < block->size) {
    drop_pages(next); // what may have pages must stay a prefix; only after pages were dropped before
  }
  block->backed += next->backed;
  block->size += next->size;
  block->is_poisoned = block->is_poisoned && next->is_poisoned;
  block->is_dangerous = block->is_dangerous || next->is_dangerous;
  block->after = next->after;
  if (block->after != nullptr) {
    block->after->before = block;
  }
  next->segment->block_from(next->start).store(nullptr, std::memory_order_release);
  delete next;
}

bool back(Block* block, size_t size) {
  if (size > block->backed && !is_dry()) {
    if (!take_from_machine(size - block->backed)) {
      return false;
    }
    block->backed = size;
    block->is_poisoned = false;
  }
  return true;
}

// The pages that a block shares with its neighbours stay, uncounted.
void drop_pages(Block* block) {
  if (block->backed == 0) {
    return;
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = round_to(address_of(block->start), page) - address_of(block->segment->start);
  const size_t end = (address_of(block->start) + block->backed) / page * page - address_of(block->segment->start);
  if (begin < end) {
    madvise(block->segment->start + begin, end - begin, MADV_DONTNEED);
  }
  return_to_machine(block->backed);
  block->backed = 0;
  block->is_poisoned = false;
}

DeviceSegment* segment_at(const void* pointer) {
  const uintptr_t address = address_of(pointer);
  if (address >> kAddressBits != 0) {
    return nullptr;
  }
  const Leaf* leaf = places[address >> kLeafBits].load(std::memory_order_acquire);
  DeviceSegment* found = leaf == nullptr ? nullptr : (*leaf)[(address >> kPlaceBits) % kLeafPlaces].load();
  return found != nullptr && found->contains(pointer) ? found : nullptr;
}

Block* block_at(const void* pointer) {
  const DeviceSegment* segment = segment_at(pointer);
  if (segment == nullptr) {
    return nullptr;
  }
  auto* entry = &segment->block_from(pointer);
  while (entry->load(std::memory_order_acquire) == nullptr) {
    --entry; // the first entry is never empty
  }
  return entry->load(std::memory_order_acquire);
}

DeviceSegment* pin(const void* pointer) {
  DeviceSegment* segment = segment_at(pointer);
  if (segment != nullptr) {
    segment->pins.fetch_add(1, std::memory_order_acq_rel);
  }
  return segment;
}

void unpin(DeviceSegment* segment) noexcept {
  segment->pins.fetch_sub(1, std::memory_order_acq_rel);
}

} // namespace torch_ext::sim
