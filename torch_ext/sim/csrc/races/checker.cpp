#include "checker.h"

#include "../std.h"

namespace torch_ext::sim::races {
namespace {

// Sorts, and joins ranges that overlap or touch.
void tidy(std::vector<Range>& runs) {
  const auto starts_earlier = [](const Range& one, const Range& other) { return one.begin < other.begin; };
  if (!std::is_sorted(runs.begin(), runs.end(), starts_earlier)) {
    std::sort(runs.begin(), runs.end(), starts_earlier);
  }
  size_t kept = 0;
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].begin <= runs[kept].end) {
      runs[kept].end = std::max(runs[kept].end, runs[i].end);
    } else {
      runs[++kept] = runs[i];
    }
  }
  runs.resize(std::min(runs.size(), kept + 1));
}

// Views of up to this many runs are kept run by run.
constexpr uint64_t kRuns = 8;

bool is_unordered(const Access& earlier, const Access& later, const Clock& clock) {
  const bool conflicting = earlier.kind == Kind::kWrite || later.kind == Kind::kWrite;
  return earlier.exists() && conflicting && !clock.covers(earlier.epoch);
}

void report(const Access& earlier, Range bytes, std::vector<Conflict>& conflicts) {
  for (auto& known : conflicts) {
    if (known.earlier.origin == earlier.origin && known.earlier.kind == earlier.kind) {
      return;
    }
  }
  conflicts.push_back({earlier, bytes});
}

Range common(Range one, Range other) {
  return {std::max(one.begin, other.begin), std::min(one.end, other.end)};
}

// A missing wait in a loop repeats its race. Origins that are alike may still differ in their call stacks, so more than
// one race of a kind is kept.
constexpr size_t kRacesAlike = 16;

} // namespace

Region::Region(uint64_t begin, uint64_t itemsize, std::span<const int64_t> sizes, std::span<const int64_t> strides)
    : begin_(begin), run_(itemsize), extent_(itemsize) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      run_ = extent_ = 0;
      dims_.clear();
      return;
    }
    if (sizes[i] > 1 && strides[i] > 0) {
      dims_.push_back({static_cast<uint64_t>(sizes[i]), static_cast<uint64_t>(strides[i]) * itemsize});
    }
  }
  std::sort(dims_.begin(), dims_.end(), [](const Dim& one, const Dim& other) { return one.stride < other.stride; });
  size_t kept = 0;
  for (const Dim dim : dims_) {
    extent_ += dim.stride * (dim.size - 1);
    if (kept == 0 && dim.stride <= run_) {
      run_ += dim.stride * (dim.size - 1);
    } else if (kept > 0 && dim.stride == dims_[kept - 1].stride * dims_[kept - 1].size) {
      dims_[kept - 1].size *= dim.size;
    } else {
      dims_[kept++] = dim;
    }
  }
  dims_.resize(kept);
}

uint64_t Region::run_count() const {
  uint64_t count = 1;
  for (const Dim& dim : dims_) {
    count *= dim.size;
  }
  return count;
}

std::vector<Range> Region::runs() const {
  if (empty()) {
    return {};
  }
  std::vector<Range> found{{begin_, begin_ + run_}};
  found.reserve(run_count());
  for (const Dim& dim : dims_) {
    const size_t inner = found.size();
    for (uint64_t i = 1; i < dim.size; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        found.push_back({found[j].begin + i * dim.stride, found[j].end + i * dim.stride});
      }
    }
  }
  tidy(found);
  return found;
}

bool Region::meets(const Region& other) const {
  if (empty() || other.empty() || !extent().meets(other.extent())) {
    return false;
  }
  if (is_one_run() && other.is_one_run()) {
    return true;
  }
  if (alternates_with(other)) {
    return false;
  }
  const auto mine = runs();
  const auto theirs = other.runs();
  for (size_t i = 0, j = 0; i < mine.size() && j < theirs.size();) {
    if (mine[i].meets(theirs[j])) {
      return true;
    }
    ++(mine[i].end <= theirs[j].begin ? i : j);
  }
  return false;
}

bool Region::alternates_with(const Region& other) const {
  if (is_one_run() || other.is_one_run()) {
    return false;
  }
  const uint64_t period = dims_.front().stride;
  const auto repeats = [period](const Dim& dim) { return dim.stride % period == 0; };
  if (other.dims_.front().stride != period || !std::ranges::all_of(dims_, repeats) ||
      !std::ranges::all_of(other.dims_, repeats)) {
    return false;
  }
  const uint64_t offset = (other.begin_ % period + period - begin_ % period) % period;
  return offset >= run_ && period - offset >= other.run_;
}

void History::add(const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) {
  if (region.empty()) {
    return;
  }
  if (!scattered_.empty()) {
    check_scattered(region, access, clock, conflicts);
  }
  if (region.is_one_run()) {
    add_run(region.extent(), access, clock, conflicts);
  } else if (region.run_count() <= kRuns) {
    for (const Range run : region.runs()) {
      add_run(run, access, clock, conflicts);
    }
  } else {
    add_scattered(region, access, clock, conflicts);
  }
}

void History::add_run(Range bytes, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) {
  if (access.kind == Kind::kWrite) {
    erase_scattered(bytes, [](const Access& /*any*/) { return true; });
  }
  size_t first = first_after(bytes.begin);
  if (first < stretches_.size() && stretches_[first].bytes == bytes) {
    check(stretches_[first], access, clock, conflicts);
    update(stretches_[first], access, clock);
    return;
  }
  split(bytes.begin);
  split(bytes.end);
  first = first_after(bytes.begin);
  size_t end = first;
  for (; end < stretches_.size() && stretches_[end].bytes.begin < bytes.end; ++end) {
    check(stretches_[end], access, clock, conflicts);
  }
  if (access.kind == Kind::kWrite) {
    write(bytes, first, end, access);
  } else {
    read(bytes, first, access, clock);
  }
}

void History::add_scattered(
    const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) {
  const Range extent = region.extent();
  std::vector<Conflict> found;
  for (size_t i = first_after(extent.begin); i < stretches_.size() && stretches_[i].bytes.begin < extent.end; ++i) {
    const Range bytes = common(stretches_[i].bytes, extent);
    found.clear();
    check(stretches_[i], access, clock, found);
    if (!found.empty() && region.meets(Region(bytes.begin, bytes.end - bytes.begin))) {
      for (const auto& each : found) {
        report(each.earlier, bytes, conflicts);
      }
    }
  }
  for (auto& [lane, views] : scattered_) {
    const auto [first, last] = views.by_begin.equal_range(region.begin());
    for (auto each = first; each != last;) {
      const auto& other = each->second;
      const bool replaced = access.kind == Kind::kWrite || other.access.kind == Kind::kRead;
      const bool erased = replaced && clock.covers(other.access.epoch) && other.region == region;
      each = erased ? views.by_begin.erase(each) : std::next(each);
    }
  }
  auto& own = scattered_[access.epoch.lane];
  own.by_begin.emplace(region.begin(), Scattered{region, access});
  own.longest = std::max(own.longest, extent.end - extent.begin);
  own.last = access.epoch.tick;
}

void History::erase_scattered(Range within, const std::function<bool(const Access&)>& is_wanted) {
  for (auto& [lane, views] : scattered_) {
    const auto last = views.by_begin.lower_bound(within.end);
    for (auto each = views.by_begin.lower_bound(within.begin); each != last;) {
      const auto& [region, access] = each->second;
      const bool erased = within.contains(region.extent()) && is_wanted(access);
      each = erased ? views.by_begin.erase(each) : std::next(each);
    }
  }
}

void History::check_scattered(
    const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) const {
  const Range extent = region.extent();
  for (const auto& [lane, views] : scattered_) {
    if (clock.covers({lane, views.last})) {
      continue;
    }
    for (const auto& [begin, other] : views.near(extent)) {
      if (is_unordered(other.access, access, clock) && region.meets(other.region)) {
        report(other.access, common(extent, other.region.extent()), conflicts);
      }
    }
  }
}

void History::check(
    const Stretch& stretch, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) {
  if (is_unordered(stretch.write, access, clock)) {
    report(stretch.write, stretch.bytes, conflicts);
  }
  if (access.kind == Kind::kWrite) {
    for (const auto& read : stretch.reads) {
      if (is_unordered(read, access, clock)) {
        report(read, stretch.bytes, conflicts);
      }
    }
  }
}

void History::update(Stretch& stretch, const Access& access, const Clock& clock) {
  if (access.kind == Kind::kWrite) {
    stretch.write = access;
    stretch.reads.clear();
  } else {
    std::erase_if(stretch.reads, [&](const Access& read) { return clock.covers(read.epoch); });
    stretch.reads.push_back(access);
  }
}

size_t History::size() const {
  size_t count = stretches_.size();
  for (const auto& [lane, views] : scattered_) {
    count += views.by_begin.size();
  }
  return count;
}

// The first stretch that ends after `byte`.
size_t History::first_after(uint64_t byte) const {
  const auto found = std::upper_bound(
      stretches_.begin(), stretches_.end(), byte,
      [](uint64_t wanted, const Stretch& stretch) { return wanted < stretch.bytes.end; });
  return static_cast<size_t>(found - stretches_.begin());
}

// Splits the stretch that contains `byte`, if any, so that one ends there.
void History::split(uint64_t byte) {
  const size_t index = first_after(byte);
  if (index == stretches_.size() || stretches_[index].bytes.begin >= byte) {
    return;
  }
  Stretch rest = stretches_[index];
  rest.bytes.begin = byte;
  stretches_[index].bytes.end = byte;
  stretches_.insert(stretches_.begin() + static_cast<ptrdiff_t>(index) + 1, std::move(rest));
}

// Replaces the stretches from `first` to before `end`, which lie within `bytes`, by one.
void History::write(Range bytes, size_t first, size_t end, const Access& access) {
  const auto at = stretches_.begin() + static_cast<ptrdiff_t>(first);
  if (first == end) {
    stretches_.insert(at, Stretch{bytes, access, {}});
    return;
  }
  stretches_.erase(at + 1, stretches_.begin() + static_cast<ptrdiff_t>(end));
  at->bytes = bytes;
  at->write = access;
  at->reads.clear();
}

// Adds the read to each stretch within `bytes`, the first of which is `first`, and to new ones in the gaps.
void History::read(Range bytes, size_t first, const Access& access, const Clock& clock) {
  uint64_t done = bytes.begin;
  for (size_t i = first; done < bytes.end; ++i) {
    const uint64_t next = i < stretches_.size() ? std::min(stretches_[i].bytes.begin, bytes.end) : bytes.end;
    if (done < next) {
      stretches_.insert(stretches_.begin() + static_cast<ptrdiff_t>(i), Stretch{{done, next}, {}, {access}});
      done = next;
    } else {
      update(stretches_[i], access, clock);
      done = stretches_[i].bytes.end;
    }
  }
}

void History::forget(Range bytes, const Clock& clock) {
  const auto is_over = [&](const Access& access) { return clock.covers(access.epoch); };
  split(bytes.begin);
  split(bytes.end);
  const auto first = stretches_.begin() + static_cast<ptrdiff_t>(first_after(bytes.begin));
  const auto last = std::find_if(first, stretches_.end(), [&](const Stretch& each) {
    return each.bytes.begin >= bytes.end;
  });
  const auto kept = std::remove_if(first, last, [&](Stretch& stretch) {
    if (is_over(stretch.write)) {
      stretch.write = {};
    }
    std::erase_if(stretch.reads, is_over);
    return !stretch.write.exists() && stretch.reads.empty();
  });
  stretches_.erase(kept, last);
  erase_scattered(bytes, is_over);
}

std::optional<uint64_t> History::first_exposed(Range bytes, const Clock& one, const Clock& other) const {
  const auto exposed = [&](Epoch epoch) { return !one.covers(epoch) && !other.covers(epoch); };
  uint64_t first = bytes.end;
  for (size_t i = first_after(bytes.begin); i < stretches_.size() && stretches_[i].bytes.begin < bytes.end; ++i) {
    if (exposed(stretches_[i].write.epoch) || std::ranges::any_of(stretches_[i].reads, exposed, &Access::epoch)) {
      first = std::max(stretches_[i].bytes.begin, bytes.begin);
      break;
    }
  }
  for (const auto& [lane, views] : scattered_) {
    if (!exposed({lane, views.last})) {
      continue;
    }
    for (const auto& [begin, each] : views.near(bytes)) {
      const Range reached = common(each.region.extent(), bytes);
      if (!reached.empty() && exposed(each.access.epoch)) {
        first = std::min(first, reached.begin);
        break; // the next ones begin later
      }
    }
  }
  return first < bytes.end ? std::make_optional(first) : std::nullopt;
}

Lanes::Lanes() {
  add_host();
}

Lane Lanes::add() {
  lanes_.emplace_back();
  return static_cast<Lane>(lanes_.size() - 1);
}

Lane Lanes::add_host() {
  const Lane lane = add();
  lanes_[lane].is_host = true;
  return lane;
}

void Lanes::launch(Lane lane, Lane host) {
  auto& from = lanes_[host];
  auto& state = lanes_[lane];
  if (state.is_host || (state.host == host && state.host_version == from.version)) {
    return;
  }
  from.published = true;
  state.clock.join(from.clock);
  state.host = host;
  state.host_version = from.version;
}

Epoch Lanes::begin_access(Lane lane) {
  auto& state = lanes_[lane];
  if (state.published) {
    state.clock.advance(lane);
    state.published = false;
    ++state.version;
  }
  return {lane, state.clock.of(lane)};
}

Clock Lanes::record(Lane lane, Lane host) {
  launch(lane, host);
  return so_far(lane);
}

Clock Lanes::so_far(Lane lane) {
  lanes_[lane].published = true;
  return lanes_[lane].clock;
}

bool Lanes::wait(Lane lane, const Clock& clock) {
  auto& state = lanes_[lane];
  const bool learned = state.clock.join(clock);
  state.version += learned ? 1 : 0;
  return learned;
}

bool Checker::access(
    Memory& memory, const Owner& owner, const Region& region, Lane lane, Kind kind, uint32_t operand,
    OriginPtr origin) {
  if (region.empty()) {
    return false;
  }
  const Access made{lanes_.begin_access(lane), kind, owner.life, operand, std::move(origin)};
  conflicts_.clear();
  memory.history.add(region, made, lanes_.clock(lane), conflicts_);
  std::erase_if(conflicts_, [&](const Conflict& conflict) {
    return lanes_.is_host(lane) && lanes_.is_host(conflict.earlier.epoch.lane);
  });
  for (auto& conflict : conflicts_) {
    const auto end = std::ranges::find(memory.frees, conflict.earlier.life, &Free::life);
    const Range bytes = common(conflict.bytes, owner.bytes);
    keep(
        {std::move(conflict.earlier),
         made,
         {bytes.begin - owner.bytes.begin, bytes.end - owner.bytes.begin},
         owner.life,
         memory.is_pinned,
         owner.allocated,
         end == memory.frees.end() ? nullptr : end->origin});
  }
  return !conflicts_.empty();
}

void Checker::free(Memory& memory, const Owner& owner, const std::vector<Lane>& users, OriginPtr origin) {
  for (const Lane user : users) {
    memory.history.forget(owner.bytes, lanes_.so_far(user));
  }
  std::erase_if(memory.frees, [&](const Free& other) { return owner.bytes.contains(other.bytes); });
  if (origin != nullptr) {
    memory.frees.push_back({owner.bytes, owner.life, std::move(origin)});
  }
}

std::optional<uint64_t> Checker::first_danger(const Memory& memory, Range bytes, Lane lane, Lane host) const {
  return memory.history.first_exposed(bytes, lanes_.clock(lane), lanes_.clock(host));
}

void Checker::keep(Race race) {
  auto& kept = alike_[{race.earlier.origin->alike, race.later.origin->alike}];
  if (kept < kRacesAlike) {
    ++kept;
    races_.push_back(std::move(race));
  }
}

void Checker::clear_races() {
  races_.clear();
  alike_.clear();
}

} // namespace torch_ext::sim::races
