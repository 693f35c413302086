// Clocks of lanes: what is known to be over.
//
// Glossary of this folder:
//   lane     something that does work in order: a stream of a device, a communication lane of a process group, the host
//   tick     a stretch of a lane's work between two moments that others can wait for
//   epoch    one tick of one lane
//   clock    for each lane, the last tick that is known to be over
//   region   the bytes of a block that a view reaches
//   access   a lane reads or writes a region in an epoch
//   history  the accesses to one block that later ones must still be held against
//   race     two accesses to the same bytes, at least one of them a write, that nothing orders
//
// Nothing here knows torch, except bindings.cpp. Callers hold a lock: no class of this folder is safe to share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ext::sim::races {

using Lane = uint32_t;
using Tick = uint32_t;

// The host. All its threads count as one lane, for their own locks order them; but see Note [Ranks that are threads] in
// lanes.h.
constexpr Lane kHost = 0;

struct Epoch {
  Lane lane = kHost;
  Tick tick = 0; // 0: never
};

class Clock {
 public:
  Tick of(Lane lane) const { return lane < ticks_.size() ? ticks_[lane] : 0; }
  bool covers(Epoch epoch) const { return epoch.tick <= of(epoch.lane); }

  void advance(Lane lane) {
    if (lane >= ticks_.size()) {
      ticks_.resize(size_t{lane} + 1);
    }
    ++ticks_[lane];
  }

  // Everything that either clock knows to be over. Returns whether that is more than this one knew.
  bool join(const Clock& other) {
    ticks_.resize(std::max(ticks_.size(), other.ticks_.size()));
    bool learned = false;
    for (size_t lane = 0; lane < other.ticks_.size(); ++lane) {
      learned = learned || other.ticks_[lane] > ticks_[lane];
      ticks_[lane] = std::max(ticks_[lane], other.ticks_[lane]);
    }
    return learned;
  }

 private:
  std::vector<Tick> ticks_; // by lane; those past its end are 0
};

} // namespace torch_ext::sim::races
