// Which bytes of a rank's heap are in use. Known to their owner alone; peers are told offsets. Not thread-safe: the
// group's lock is held.
#pragma once

#include <cstdint>
#include <map>

namespace torch_ext::sim {

class Arena {
 public:
  // The lowest free range that is large enough, so that the same few pages are used again. Never 0: that means none.
  uint64_t allocate(uint64_t bytes);
  // Returns how long the range was.
  uint64_t free(uint64_t offset);

  // End of the highest range that was ever in use: the heap must be as large.
  uint64_t high_water() const { return high_water_; }

 private:
  static constexpr uint64_t kAlign = 64; // a cache line; two ranks never write to one

  std::map<uint64_t, uint64_t> used_; // offset to length
  uint64_t high_water_ = kAlign;
};

} // namespace torch_ext::sim
