#include "checker.h"

#include "../std.h"
#include "history.h"

namespace torch_ext::sim::races {

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
  from.told = true;
  state.clock.join(from.clock);
  state.host = host;
  state.host_version = from.version;
}

Epoch Lanes::begin_access(Lane lane) {
  auto& state = lanes_[lane];
  if (state.told) {
    state.clock.advance(lane);
    state.told = false;
    ++state.version;
  }
  return {lane, state.clock.of(lane)};
}

Clock Lanes::record(Lane lane, Lane host) {
  launch(lane, host);
  return so_far(lane);
}

Clock Lanes::so_far(Lane lane) {
  lanes_[lane].told = true;
  return lanes_[lane].clock;
}

bool Lanes::wait(Lane lane, const Clock& clock) {
  auto& state = lanes_[lane];
  const bool learned = state.clock.join(clock);
  state.version += learned ? 1 : 0;
  return learned;
}

namespace {

// A missing wait in a loop is met again and again. Origins that are alike may still differ in where they were called
// from, so more than one race of a kind is kept.
constexpr size_t kRacesAlike = 16;

} // namespace

bool Checker::access(Memory& memory, const Region& region, Lane lane, Kind kind, uint32_t operand, OriginPtr origin) {
  if (region.empty()) {
    return false;
  }
  const Access made{lanes_.begin_access(lane), kind, memory.life, operand, std::move(origin)};
  conflicts_.clear();
  memory.history.add(region, made, lanes_.clock(lane), conflicts_);
  std::erase_if(conflicts_, [&](const Conflict& conflict) {
    return lanes_.is_host(lane) && lanes_.is_host(conflict.earlier.epoch.lane);
  });
  for (auto& conflict : conflicts_) {
    keep(
        {std::move(conflict.earlier), made, conflict.bytes, memory.life, memory.is_pinned, memory.allocated,
         memory.freed});
  }
  return !conflicts_.empty();
}

void Checker::free(Memory& memory, const std::vector<Lane>& users, OriginPtr origin) {
  for (const Lane user : users) {
    memory.history.forget(lanes_.so_far(user));
  }
  ++memory.life;
  memory.freed = std::move(origin);
}

bool Checker::is_dangerous(const Memory& memory, Lane lane, Lane host) const {
  return memory.history.is_exposed(lanes_.clock(lane), lanes_.clock(host));
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
