#include "block_pool.h"

#include "allocator.h"
#include "blocks.h"
#include "device.h"
#include "dry.h"
#include "kernel_observer.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

using c10::CachingAllocator::kMinLargeAlloc;
using c10::CachingAllocator::kRoundLarge;
using c10::CachingAllocator::kSmallBuffer;
using c10::CachingAllocator::kSmallSize;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;
using Settings = c10::CachingAllocator::AcceleratorAllocatorConfig;
using State = Block::State;

// Up to the next of `divisions` equal steps between two powers of two.
size_t round_to_division(size_t nbytes, size_t divisions) {
  const size_t floor = std::bit_floor(nbytes);
  const size_t step = floor / std::bit_floor(divisions);
  return nbytes == floor ? nbytes : step == 0 ? floor * 2 : (nbytes + step - 1) / step * step;
}

size_t round_up(size_t nbytes) {
  const size_t divisions = Settings::roundup_power2_divisions(nbytes);
  if (divisions > 1 && nbytes > kRoundBytes * divisions) {
    return round_to_division(nbytes, divisions);
  }
  return std::max(kRoundBytes, round_to(nbytes, kRoundBytes));
}

bool is_oversize(size_t size) {
  return size >= Settings::max_split_size();
}

bool should_split(const Block& block, size_t size) {
  const size_t rest = block.size - size;
  const bool splits_all = block.segment->is_small || Settings::use_expandable_segments();
  return splits_all ? rest >= kRoundBytes : !is_oversize(size) && rest > kSmallSize;
}

// Bytes of a block that is idle in a segment with others. An expandable segment can return such bytes.
int64_t inactive_bytes(const Block* block) {
  const bool is_inactive = block != nullptr && block->is_split() && block->state == State::kIdle;
  return is_inactive && !block->segment->is_expandable ? static_cast<int64_t>(block->size) : 0;
}

// Bytes of a block with the unmapped ones behind it.
size_t expandable_bytes(const Block* block) {
  return block->size + (block->after != nullptr && block->after->state == State::kUnmapped ? block->after->size : 0);
}

// What an expandable segment maps at once.
size_t unit_of(bool is_small) {
  return is_small ? kSmallBuffer : Settings::large_segment_size();
}

void change(Stat& stat, int64_t by) {
  if (by > 0) {
    stat.increase(static_cast<size_t>(by));
  } else {
    stat.decrease(static_cast<size_t>(-by));
  }
}

void change(StatArray& stats, bool is_small, int64_t by) {
  for (const auto kind : {StatType::AGGREGATE, is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    change(stats[static_cast<size_t>(kind)], by);
  }
}

// Counts one more (`by` is 1) or one less (-1) block or segment of `size` bytes.
void count(StatArray& numbers, StatArray& bytes, Stat& oversize, bool is_small, size_t size, int64_t by) {
  change(numbers, is_small, by);
  change(bytes, is_small, by * static_cast<int64_t>(size));
  change(oversize, is_oversize(size) ? by : 0);
}

size_t total(const StatArray& stats) {
  return static_cast<size_t>(stats[static_cast<size_t>(StatType::AGGREGATE)].current);
}

bool is_over(const std::weak_ptr<Elsewhere>& operation) {
  const auto one = operation.lock();
  return one == nullptr || one->over_at() != 0;
}

} // namespace

size_t segment_size(size_t nbytes) {
  const size_t size = round_up(nbytes);
  if (size <= kSmallSize) {
    return kSmallBuffer;
  }
  return size < kMinLargeAlloc ? Settings::large_segment_size() : round_to(size, kRoundLarge);
}

Block* BlockPool::take(size_t nbytes, c10::Stream stream, MempoolId mempool, bool is_scratch) {
  advance_users();
  const Fit fit{mempool, stream.id(), round_up(nbytes)};
  const bool is_small = fit.size <= kSmallSize;
  auto whose = Short::kDevice;
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::unique_lock<std::mutex> lock(mutex_);
    poll();
    Block* block = take_idle(is_small, fit);
    if (block == nullptr) {
      block = take_fresh(is_small, fit, whose);
    }
    if (block == nullptr && mempool == MempoolId{}) {
      block = take_lent(is_small, fit);
    }
    if (block == nullptr && is_dry()) {
      lock.unlock(); // the note needs the GIL
      if (is_recording_memory()) {
        note_memory({MemoryEvent::Kind::kOutOfMemory, device_, nullptr, nbytes, 0, 0, 0, amounts().left(), nullptr});
      }
      lock.lock();
      block = take_beyond(is_small, fit);
    }
    if (block == nullptr) {
      break;
    }
    if (back(block, fit.size)) {
      hand_out(block, fit.size, nbytes, is_scratch);
      return block;
    }
    insert(block);
    whose = Short::kMachine;
    lock.unlock(); // other devices of this process may hold idle memory
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      pool_of(index).drop_idle_pages();
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_ooms += 1;
  }
  raise_out_of_memory(*this, nbytes, whose);
}

void BlockPool::count_result(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  block->is_scratch = false;
  count_allocated(block, 1);
  count_active(block, 1);
}

void BlockPool::give_back(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!block->is_scratch) {
    count_allocated(block, -1);
  }
  InUse use{block, 0, std::exchange(block->pending, {})};
  if (block->users.empty() && !use.is_held_up()) {
    settle(block);
    return;
  }
  for (const auto& user : std::exchange(block->users, {})) {
    use.until = std::max(use.until, busy_until(user));
    const auto pending = pending_of(user);
    use.pending.insert(use.pending.end(), pending.begin(), pending.end());
  }
  block->state = State::kInUse;
  in_use_.push_back(std::move(use));
}

void BlockPool::add_user(Block* block, c10::Stream stream) {
  if (stream.device_index() == device_ && stream.id() == block->segment->home) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::ranges::find(block->users, stream) == block->users.end()) {
    block->users.push_back(stream);
  }
}

void BlockPool::add_pending(Block* block, const std::shared_ptr<Elsewhere>& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(block->pending, &is_over);
  block->pending.push_back(operation);
}

void BlockPool::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  release_cached();
}

void BlockPool::drop_idle_pages() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Idle* idle : {&small_, &large_}) {
    std::ranges::for_each(idle->blocks, &drop_pages);
  }
}

void BlockPool::begin_capture(MempoolId mempool) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& use = graphs_[mempool];
  ++use.count;
  ++use.captures;
}

void BlockPool::end_capture(MempoolId mempool) {
  std::lock_guard<std::mutex> lock(mutex_);
  --graphs_[mempool].captures;
}

void BlockPool::drop_graph(MempoolId mempool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--graphs_[mempool].count == 0) {
    graphs_.erase(mempool);
  }
}

void BlockPool::open(MempoolId mempool, bool lends, bool is_whole) {
  std::lock_guard<std::mutex> lock(mutex_);
  graphs_[mempool] = {1, 0, lends, is_whole};
}

void BlockPool::close(MempoolId mempool) {
  drop_graph(mempool);
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto kept = graphs_.find(mempool); kept != graphs_.end()) {
    kept->second.lends = false; // a graph uses it
  }
  poll();
  release_idle([&](const Block* block) { return block->segment->mempool == mempool; });
}

int BlockPool::use_count(MempoolId mempool) {
  std::lock_guard<std::mutex> lock(mutex_);
  return graphs_[mempool].count;
}

bool BlockPool::is_captured(MempoolId mempool) const {
  const auto found = graphs_.find(mempool);
  return found != graphs_.end() && found->second.captures > 0;
}

bool BlockPool::is_whole(MempoolId mempool) const {
  const auto found = graphs_.find(mempool);
  return found != graphs_.end() && found->second.is_whole;
}

bool BlockPool::is_dangerous(const Block* block) const {
  auto* const watching = current_observer.load();
  const auto home = stream_of(device_, block->segment->home);
  return watching != nullptr && watching->first_danger(block->start, block->size, home).has_value();
}

void BlockPool::fill_blocks_of(uint64_t capture, int byte) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [serial, segment] : segments_) {
    for (Block* block = segment->block_from(segment->start); block != nullptr; block = block->after) {
      if (block->capture == capture && block->state == State::kLive) {
        std::memset(block->start, byte, block->size);
      }
    }
  }
}

Amounts BlockPool::amounts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals();
}

std::vector<SegmentFacts> BlockPool::segments() {
  std::vector<SegmentFacts> all;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [serial, segment] : segments_) {
    bool begins = true; // a segment of the snapshot, which is what is mapped together
    for (const Block* block = segment->block_from(segment->start); block != nullptr; block = block->after) {
      const bool is_unmapped = block->state == State::kUnmapped;
      if (begins && !is_unmapped) {
        all.emplace_back(block->start, 0, segment->home, segment->is_small, segment->mempool, segment->is_expandable);
      }
      begins = is_unmapped;
      if (!is_unmapped) {
        all.back().size += block->size;
        all.back().blocks.emplace_back(block->start, block->size, block->requested, block->kernel, block->state.load());
      }
    }
  }
  return all;
}

DeviceStats BlockPool::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.max_split_size = static_cast<int64_t>(Settings::max_split_size());
  return stats_;
}

void BlockPool::reset_accumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

void BlockPool::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_peak(); });
}

Amounts BlockPool::totals() const {
  const size_t limit = limit_;
  const auto allowed = fraction_ < 1 ? static_cast<size_t>(fraction_ * static_cast<double>(limit)) : limit;
  return {total(stats_.allocated_bytes), total(stats_.reserved_bytes), limit, allowed};
}

bool BlockPool::collects_garbage() const {
  return fraction_ < 1 && Settings::garbage_collection_threshold() > 0;
}

Block* BlockPool::take_idle(bool is_small, Fit fit) {
  auto* const watching = current_observer.load();
  const bool ignores_danger = dangerous_ == 0 || watching == nullptr || fit.mempool != MempoolId{};
  if (Block* block = ignores_danger ? nullptr : take_dangerous(is_small, fit, *watching)) {
    return block;
  }
  auto& idle = idle_of(is_small);
  idle.searches += collects_garbage() ? 1 : 0;
  auto found = idle.blocks.lower_bound(fit);
  const auto serves = [&](auto each) { return each != idle.blocks.end() && fit.is_served_by(*each); };
  if (!Settings::use_expandable_segments()) { // it may change in a run
    found = std::find_if(found, idle.blocks.end(), [](const Block* each) { return !each->segment->is_expandable; });
  }
  if (!serves(found)) {
    return nullptr;
  }
  for (auto next = std::next(found);
       (*found)->segment->is_expandable && serves(next) && expandable_bytes(*next) < expandable_bytes(*found); ++next) {
    found = next;
  }
  Block* block = *found;
  // Oversize blocks serve oversize requests only, and those only if little is wasted.
  const bool suits = is_oversize(fit.size)
      ? block->size < fit.size + Settings::max_non_split_rounding_size()
      : !is_oversize(block->size);
  if (!suits) {
    return nullptr;
  }
  remove(block);
  return block;
}

// See Note [Dangerous blocks].
Block* BlockPool::take_dangerous(bool is_small, Fit fit, Observer& watching) {
  auto& blocks = idle_of(is_small).blocks;
  for (auto each = blocks.lower_bound(fit); each != blocks.end() && fit.is_served_by(*each); ++each) {
    Block* block = *each;
    if (!block->is_dangerous) {
      continue;
    }
    const auto first = watching.first_danger(block->start, block->size, stream_of(device_, fit.home));
    if (!first.has_value()) {
      block->is_dangerous = false;
      --dangerous_;
      continue;
    }
    remove(block);
    const size_t before = std::min(*first / kRoundBytes * kRoundBytes, block->size - fit.size);
    if (before == 0) {
      return block;
    }
    if (!block->segment->is_expandable) {
      count_inactive(is_small, block->is_split() ? 1 : 2, static_cast<int64_t>(block->size) - inactive_bytes(block));
    }
    Block* chosen = split(block, before);
    block->is_dangerous = false;
    insert(block);
    return chosen;
  }
  return nullptr;
}

Block* BlockPool::take_fresh(bool is_small, Fit fit, Short& whose) {
  if (collects_garbage()) {
    collect_garbage();
  }
  Block* block = new_segment(is_small, fit, whose);
  if (block == nullptr && release_oversize(is_small, fit)) {
    block = new_segment(is_small, fit, whose);
  }
  if (block == nullptr) {
    release_cached();
    stats_.num_alloc_retries += 1;
    block = new_segment(is_small, fit, whose);
  }
  return block;
}

Block* BlockPool::take_lent(bool is_small, Fit fit) {
  for (const auto& [mempool, use] : graphs_) {
    if (Block* block = use.lends ? take_idle(is_small, {mempool, fit.home, fit.size}) : nullptr) {
      return block;
    }
  }
  return nullptr;
}

Block* BlockPool::new_segment(bool is_small, Fit fit, Short& whose) {
  const size_t size = segment_size(fit.size);
  const bool expands = Settings::use_expandable_segments();
  if (size > totals().left() && (!expands || fraction_ < 1)) {
    whose = Short::kDevice;
    return nullptr;
  }
  if (expands) {
    return expand(is_small, fit, whose);
  }
  Block* block = map_segment(this, size, fit.home, is_small, fit.mempool, /*is_expandable=*/false);
  if (block == nullptr) {
    whose = Short::kMachine;
    return nullptr;
  }
  segments_[block->segment->serial] = block->segment;
  count(stats_.segment, stats_.reserved_bytes, stats_.oversize_segments, is_small, size, 1);
  stats_.num_device_alloc += 1;
  return block;
}

Block* BlockPool::take_beyond(bool is_small, Fit fit) {
  auto whose = Short::kDevice;
  const size_t limit = limit_.exchange(totals().reserved + 2 * segment_size(fit.size));
  Block* block = new_segment(is_small, fit, whose);
  limit_ = limit;
  return block;
}

// See Note [Expandable segments].
Block* BlockPool::expand(bool is_small, Fit fit, Short& whose) {
  Block* block = find_room(is_small, fit);
  whose = block == nullptr ? Short::kMachine : Short::kDevice;
  while (block != nullptr && (block->state == State::kUnmapped || block->size < fit.size)) {
    Block* next = block->state == State::kUnmapped ? block : block->after;
    const size_t missing = fit.size - (next == block ? 0 : block->size);
    block = map(next, std::min(missing, next->size));
  }
  if (block != nullptr) {
    remove(block);
  }
  return block;
}

// The first of idle and unmapped neighbours that suffice together.
Block* BlockPool::find_room(bool is_small, Fit fit) {
  const auto is_idle = [](const Block* block) { return block != nullptr && block->state == State::kIdle; };
  const auto suffices = [&](const Block* block) {
    size_t found = 0;
    while (found < fit.size && block != nullptr && (is_idle(block) || block->state == State::kUnmapped)) {
      found += block->size;
      block = block->after;
    }
    return found >= fit.size;
  };
  for (const auto& [serial, segment] : segments_) {
    Block* each = segment->block_from(segment->start);
    const bool suits = segment->is_expandable && segment->is_small == is_small && fit.is_served_by(each);
    for (; suits && each != nullptr; each = each->after) {
      Block* first = is_idle(each->before) ? each->before : each;
      if (each->state == State::kUnmapped && suffices(first)) {
        return first;
      }
    }
  }
  const size_t size = round_to(limit_ + limit_ / 8, unit_of(is_small));
  Block* block = map_segment(this, size, fit.home, is_small, fit.mempool, /*is_expandable=*/true);
  if (block != nullptr) {
    segments_[block->segment->serial] = block->segment;
  }
  return block;
}

// Maps the front of an unmapped block. Returns an idle block with it; nullptr past the device's memory.
Block* BlockPool::map(Block* block, size_t size) {
  const bool is_small = block->segment->is_small;
  size = round_to(size, unit_of(is_small));
  if (size + totals().reserved > limit_) {
    return nullptr;
  }
  if (size < block->size) {
    split(block, size);
  }
  block->state = State::kIdle;
  block->is_dangerous = is_dangerous(block);
  change(stats_.reserved_bytes, is_small, static_cast<int64_t>(size));
  stats_.num_device_alloc += 1;
  block = join(block);
  insert(block);
  return block;
}

// Unmaps the whole units of an idle block. False if it has none.
bool BlockPool::unmap(Block* block) {
  DeviceSegment* segment = block->segment;
  const size_t unit = unit_of(segment->is_small);
  const auto offset = static_cast<size_t>(block->start - segment->start);
  const size_t begin = round_to(offset, unit), end = (offset + block->size) / unit * unit;
  if (begin >= end) {
    return false;
  }
  remove(block);
  if (end < offset + block->size) {
    insert(split(block, end - offset));
  }
  if (begin > offset) {
    insert(std::exchange(block, split(block, begin - offset)));
  }
  drop_pages(block);
  block->state = State::kUnmapped;
  block->is_dangerous = false;
  change(stats_.reserved_bytes, segment->is_small, -static_cast<int64_t>(block->size));
  stats_.num_device_free += 1;
  block = join(block);
  if (!block->is_split()) {
    segments_.erase(segment->serial);
    unmap_segment(block);
  }
  return true;
}

void BlockPool::hand_out(Block* block, size_t size, size_t requested, bool is_scratch) {
  const bool is_small = block->segment->is_small;
  const int64_t idle_before = inactive_bytes(block);
  const bool splits = should_split(*block, size) && !is_whole(block->segment->mempool);
  Block* rest = splits ? split(block, size) : nullptr;
  if (rest != nullptr) {
    insert(rest);
  }
  const int64_t idle_after = inactive_bytes(rest);
  count_inactive(is_small, (idle_after > 0 ? 1 : 0) - (idle_before > 0 ? 1 : 0), idle_after - idle_before);
  block->is_dangerous = false;
  block->requested = requested;
  block->is_scratch = is_scratch;
  block->state = State::kLive;
  if (!is_scratch) {
    count_allocated(block, 1);
    count_active(block, 1);
  }
}

void BlockPool::count_allocated(const Block* block, int64_t by) {
  count(
      stats_.allocation, stats_.allocated_bytes, stats_.oversize_allocations, block->segment->is_small, block->size,
      by);
}

void BlockPool::count_active(const Block* block, int64_t by) {
  const bool is_small = block->segment->is_small;
  change(stats_.active, is_small, by);
  change(stats_.active_bytes, is_small, by * static_cast<int64_t>(block->size));
  change(stats_.requested_bytes, is_small, by * static_cast<int64_t>(block->requested));
}

// No stream uses the block any more.
void BlockPool::settle(Block* block) {
  const bool is_small = block->segment->is_small;
  if (!std::exchange(block->is_scratch, false)) {
    count_active(block, -1);
  }
  block->is_dangerous = is_dangerous(block);
  block->requested = 0;
  int64_t blocks = 0;
  int64_t bytes = 0;
  const auto add = [&](const Block* inactive, int64_t by) {
    const int64_t size = inactive_bytes(inactive);
    blocks += size > 0 ? by : 0;
    bytes += size * by;
  };
  add(block->before, -1);
  add(block->after, -1);
  block->state = State::kIdle;
  block = join(block);
  insert(block);
  add(block, 1);
  count_inactive(is_small, blocks, bytes);
}

// Joins an idle or unmapped block, in no pool, with its neighbours in the same state. Returns the whole.
Block* BlockPool::join(Block* block) {
  const auto take_in = [&](Block* neighbour) {
    const bool joins = neighbour != nullptr && neighbour->state == block->state;
    if (joins && neighbour->state == State::kIdle) {
      remove(neighbour);
    }
    return joins;
  };
  if (take_in(block->after)) {
    merge_with_next(block);
  }
  if (Block* before = block->before; take_in(before)) {
    merge_with_next(before);
    block = before;
  }
  return block;
}

void BlockPool::insert(Block* block) {
  auto& idle = idle_of(block->segment->is_small);
  block->idle_since = idle.searches;
  idle.blocks.insert(block);
  dangerous_ += block->is_dangerous ? 1 : 0;
}

void BlockPool::remove(Block* block) {
  idle_of(block->segment->is_small).blocks.erase(block);
  dangerous_ -= block->is_dangerous ? 1 : 0;
}

void BlockPool::count_inactive(bool is_small, int64_t blocks, int64_t bytes) {
  change(stats_.inactive_split, is_small, blocks);
  change(stats_.inactive_split_bytes, is_small, bytes);
}

bool BlockPool::InUse::is_held_up() const {
  return !std::ranges::all_of(pending, &is_over);
}

// Advances the operations that hold up users, since no other thread may do so. Call without the lock: a completed
// operation frees its tensors.
void BlockPool::advance_users() {
  Elsewheres pending;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& each : in_use_) {
      for (const auto& one : each.pending) {
        pending.push_back(one.lock());
      }
    }
  }
  if (!pending.empty()) {
    WithoutGil without;
    for (const auto& one : pending) {
      if (one != nullptr) {
        one->advance();
      }
    }
  }
}

// Finds blocks whose users are done. Orders nothing for the host: see Note [Lives of a block] in races/checker.h.
void BlockPool::poll() {
  if (in_use_.empty()) {
    return;
  }
  const int64_t moment = stream_clock();
  const auto over = std::stable_partition(in_use_.begin(), in_use_.end(), [&](const InUse& each) {
    return is_captured(each.block->segment->mempool) || each.until > moment ||
        (each.is_held_up() && !is_dangerous(each.block));
  });
  const std::vector<InUse> done(over, in_use_.end());
  in_use_.erase(over, in_use_.end());
  for (const auto& each : done) {
    settle(each.block);
  }
}

// Returns the large segments that have been idle for longer than the average, until enough is reserved no more.
void BlockPool::collect_garbage() {
  const auto threshold =
      static_cast<size_t>(Settings::garbage_collection_threshold() * static_cast<double>(totals().allowed));
  const size_t reserved = total(stats_.reserved_bytes);
  if (reserved <= threshold) {
    return;
  }
  std::vector<Block*> whole;
  int64_t ages = 0;
  const auto age = [&](const Block* block) { return large_.searches - block->idle_since; };
  for (Block* block : large_.blocks) {
    if (!block->is_split()) {
      whole.push_back(block);
      ages += age(block);
    }
  }
  bool released = true;
  while (released && !whole.empty() && reserved - total(stats_.reserved_bytes) < reserved - threshold) {
    const double average = static_cast<double>(ages) / static_cast<double>(whole.size());
    released =
        std::erase_if(whole, [&](Block* block) {
          const int64_t own = age(block);
          const bool old = static_cast<double>(own) >= average && release(block);
          ages -= old ? own : 0;
          return old;
        }) > 0;
  }
}

// Returns oversize segments to the host, largest first, until they make up for the request; one, if one suffices.
bool BlockPool::release_oversize(bool is_small, Fit fit) {
  auto& blocks = idle_of(is_small).blocks;
  const size_t wanted = std::max(fit.size, Settings::max_split_size());
  auto found = blocks.lower_bound(Fit{fit.mempool, fit.home, wanted});
  if (found != blocks.end() && fit.is_served_by(*found)) {
    return release(*found);
  }
  size_t released = 0;
  while (released < wanted && found != blocks.begin()) {
    Block* block = *--found;
    if (!fit.is_served_by(block) || !is_oversize(block->size)) {
      break;
    }
    ++found;
    const size_t size = block->size;
    if (!release(block)) {
      break;
    }
    released += size;
  }
  return released >= wanted;
}

void BlockPool::release_cached() {
  stats_.num_sync_all_streams += 1;
  for (auto& each : std::exchange(in_use_, {})) {
    sleep_until({each.until});
    if (each.is_held_up() || is_captured(each.block->segment->mempool)) {
      in_use_.push_back(std::move(each)); // an operation still writes to it
    } else {
      settle(each.block);
    }
  }
  release_idle([](const Block* /*block*/) { return true; });
}

void BlockPool::release_idle(const std::function<bool(const Block*)>& chosen) {
  for (const Idle* idle : {&large_, &small_}) {
    std::vector<Block*> blocks;
    std::ranges::copy_if(idle->blocks, std::back_inserter(blocks), chosen);
    std::ranges::for_each(blocks, [this](Block* block) { release(block); });
  }
}

// Returns the segment of an idle block to the host; of an expandable one, the block's units. False if the segment has
// other blocks, an operation still writes to it, or graphs use it.
bool BlockPool::release(Block* block) {
  DeviceSegment* segment = block->segment;
  if (graphs_.contains(segment->mempool) || segment->pins.load(std::memory_order_acquire) != 0) {
    return false;
  }
  if (segment->is_expandable) {
    return unmap(block);
  }
  if (block->is_split()) {
    return false;
  }
  remove(block);
  segments_.erase(segment->serial);
  count(stats_.segment, stats_.reserved_bytes, stats_.oversize_segments, segment->is_small, segment->size, -1);
  stats_.num_device_free += 1;
  unmap_segment(block);
  return true;
}

} // namespace torch_ext::sim
