// The lanes of a process, their clocks, and the edges between them.
//
// Note [Ticks begin late]
// A lane's tick ends when others may learn of it: an event is recorded, the host launches work. The next one begins
// with the lane's next access, not before, so that a lane which only passes on what it has waited for costs nothing,
// and launching a thousand kernels without touching pinned memory leaves the host's clock as it was.
#pragma once

#include <cstdint>
#include <vector>

#include "clock.h"

namespace torch_ext::sim::races {

class Lanes {
 public:
  Lanes();

  // A lane that nothing has run on.
  Lane add();

  // The host gives `lane` work: what comes now is after all that the host knows to be over.
  void launch(Lane lane);

  // The epoch of an access that `lane` makes now.
  Epoch begin_access(Lane lane);

  // What `lane` knows to be over. Includes all of its own work.
  const Clock& clock(Lane lane) const { return lanes_[lane].clock; }

  // The clock of an event that is recorded on `lane` now, or that waits for all of its work.
  Clock record(Lane lane);

  // `lane` waits for what `clock` was recorded after. Returns whether that orders anything that was not ordered before.
  bool wait(Lane lane, const Clock& clock);

  size_t size() const { return lanes_.size(); }

 private:
  struct State {
    Clock clock;
    bool told = true;          // somebody may know of the current tick: see Note [Ticks begin late]
    uint64_t host_version = 0; // the host's version that this lane has joined
  };

  std::vector<State> lanes_;
  uint64_t host_version_ = 1; // counts changes of the host's clock
};

} // namespace torch_ext::sim::races
