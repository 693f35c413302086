// Finds races in what lanes do, and keeps them until somebody asks.
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

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "clock.h"
#include "history.h"
#include "lanes.h"
#include "region.h"

namespace torch_ext::sim::races {

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
  uint64_t unkept() const { return unkept_; } // races that were like kept ones, and not kept
  void clear_races();

 private:
  void keep(Race race);

  Lanes lanes_;
  std::vector<Race> races_;
  std::map<std::pair<uint64_t, uint64_t>, size_t> alike_; // how many races are kept, by what their origins are like
  uint64_t unkept_ = 0;
  std::vector<Conflict> conflicts_; // of the current access; kept for its memory
};

} // namespace torch_ext::sim::races
