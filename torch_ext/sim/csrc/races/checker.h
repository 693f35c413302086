// Finds races between lanes: the order of lanes (Lanes), the accesses to a segment of memory that later accesses
// must still be compared with (History), and the races found (Checker).
//
// Glossary of this folder:
//   lane     a sequence of work in order: a stream of a device, a communication lane of a process group, the host
//   tick     a stretch of a lane's work between two moments that other lanes can wait for
//   epoch    one tick of one lane
//   clock    for each lane, the last tick that is known to be over
//   region   the bytes of a segment that a view reaches
//   access   a lane reads or writes a region in an epoch
//   history  the accesses to one segment that later ones must still be compared with
//   race     two unordered accesses to the same bytes, at least one of them a write
//
// Nothing in this file knows torch. Callers hold a lock: no class here is safe to share.
//
// Note [What a history keeps]
// For each stretch of bytes, a history keeps the last write and, since then, the last read of each lane; it drops reads
// that are ordered before another read. An access that is not ordered after a dropped one is not ordered after its
// replacement either, so a program with a race still has one that is reported (FastTrack, Flanagan and Freund 2009).
// Views of more than a few runs (a column of a matrix) are kept whole, apart from the stretches: by lane, since an
// access that is ordered after all of a lane's views need not look at them, and by their first byte.
//
// Memory carries its history into its next life: see Note [Lives of a block].
//
// Note [Ticks begin late]
// A lane's tick ends when other lanes may learn of it: an event is recorded, the host launches work. The next tick
// begins with the lane's next access, not before, so that a lane that only passes its waits on costs nothing, and
// launching a thousand kernels without touching pinned memory leaves the host's clock unchanged.
//
// Note [Ranks that are threads]
// Ranks may be threads of one process. One rank's waits order nothing for another, unless an edge joins the two
// threads: so each rank has its own host lane. With one shared host lane, races would depend on the order of the
// threads. Two accesses by hosts are no race of streams, whatever their threads do.
//
// While there are such ranks, a thread that is no rank may work for any of them: it knows what any of them knows, and
// all of them learn what it learns.
//
// Note [One run is enough]
// The host's order of calls is fixed, so accesses that are ordered in one run are ordered in every interleaving of the
// streams. A race is an access that conflicts with an earlier, unordered one, whatever the timing; there is no other
// kind. So the values of a run never matter, and a run with right results shows the race as surely as one with wrong
// ones.
//
// Note [Lives of a block]
// Memory that is freed and handed out again is the same bytes: the new owner's accesses are compared with those of all
// earlier owners. The allocator splits and merges blocks, so a history belongs to their segment and counts bytes from
// its start. Two kinds of accesses are over for a new owner without an edge: those of the lanes recorded for an old
// owner, because the allocator waits for them before it hands out the bytes; and all, if the segment went back to the
// host in between. Neither changes a lane's clock: only the history of these bytes forgets the accesses.
#pragma once

#include "../std.h"

namespace torch_ext::sim::races {

using Lane = uint32_t;
using Tick = uint32_t;

// The host. All its threads count as one lane, because their locks order them; but see Note [Ranks that are threads].
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

  void raise(Lane lane, Tick tick) {
    ticks_.resize(std::max(ticks_.size(), size_t{lane} + 1));
    ticks_[lane] = std::max(ticks_[lane], tick);
  }

  // One past the last lane that the clock may know.
  Lane end() const { return static_cast<Lane>(ticks_.size()); }

  // Merges `other` into this clock. Returns whether this clock changed.
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

// Bytes from `begin` to before `end`, counted from the start of a segment.
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

  // From the first byte to the last, gaps included.
  Range extent() const { return {begin_, begin_ + extent_}; }

  // The runs, in order, disjoint and not adjacent.
  std::vector<Range> runs() const;

  // Whether both contain a byte. Compares run by run where the extents meet.
  bool meets(const Region& other) const;

  uint64_t begin() const { return begin_; }
  bool operator==(const Region&) const = default;

 private:
  struct Dim {
    uint64_t size;
    uint64_t stride; // bytes
    bool operator==(const Dim&) const = default;
  };

  // Whether no runs can meet: those of both repeat at the same distance, as columns of one matrix, at other places.
  bool alternates_with(const Region& other) const;

  uint64_t begin_;
  uint64_t run_; // bytes
  uint64_t extent_;
  std::vector<Dim> dims_; // by rising stride
};

// The origin of an access, for reports. The checker only carries it.
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
  uint32_t life = 0;    // which owner of the bytes
  uint32_t operand = 0; // which of its origin's operands
  OriginPtr origin;

  bool exists() const { return epoch.tick != 0; }
};

// An earlier access that is not ordered before a later one, and its bytes.
struct Conflict {
  Access earlier;
  Range bytes;
};

class History {
 public:
  // Adds `access` to `region`, by a lane with `clock`. Appends to `conflicts` each earlier access that conflicts with
  // it, once for each origin and kind.
  void add(const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);

  // Drops accesses within `bytes` that are over by `clock`: no later access can race with them.
  void forget(Range bytes, const Clock& clock);

  // The first of `bytes` with an access that is over by neither clock, if any.
  std::optional<uint64_t> first_exposed(Range bytes, const Clock& one, const Clock& other) const;

  size_t size() const;

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
  // The views of many runs of one lane.
  struct Views {
    std::multimap<uint64_t, Scattered> by_begin{};
    uint64_t longest = 0; // extent so far
    Tick last = 0;

    // Those that may meet `extent`.
    auto near(Range extent) const {
      return std::ranges::subrange(
          by_begin.lower_bound(extent.begin - std::min(longest, extent.begin)), by_begin.lower_bound(extent.end));
    }
  };

  void add_run(Range bytes, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  void add_scattered(const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  void check_scattered(
      const Region& region, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts) const;
  void erase_scattered(Range within, const std::function<bool(const Access&)>& is_wanted);
  static void check(const Stretch& stretch, const Access& access, const Clock& clock, std::vector<Conflict>& conflicts);
  static void update(Stretch& stretch, const Access& access, const Clock& clock);
  size_t first_after(uint64_t byte) const;
  void split(uint64_t byte);
  void write(Range bytes, size_t first, size_t end, const Access& access);
  void read(Range bytes, size_t first, const Access& access, const Clock& clock);

  std::vector<Stretch> stretches_; // in order, none overlapping another
  std::map<Lane, Views> scattered_;
};

class Lanes {
 public:
  Lanes();

  // A new lane without work.
  Lane add();

  // A new host lane: see Note [Ranks that are threads].
  Lane add_host();

  bool is_host(Lane lane) const { return lanes_[lane].is_host; }

  // `host` launches work on `lane`: the lane's next accesses are ordered after everything in the host's clock.
  void launch(Lane lane, Lane host = kHost);

  // The epoch of an access that `lane` makes now.
  Epoch begin_access(Lane lane);

  // The clock of `lane`. Includes all of its own work.
  const Clock& clock(Lane lane) const { return lanes_[lane].clock; }

  // The clock of an event that `host` records on `lane` now.
  Clock record(Lane lane, Lane host = kHost);

  // The clock of a waiter for all work of `lane` so far. Does not end the tick of `lane`.
  Clock so_far(Lane lane);

  // Makes `lane` wait for a recorded `clock`. Returns whether that adds an order.
  bool wait(Lane lane, const Clock& clock);

  size_t size() const { return lanes_.size(); }

 private:
  struct State {
    Clock clock;
    bool is_host = false;
    bool published = true;     // another lane's clock may have the current tick: see Note [Ticks begin late]
    uint64_t version = 1;      // counts changes of a host's clock
    Lane host = kHost;         // the host lane whose clock this lane has joined last,
    uint64_t host_version = 0; // and its version then
  };

  std::vector<State> lanes_;
};

// An owner of memory.
struct Owner {
  Range bytes{0, std::numeric_limits<uint64_t>::max()};
  uint32_t life = 0; // unique among the owners in a segment; 0: from before the check
  OriginPtr allocated;
};

// The end of an owner.
struct Free {
  Range bytes;
  uint32_t life;
  OriginPtr origin;
};

// The checker's state of a segment of memory.
struct Memory {
  History history;
  bool is_pinned = false;  // of the host, not of a device
  std::vector<Free> frees; // with an origin; of equal bytes the last one
};

struct Race {
  Access earlier;
  Access later;
  Range bytes;   // of the later owner; reached by both, or close to it
  uint32_t life; // of the later owner
  bool is_pinned;
  OriginPtr allocated;
  OriginPtr freed;                       // by the earlier owner
  std::optional<int64_t> symmetric_of{}; // the rank that has allocated the symmetric memory; none for other memory
};

class Checker {
 public:
  Lanes& lanes() { return lanes_; }

  // `lane` reads or writes `region` of `memory`, whose owner there is `owner`. Returns whether that is a race. Call
  // Lanes::launch for the work before.
  bool access(
      Memory& memory, const Owner& owner, const Region& region, Lane lane, Kind kind, uint32_t operand,
      OriginPtr origin);

  // `owner` frees its bytes; the work of `users` so far is over before their next owner gets them.
  void free(Memory& memory, const Owner& owner, const std::vector<Lane>& users, OriginPtr origin);

  // The first of `bytes` on which an owner of `host` that works on `lane` could race with an earlier owner's work.
  std::optional<uint64_t> first_danger(const Memory& memory, Range bytes, Lane lane, Lane host = kHost) const;

  const std::vector<Race>& races() const { return races_; }
  void clear_races();
  void keep(Race race);

 private:
  Lanes lanes_;
  std::vector<Race> races_;
  std::map<std::pair<uint64_t, uint64_t>, size_t> alike_; // number of kept races, by their origins' `alike`
  std::vector<Conflict> conflicts_;                       // of the current access; kept for its memory
};

} // namespace torch_ext::sim::races
