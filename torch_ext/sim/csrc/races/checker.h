// Finds races between lanes, and keeps them until `take`. The lanes of a process have clocks, and edges
// between them: see the glossary in history.h.
//
// Note [Ticks begin late]
// A lane's tick ends when others may learn of it: an event is recorded, the host launches work. The next one begins
// with the lane's next access, not before, so that a lane which only passes on what it has waited for costs nothing,
// and launching a thousand kernels without touching pinned memory leaves the host's clock as it was.
//
// Note [Ranks that are threads]
// Ranks may be threads of one process. What one of them has waited for another one does not know, unless something
// between the two threads says so: so each is its own host lane. Without that, what a race is would depend on
// which thread came first. Two accesses of hosts are no race of streams, whatever their threads do.
//
// A thread that is no rank, while there are such ranks, may work for any of them: what one of them knows it knows, and
// what it learns all of them know.
//
// Note [One run is enough]
// The host's order of calls is fixed, so what one run knows to be ordered is ordered however the streams interleave. An
// access that conflicts with an earlier one which nothing orders before it is a race, whatever the timing was; there is
// no other kind. So the values of a run never matter, and a run that went well shows the race as surely as one that
// did not.
//
// Note [Lives of a block]
// Memory that is freed and handed out again is the same bytes: the new owner's accesses are held against the old
// owner's. Two things are over for a new owner without an edge: the accesses of the lanes that the old owner was
// recorded for, because the allocator waits for them before it hands out the block; and everything, when memory went
// back to the host in between. Neither tells any lane anything: only this block's history forgets.
#pragma once

#include "../std.h"
#include "history.h"

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

  // The clock of a waiter for all work of `lane` so far. Does not end the tick of `lane`.
  Clock so_far(Lane lane);

  // `lane` waits for what `clock` was recorded after. Returns whether that orders anything that was not ordered before.
  bool wait(Lane lane, const Clock& clock);

  size_t size() const { return lanes_.size(); }

 private:
  struct State {
    Clock clock;
    bool is_host = false;
    bool told = true;          // another lane may know the current tick: see Note [Ticks begin late]
    uint64_t version = 1;      // counts changes of a host's clock
    Lane host = kHost;         // whose clock this lane has joined last,
    uint64_t host_version = 0; // and its version then
  };

  std::vector<State> lanes_;
};

// What the checker knows of one block of memory.
struct Memory {
  History history;
  bool is_pinned = false;  // of the host, not of a device
  uint32_t life = 0;       // how often it has been freed
  bool is_unnamed = false; // allocated by a kernel: its first access will say which
  OriginPtr allocated;
  OriginPtr freed; // by the owner before
};

struct Race {
  Access earlier;
  Access later;
  Range bytes;   // of the block; reached by both, or close to it
  uint32_t life; // of the block, at the later access
  bool is_pinned;
  OriginPtr allocated;
  OriginPtr freed;
};

class Checker {
 public:
  Lanes& lanes() { return lanes_; }

  // `lane` reads or writes `region` of `memory`. Returns whether that is a race. The lane has been given the work:
  // see Lanes::launch.
  bool access(Memory& memory, const Region& region, Lane lane, Kind kind, uint32_t operand, OriginPtr origin);

  // The owner gives `memory` up; work that `users` have been given is over before it has another owner.
  void free(Memory& memory, const std::vector<Lane>& users, OriginPtr origin);

  // Whether an owner of `host` that works on `lane` could meet work of an earlier owner that nothing orders before it.
  bool is_dangerous(const Memory& memory, Lane lane, Lane host = kHost) const;

  const std::vector<Race>& races() const { return races_; }
  void clear_races();

 private:
  void keep(Race race);

  Lanes lanes_;
  std::vector<Race> races_;
  std::map<std::pair<uint64_t, uint64_t>, size_t> alike_; // how many races are kept, by what their origins are like
  std::vector<Conflict> conflicts_;                       // of the current access; kept for its memory
};

} // namespace torch_ext::sim::races
