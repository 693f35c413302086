// The accesses to one block of memory that later ones must still be held against.
//
// Note [What a history keeps]
// For each stretch of bytes the last write and, since it, the last read of each lane; reads that another read came
// after are dropped. That is enough: an access that nothing orders after a dropped one is not ordered after the one
// that took its place either, so a program with a race still has one that is reported (FastTrack, Flanagan and Freund
// 2009). Views of more than a few runs (a column of a matrix) are kept whole beside the stretches.
//
// A block carries its history into its next life: see Note [Lives of a block] in checker.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "clock.h"
#include "region.h"

namespace torch_ext::sim::races {

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

} // namespace torch_ext::sim::races
