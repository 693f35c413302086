// The lanes of a process, their clocks, and the edges between them.
//
// Note [Ticks begin late]
// A lane's tick ends when others may learn of it: an event is recorded, the host launches work. The next one begins
// with the lane's next access, not before, so that a lane which only passes on what it has waited for costs nothing,
// and launching a thousand kernels without touching pinned memory leaves the host's clock as it was.
//
// Note [Ranks that are threads]
// Ranks may be threads of one process. What one of them has waited for another one does not know, unless something
// between the two threads says so: so each is a host lane of its own. Without that, what a race is would depend on
// which thread came first. Two accesses of hosts are no race of streams, whatever their threads do.
//
// A thread that is no rank, while there are such ranks, may work for any of them: what one of them knows it knows, and
// what it learns all of them know.
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

  // A host lane of its own: see Note [Ranks that are threads].
  Lane add_host();

  bool is_host(Lane lane) const { return lanes_[lane].is_host; }

  // `host` gives `lane` work: what comes now is after all that this host knows to be over.
  void launch(Lane lane, Lane host = kHost);

  // The epoch of an access that `lane` makes now.
  Epoch begin_access(Lane lane);

  // What `lane` knows to be over. Includes all of its own work.
  const Clock& clock(Lane lane) const { return lanes_[lane].clock; }

  // The clock of an event that `host` records on `lane` now.
  Clock record(Lane lane, Lane host = kHost);

  // The clock of whoever waits for all that `lane` has been given so far, which gives it nothing.
  Clock so_far(Lane lane);

  // `lane` waits for what `clock` was recorded after. Returns whether that orders anything that was not ordered before.
  bool wait(Lane lane, const Clock& clock);

  size_t size() const { return lanes_.size(); }

 private:
  struct State {
    Clock clock;
    bool is_host = false;
    bool told = true;          // somebody may know of the current tick: see Note [Ticks begin late]
    uint64_t version = 1;      // counts changes of a host's clock
    Lane host = kHost;         // whose clock this lane has joined last,
    uint64_t host_version = 0; // and its version then
  };

  std::vector<State> lanes_;
};

} // namespace torch_ext::sim::races
