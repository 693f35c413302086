#include "lanes.h"

#include "clock.h"

namespace torch_ext::sim::races {

Lanes::Lanes() : lanes_(1) {}

Lane Lanes::add() {
  lanes_.emplace_back();
  return static_cast<Lane>(lanes_.size() - 1);
}

void Lanes::launch(Lane lane) {
  auto& host = lanes_[kHost];
  auto& state = lanes_[lane];
  if (lane == kHost || state.host_version == host_version_) {
    return;
  }
  host.told = true;
  state.clock.join(host.clock);
  state.host_version = host_version_;
}

Epoch Lanes::begin_access(Lane lane) {
  auto& state = lanes_[lane];
  if (state.told) {
    state.clock.advance(lane);
    state.told = false;
    host_version_ += lane == kHost ? 1 : 0;
  }
  return {lane, state.clock.of(lane)};
}

Clock Lanes::record(Lane lane) {
  launch(lane);
  lanes_[lane].told = true;
  return lanes_[lane].clock;
}

bool Lanes::wait(Lane lane, const Clock& clock) {
  const bool learned = lanes_[lane].clock.join(clock);
  host_version_ += learned && lane == kHost ? 1 : 0;
  return learned;
}

} // namespace torch_ext::sim::races
