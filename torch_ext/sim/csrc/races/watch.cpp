#include "watch.h"

#include <c10/util/ArrayRef.h>

#include "../allocator.h"
#include "../blocks.h"
#include "../device.h"
#include "../generator.h"
#include "../kernel_observer.h"
#include "../memory_history.h"
#include "../pinned_memory.h"
#include "../std.h"
#include "../stream.h"
#include "../symmetric_memory.h"
#include "checker.h"

namespace torch_ext::sim::races {
namespace {

constexpr int kPoison = 0xff; // NaN, or -1 in integers

uint64_t digest(std::string_view text) {
  uint64_t value = 0;
  for (const char each : text) {
    value = mix(value ^ static_cast<unsigned char>(each));
  }
  return value;
}

Region region_of(const sim::Access& access, const void* start) {
  const auto begin = static_cast<uint64_t>(static_cast<const char*>(access.data) - static_cast<const char*>(start));
  return {
      begin, c10::elementSize(access.type), std::span(access.sizes.data(), access.sizes.size()),
      std::span(access.strides.data(), access.strides.size())};
}

// site: none if the operation does not access symmetric memory.
void note_site(Operation& operation, std::optional<std::string> site) {
  if (site.has_value()) {
    operation.site = std::move(*site);
    operation.rank = symmetric::rank_of_process();
  }
}

std::string stream_name(c10::Stream stream) {
  const std::string device = std::string(kSimName) + ":" + std::to_string(static_cast<int>(stream.device_index()));
  return stream.id() == 0
      ? "the default stream of " + device
      : "stream " + std::to_string(stream.id()) + " of " + device;
}

const Clock& clock_of(const Moment& moment) {
  return *static_cast<const Clock*>(moment.get());
}

// The bytes that a late kernel of this thread must restore. Kernels may call kernels.
struct Begun {
  bool is_late = false;
  Schedule::Saved before;
};

// The host lane of this thread; kHost unless the thread is a rank.
thread_local Lane host_of_thread = kHost;

std::vector<Begun>& begun() {
  thread_local std::vector<Begun> stack;
  return stack;
}

// The device memory that `access` writes, if it is one run.
std::optional<Bytes> late_part(const sim::Access& access) {
  if (!access.write || access.device.type() != kSim) {
    return std::nullopt;
  }
  const Block* block = block_at(access.data);
  if (block == nullptr || !region_of(access, block->start).is_one_run()) {
    return std::nullopt;
  }
  return Bytes{block->start, static_cast<char*>(const_cast<void*>(access.data)), access.bytes};
}

} // namespace

void Schedule::set(Kind kind, uint64_t seed) {
  for (auto& [block, held] : held_) {
    publish(held, nullptr);
  }
  *this = Schedule();
  kind_ = kind;
  seed_ = seed;
}

bool Schedule::next_is_late(Lane lane, std::string_view kernel) {
  if (lane >= counts_.size()) {
    counts_.resize(size_t{lane} + 1);
  }
  const uint64_t drawn = mix(mix(seed_) ^ mix((uint64_t{lane} << 32U) + counts_[lane]++));
  const bool late = kind_ == Kind::kLate || (drawn & 1U) != 0;
  trace_ = mix(trace_ ^ digest(kernel) ^ mix((uint64_t{lane} << 1U) | (late ? 1U : 0U)));
  return late;
}

void Schedule::hold(const std::vector<Bytes>& written, const Saved& before, Epoch epoch) {
  // Stretches may overlap: read all before withdrawing any.
  for (const auto& where : written) {
    held_[where.block].push_back({where, std::vector<char>(where.at, where.at + where.size), epoch});
  }
  for (const auto& where : written) {
    const bool known = std::ranges::any_of(before, [&](const auto& saved) {
      return saved.first.at == where.at && saved.first.size == where.size;
    });
    if (!known) {
      std::memset(where.at, kPoison, where.size);
    }
  }
  for (const auto& [where, bytes] : before) {
    std::memcpy(where.at, bytes.data(), where.size);
  }
}

void Schedule::publish(const void* block, const Clock& clock) {
  if (const auto found = held_.find(block); found != held_.end()) {
    publish(found->second, &clock);
  }
}

void Schedule::publish(const Clock& clock) {
  for (auto& [block, held] : held_) {
    publish(held, &clock);
  }
  std::erase_if(held_, [](const auto& each) { return each.second.empty(); });
}

// Publishes results that are over by `clock`; all without a clock.
void Schedule::publish(std::vector<Held>& held, const Clock* clock) {
  std::erase_if(held, [&](const Held& each) {
    if (clock != nullptr && !clock->covers(each.epoch)) {
      return false;
    }
    std::memcpy(each.where.at, each.bytes.data(), each.where.size);
    return true;
  });
}

Watch& watch() {
  static auto* made = new Watch();
  return *made;
}

void Watch::kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept {
  Begun begin;
  if (!begun().empty()) {
    begin = std::move(begun().back());
    begun().pop_back();
  }
  if (accesses.empty()) {
    return;
  }
  auto stack = current_call_stack();
  auto site = site_of_shared(accesses);
  std::lock_guard<std::mutex> lock(mutex_);
  const Lane lane = lane_of(stream);
  const auto by = operation(name, lane, std::move(stack));
  note_site(*by, std::move(site));
  access_all(lane, accesses, by);
  if (begin.is_late && !schedule_.is_early()) {
    std::vector<Bytes> written;
    for (const auto& access : accesses) {
      if (const auto part = late_part(access)) {
        written.push_back(*part);
      }
    }
    schedule_.hold(written, begin.before, {lane, checker_.lanes().clock(lane).of(lane)});
  }
}

void Watch::kernel_begins(std::string_view name, c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept {
  Begun begin;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Lane lane = lane_of(stream);
    publish(lane, accesses);
    begin.is_late = schedule_.next_is_late(lane, name);
    for (const auto& access : accesses) {
      if (const auto part = begin.is_late ? late_part(access) : std::nullopt) {
        begin.before.emplace_back(*part, std::vector<char>(part->at, part->at + part->size));
      }
    }
  }
  begun().push_back(std::move(begin));
}

void Watch::launch_begins(c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  publish(lane_of(stream), accesses);
}

void Watch::set_schedule(Schedule::Kind kind, uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  schedule_.set(kind, seed);
  is_early_ = schedule_.is_early();
}

uint64_t Watch::trace() {
  std::lock_guard<std::mutex> lock(mutex_);
  return schedule_.trace();
}

void Watch::publish(Lane lane, c10::ArrayRef<sim::Access> accesses) {
  checker_.lanes().launch(lane, host());
  for (const auto& access : accesses) {
    if (const Block* block = access.device.type() == kSim ? block_at(access.data) : nullptr) {
      schedule_.publish(block->start, checker_.lanes().clock(lane));
    }
  }
}

void Watch::host_used(std::string_view name, c10::ArrayRef<sim::Access> accesses) noexcept {
  auto stack = current_call_stack();
  std::lock_guard<std::mutex> lock(mutex_);
  const Lane lane = host();
  access_all(lane, accesses, operation(name, lane, std::move(stack)));
}

Moment Watch::recorded(c10::Stream stream) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::make_shared<const Clock>(checker_.lanes().record(lane_of(stream), host()));
}

void Watch::stream_waits(c10::Stream stream, const Moment& moment) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  const Lane lane = lane_of(stream);
  checker_.lanes().launch(lane, host());
  checker_.lanes().wait(lane, clock_of(moment));
}

void Watch::host_knows(const Moment& moment) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  host_learns(clock_of(moment));
}

void Watch::host_knows(c10::Stream stream) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  host_learns(checker_.lanes().so_far(lane_of(stream)));
}

void Watch::host_knows(c10::DeviceIndex device) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock all;
  for (Lane lane = 0; lane < facts_.size(); ++lane) {
    if (facts_[lane].device == device) {
      all.join(checker_.lanes().so_far(lane));
    }
  }
  host_learns(all);
}

void Watch::handed_out(c10::Stream stream) noexcept {
  auto stack = current_call_stack();
  std::lock_guard<std::mutex> lock(mutex_);
  facts_[lane_of(stream)].handed_out = std::move(stack);
}

Moment Watch::launched(const Launch& launch) noexcept {
  auto stack = current_call_stack();
  auto site = site_of_shared(launch.accesses);
  std::lock_guard<std::mutex> lock(mutex_);
  auto& lanes = checker_.lanes();
  const Lane stream = lane_of(launch.stream);
  const Lane lane = launch.asynchronous ? lane_of(launch) : stream;
  if (lane != stream) {
    lanes.wait(lane, lanes.record(stream, host()));
  }
  const auto by = operation(launch.name, lane, std::move(stack));
  by->sequence = launch.sequence;
  note_site(*by, std::move(site));
  access_all(lane, launch.accesses, by, launch.stamp);
  return std::make_shared<const Clock>(lanes.record(lane, host()));
}

Moment Watch::joined(c10::ArrayRef<Moment> moments) noexcept {
  auto all = std::make_shared<Clock>();
  for (const auto& moment : moments) {
    all->join(clock_of(moment));
  }
  return all;
}

void Watch::allocated(const void* data, size_t /*bytes*/, c10::Stream stream) noexcept {
  const Block* block = block_at(data);
  if (block == nullptr) {
    return;
  }
  // Kernels report when they end; attribute their allocations then.
  auto stack = running_kernel.device >= 0 ? nullptr : current_call_stack();
  std::lock_guard<std::mutex> lock(mutex_);
  auto& made = owned(*block);
  made.owner.life = ++lives_;
  made.is_unnamed = stack == nullptr;
  made.owner.allocated = stack ? operation("allocation", lane_of(stream), std::move(stack)) : nullptr;
}

void Watch::freed(const void* data, c10::DeviceIndex device) noexcept {
  const Block* block = block_at(data);
  if (block == nullptr) {
    return;
  }
  const DeviceSegment& segment = *block->segment;
  // Reports name the free only for dangerous blocks; skip the cost of the stack otherwise.
  const bool dangerous = first_danger(data, block->size, stream_of(device, segment.home)).has_value();
  auto stack = dangerous ? current_call_stack() : nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  schedule_.drop(data);
  const auto found = segments_.find(segment.serial);
  if (found != segments_.end()) {
    auto& [serial, memory] = *found;
    const auto& [owner, is_unnamed, users, kept] = owned(*block);
    memory.history.forget(owner.bytes, kept);
    checker_.free(memory, owner, users, stack ? operation("free", kHost, std::move(stack)) : nullptr);
  }
  blocks_.erase(block->start);
}

void Watch::used_on(const void* data, c10::Stream stream) noexcept {
  const Block* block = block_at(data);
  if (block == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  owned(*block).users.push_back(lane_of(stream));
}

void Watch::kept_until(const void* data, const Moment& moment) noexcept {
  const Block* block = block_at(data);
  if (block == nullptr || block->state != Block::State::kLive) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  owned(*block).kept.join(clock_of(moment));
}

std::optional<size_t> Watch::first_danger(const void* data, size_t size, c10::Stream stream) noexcept {
  const DeviceSegment* segment = segment_at(data);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = segment == nullptr ? segments_.end() : segments_.find(segment->serial);
  if (found == segments_.end()) {
    return std::nullopt;
  }
  const auto begin = static_cast<uint64_t>(static_cast<const char*>(data) - segment->start);
  const auto first = checker_.first_danger(found->second, {begin, begin + size}, lane_of(stream), host());
  return first ? std::make_optional(*first - begin) : std::nullopt;
}

void Watch::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++checks_;
  segments_.clear();
  blocks_.clear();
  pinned_.clear();
  checker_.clear_races();
  for (auto& lane : facts_) {
    lane.handed_out = nullptr; // nobody observes the requests between checks
  }
}

std::vector<Race> Watch::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto races = checker_.races();
  checker_.clear_races();
  return races;
}

LaneFacts Watch::facts_of(Lane lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  return facts_[lane];
}

void Watch::begin_rank(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = ranks_.try_emplace(rank, kHost);
  if (is_new) {
    found->second = checker_.lanes().add_host();
    facts_.push_back({"the host of rank " + std::to_string(rank), -1, false, nullptr, rank});
  }
  host_of_thread = found->second;
  rank_hosts_.push_back(host_of_thread);
  checker_.lanes().wait(host_of_thread, checker_.lanes().record(kHost));
}

void Watch::end_rank() {
  std::lock_guard<std::mutex> lock(mutex_);
  checker_.lanes().wait(kHost, checker_.lanes().record(host_of_thread));
  std::erase(rank_hosts_, host_of_thread);
  host_of_thread = kHost;
}

std::optional<int> Watch::rank_of_thread() {
  std::lock_guard<std::mutex> lock(mutex_);
  return facts_[host_of_thread].rank;
}

void Watch::give(Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& lanes = checker_.lanes();
  const Lane from = host();
  handover.host.join(lanes.record(from));
  for (const auto device : devices) {
    handover.streams.join(lanes.record(lane_of(current_stream(device)), from));
  }
}

void Watch::take(const Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_learns(handover.host);
  for (const auto device : devices) {
    const Lane lane = lane_of(current_stream(device));
    checker_.lanes().launch(lane, host());
    checker_.lanes().wait(lane, handover.streams);
  }
}

Lane Watch::host() {
  if (host_of_thread == kHost) {
    for (const Lane rank : rank_hosts_) {
      checker_.lanes().wait(kHost, checker_.lanes().record(rank));
    }
  }
  return host_of_thread;
}

void Watch::host_learns(const Clock& clock) {
  const Lane lane = host();
  checker_.lanes().wait(lane, clock);
  if (lane == kHost) {
    for (const Lane rank : rank_hosts_) {
      checker_.lanes().wait(rank, clock);
    }
  }
  schedule_.publish(checker_.lanes().clock(lane));
}

std::optional<int> Watch::rank_of(const Access& access) {
  std::lock_guard<std::mutex> lock(mutex_);
  return facts_[static_cast<const Operation*>(access.origin.get())->host].rank;
}

Lane Watch::lane_of(c10::Stream stream) {
  Lane& lane = streams_[stream.device_index()][stream.id()];
  if (lane == kHost) {
    lane = new_lane({stream_name(stream), stream.device_index(), true, nullptr, std::nullopt});
  }
  return lane;
}

Lane Watch::lane_of(const Launch& launch) {
  const auto device = launch.stream.device_index();
  auto [found, is_new] = communication_.try_emplace({std::string(launch.group), launch.peer, device}, kHost);
  if (is_new) {
    const std::string group = "group " + std::string(launch.group) + " on " + kSimName + ":" + std::to_string(device);
    const std::string kind = launch.peer < 0 ? "collectives" : "transfers with rank " + std::to_string(launch.peer);
    found->second = new_lane({"the " + kind + " of " + group, device, false, nullptr, std::nullopt});
  }
  return found->second;
}

Lane Watch::new_lane(LaneFacts facts) {
  facts_.push_back(std::move(facts));
  return checker_.lanes().add();
}

std::pair<Memory*, const void*> Watch::memory_of(const sim::Access& access) {
  if (access.device.type() != kSim) {
    const auto pinned = pinned_block_at(access.data);
    if (!pinned.has_value()) {
      return {nullptr, nullptr};
    }
    auto& memory = pinned_[pinned->serial];
    memory.is_pinned = true;
    return {&memory, pinned->start};
  }
  const DeviceSegment* segment = segment_at(access.data);
  if (segment == nullptr) {
    return {nullptr, nullptr};
  }
  return {&segments_[segment->serial], segment->start};
}

Watch::Owned* Watch::owned_at(const void* pointer) {
  const auto after = blocks_.upper_bound(static_cast<const char*>(pointer));
  if (after == blocks_.begin()) {
    return nullptr;
  }
  auto& [start, found] = *std::prev(after);
  const auto size = found.owner.bytes.end - found.owner.bytes.begin;
  return static_cast<const char*>(pointer) < start + size ? &found : nullptr;
}

Watch::Owned& Watch::owned(const Block& block) {
  const auto begin = static_cast<uint64_t>(block.start - block.segment->start);
  return blocks_.try_emplace(block.start, Owned{{{begin, begin + block.size}, 0, nullptr}}).first->second;
}

std::shared_ptr<Operation> Watch::operation(std::string_view name, Lane lane, CallStack stack) {
  auto known = names_.find(name);
  if (known == names_.end()) {
    known = names_.emplace(std::string(name), names_.size()).first;
  }
  const uint64_t alike = (known->second << 16U) | lane;
  auto made = std::make_shared<Operation>(alike, known->first, std::move(stack));
  made->host = host_of_thread;
  made->node = current_autograd_node();
  return made;
}

// Adds reads first: an operator may read memory that it then writes.
void Watch::access_all(
    Lane lane, c10::ArrayRef<sim::Access> accesses, const std::shared_ptr<Operation>& by, std::string* stamp) {
  checker_.lanes().launch(lane, host());
  for (const auto& access : accesses) {
    by->operands.push_back({access.type, c10::SmallVector<int64_t, 4>(access.sizes.begin(), access.sizes.end())});
  }
  const OriginPtr origin = by;
  for (const bool write : {false, true}) {
    if (write && stamp != nullptr && knows_other_ranks()) {
      // A rank that has the result knows that the others' inputs have been read, and no more of their part.
      *stamp = stamp_of(checker_.lanes().so_far(lane));
    }
    for (uint32_t i = 0; i < accesses.size(); ++i) {
      if (accesses[i].write == write) {
        access_one(lane, accesses[i], i, origin);
      }
    }
  }
}

void Watch::access_one(Lane lane, const sim::Access& access, uint32_t operand, const OriginPtr& by) {
  const auto [memory, start] = memory_of(access);
  if (memory == nullptr) {
    if (symmetric::exists && access.device.type() == kSim) {
      access_shared(lane, access, operand, by);
    }
    return;
  }
  Owned unknown;
  Owned* found = owned_at(access.data);
  auto& [owner, is_unnamed, users, kept] = found == nullptr ? unknown : *found;
  if (std::exchange(is_unnamed, false)) {
    owner.allocated = by;
  }
  const auto kind = access.write ? Kind::kWrite : Kind::kRead;
  checker_.access(*memory, owner, region_of(access, start), lane, kind, operand, by);
}

} // namespace torch_ext::sim::races
