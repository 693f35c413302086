#include "lanes.h"

#include "clock.h"

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

} // namespace torch_ext::sim::races
