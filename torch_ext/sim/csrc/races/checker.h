// Finds races between lanes: what each lane is ordered after (Lanes), the accesses to one block of memory that later
// ones must still be held against (History), and the races found (Checker).
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
// Nothing in this file knows torch. Callers hold a lock: no class here is safe to share.
//
// Note [What a history keeps]
// For each stretch of bytes the last write and, since it, the last read of each lane; reads that another read came
// after are dropped. That is enough: an access that nothing orders after a dropped one is not ordered after the one
// that took its place either, so a program with a race still has one that is reported (FastTrack, Flanagan and Freund
// 2009). Views of more than a few runs (a column of a matrix) are kept whole beside the stretches.
//
// A block carries its history into its next life: see Note [Lives of a block].
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

namespace torch_ext::sim::races {

using Lane = uint32_t;
using Tick = uint32_t;

// The host. All its threads count as one lane, for their own locks order them; but see Note [Ranks that are threads].
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

// Bytes from `begin` to before `end`, counted from the start of a block.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;

  bool empty() const { return begin >= end; }
  bool meets(Range other) const { return begin < other.end && other.begin < end; }
  bool contains(Range other) const { return begin <= other.begin && other.end <= end; }
  bool operator==(const Range&) const = default;
};

// Runs of equal length at regular distances, over any number of dimensions. Most views are one run: then no memory is
// allocated and every question is a compare.
class Region {
 public:
  Region(uint64_t begin, uint64_t nbytes) : begin_(begin), run_(nbytes), extent_(nbytes) {}

  // The elements of a view: `begin` is the first one's byte, `strides` count elements and are not negative.
  Region(uint64_t begin, uint64_t itemsize, std::span<const int64_t> sizes, std::span<const int64_t> strides);

  bool empty() const { return extent_ == 0; }
  bool is_one_run() const { return dims_.empty(); }
  uint64_t run_count() const;

  // From the first byte to the last, whatever lies between.
  Range extent() const { return {begin_, begin_ + extent_}; }

  // In order, none of them touching another.
  std::vector<Range> runs() const;

  // Whether both reach some byte. Compares run by run where the extents meet.
  bool meets(const Region& other) const;

  bool operator==(const Region& other) const;

 private:
  struct Dim {
    uint64_t size;
    uint64_t stride; // bytes
    bool operator==(const Dim&) const = default;
  };

  uint64_t begin_;
  uint64_t run_; // bytes
  uint64_t extent_;
  std::vector<Dim> dims_; // by rising stride
};

// Who made an access, for reports. The checker only carries it.
struct Origin {
  explicit Origin(uint64_t alike) : alike(alike) {}
  Origin(const Origin&) = delete;
  Origin& operator=(const Origin&) = delete;
  virtual ~Origin() = default;

  const uint64_t alike; // equal for origins that are alike: one operator on one lane
};

using OriginPtr = std::shared_ptr<const Origin>;

enum class Kind : uint8_t { kRead, kWrite };

struct Access {
  Epoch epoch;
  Kind kind = Kind::kRead;
  uint32_t life = 0;    // which owner of the block
  uint32_t operand = 0; // which of its origin's operands
  OriginPtr origin;

  bool exists() const { return epoch.tick != 0; }
};

// An earlier access that nothing orders before a later one, and the bytes that it reached.
struct Conflict {
  Access earlier;
  Range bytes;
};

class History {
 public:
  // Remembers `access` to `region`. `clock` is what its lane knows to be over. Appends to `conflicts` each earlier
  // access that it conflicts with, once for each origin and kind.
  void add(const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);

  // Drops what is over by `clock`: nobody who comes later can race with it.
  void forget(const Clock& clock);
  void clear();

  // Whether an access is over by neither clock.
  bool is_exposed(const Clock& one, const Clock& other) const;

  size_t size() const { return stretches_.size() + scattered_.size(); }

 private:
  struct Stretch {
    Range bytes;
    Access write;
    std::vector<Access> reads; // of different lanes
  };
  struct Scattered {
    Region region;
    Access access;
  };

  void add_run(Range bytes, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  void add_scattered(const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  void check_scattered(
      const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) const;
  static void check(const Stretch& stretch, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  static void update(Stretch& stretch, const Access& access, const Clock& clock);
  size_t first_after(uint64_t byte) const;
  void split(uint64_t byte);
  void write(Range bytes, size_t first, size_t end, const Access& access);
  void read(Range bytes, size_t first, const Access& access, const Clock& clock);

  std::vector<Stretch> stretches_; // in order, none overlapping another
  std::vector<Scattered> scattered_;
};

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
