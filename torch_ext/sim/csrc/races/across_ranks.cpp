// The part of the watch that compares work of several ranks: see Note [Races between ranks] in journal.h.
#include "../device.h"
#include "../kernel_observer.h"
#include "../std.h"
#include "../symmetric_memory.h"
#include "../transport/fingerprint.h"
#include "checker.h"
#include "journal.h"
#include "watch.h"

namespace torch_ext::sim::races {
namespace {

Region region_of(const Logged& access) {
  return {
      access.begin, c10::elementSize(static_cast<c10::ScalarType>(access.type)), access.all_sizes(),
      access.all_strides()};
}

} // namespace

std::optional<std::string> site_of_shared(c10::ArrayRef<sim::Access> accesses) {
  const bool is_shared =
      symmetric::exists && std::ranges::any_of(accesses, [](const sim::Access& access) {
        return access.device.type() == kSim && symmetric::memory_at(access.data) != nullptr;
      });
  return is_shared ? std::make_optional(site_of_call()) : std::nullopt;
}

bool Watch::knows_other_ranks() const {
  return symmetric::exists || !foreign_.empty();
}

std::string Watch::stamp_of(const Clock& clock) const {
  std::vector<Stamped> ticks;
  const auto process = static_cast<uint32_t>(getpid());
  for (Lane lane = 0; lane < clock.end(); ++lane) {
    if (const Tick tick = clock.of(lane)) {
      const auto known = origins_.find(lane);
      const Stamped from = known == origins_.end() ? Stamped{process, lane, 0} : known->second;
      ticks.push_back({from.process, from.lane, tick});
    }
  }
  return as_stamp(ticks);
}

std::string Watch::stamp(c10::Stream stream) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  return knows_other_ranks() ? stamp_of(checker_.lanes().record(lane_of(stream), host())) : "";
}

std::string Watch::host_stamp() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  return knows_other_ranks() ? stamp_of(checker_.lanes().record(host(), host())) : "";
}

Moment Watch::learned(const std::vector<std::string>& stamps) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Clock> clock;
  for (const auto& stamp : stamps) {
    for (const auto& ticks : from_stamp(stamp)) {
      clock = clock == nullptr ? std::make_shared<Clock>() : clock;
      clock->raise(lane_of(ticks), ticks.tick);
    }
  }
  return clock;
}

Lane Watch::lane_of(const Stamped& epoch) {
  if (epoch.process == static_cast<uint32_t>(getpid())) {
    return epoch.lane;
  }
  auto [found, is_new] = foreign_.try_emplace({epoch.process, epoch.lane}, kHost);
  if (is_new) {
    found->second = new_lane({"another rank", kMaxDevices, false, nullptr, std::nullopt});
    origins_[found->second] = epoch;
  }
  return found->second;
}

void Watch::access_shared(Lane lane, const sim::Access& access, uint32_t operand, const OriginPtr& by) {
  const auto memory = symmetric::memory_at(access.data);
  if (memory == nullptr || access.data < memory->buffer()) {
    return; // of a signal pad: programs wait on it by reading it
  }
  auto& lanes = checker_.lanes();
  const auto& operation = *static_cast<const Operation*>(by.get());
  Logged mine{};
  mine.check = checks_;
  mine.epoch = {static_cast<uint32_t>(getpid()), lane, lanes.begin_access(lane).tick};
  mine.rank = static_cast<int32_t>(symmetric::rank_of_process());
  mine.writes = access.write;
  mine.begin = static_cast<uint64_t>(static_cast<const char*>(access.data) - memory->buffer());
  if (access.sizes.size() <= kLoggedDims) {
    mine.type = static_cast<int8_t>(access.type);
    mine.dims = static_cast<uint8_t>(access.sizes.size());
    std::ranges::copy(access.sizes, mine.sizes.begin());
    std::ranges::copy(access.strides, mine.strides.begin());
  } else { // from the first byte to the last
    mine.type = static_cast<int8_t>(c10::ScalarType::Byte);
    mine.dims = 1;
    mine.sizes[0] = static_cast<int64_t>(access.bytes);
    mine.strides[0] = 1;
  }
  copy_text(mine.name, sizeof mine.name, operation.name);
  copy_text(mine.lane, sizeof mine.lane, facts_[lane].name);
  copy_text(mine.site, sizeof mine.site, operation.site);
  const Region region = region_of(mine);
  log_access(*memory, mine, [&](const Logged& other) {
    if (other.check != checks_ || !(other.writes || mine.writes)) {
      return;
    }
    const Epoch epoch{lane_of(other.epoch), other.epoch.tick};
    if (lanes.clock(lane).covers(epoch) || !region_of(other).meets(region)) {
      return;
    }
    if (other.epoch.process != mine.epoch.process) {
      facts_[epoch.lane].name = other.lane;
    }
    const auto earlier = this->operation(other.name, epoch.lane, nullptr);
    earlier->site = other.site;
    earlier->rank = other.rank;
    earlier->operands.push_back(
        {static_cast<c10::ScalarType>(other.type), {other.all_sizes().begin(), other.all_sizes().end()}});
    const Range one = region.extent(), two = region_of(other).extent();
    checker_.keep(
        {{epoch, other.writes ? Kind::kWrite : Kind::kRead, 0, 0, earlier},
         {{lane, mine.epoch.tick}, mine.writes ? Kind::kWrite : Kind::kRead, 0, operand, by},
         {std::max(one.begin, two.begin), std::min(one.end, two.end)},
         0,
         false,
         nullptr,
         nullptr,
         memory->rank < 0 ? symmetric::rank_of_process() : memory->rank});
  });
}

} // namespace torch_ext::sim::races
