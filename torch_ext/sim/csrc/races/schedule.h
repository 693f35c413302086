// When lanes see what kernels have written: at once, or as late as the edges permit.
//
// Note [Late results]
// Kernels run when they are launched, so a lane that forgot to wait still finds the right numbers. A late kernel's
// results are taken back when it has run: memory holds what it held before, or poison if it was fresh. They are
// published when a lane that is ordered after the kernel touches the block, and when the host comes to know of it. A
// lane that nothing orders after it finds the old bytes: the wrong number that the race can cause. That is an execution
// which the edges permit, of a kernel that reads at once and writes slowly, so an ordered program computes the same.
//
// Only results are late: a kernel whose inputs are overwritten too early has read them already. Results in several
// runs (a column of a matrix), in pinned memory, and those of collectives are never late.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.h"

namespace torch_ext::sim::races {

// A stretch of one block of device memory.
struct Bytes {
  uint64_t block; // its serial
  char* at;
  size_t size;
};

class Schedule {
 public:
  enum class Kind : uint8_t { kEarly, kLate, kRandom };

  // Publishes what is held, and starts over.
  void set(Kind kind, uint64_t seed);

  bool is_early() const { return kind_ == Kind::kEarly; }

  // Whether the next kernel on `lane` is late. Equal calls in equal order get equal answers.
  bool next_is_late(Lane lane, std::string_view kernel);

  // What the answers so far were: equal for runs that made the same choices for the same kernels.
  uint64_t trace() const { return trace_; }

  // Takes back what a kernel has written. `before` has the bytes of those stretches that were there when it began.
  using Saved = std::vector<std::pair<Bytes, std::vector<char>>>;
  void hold(const std::vector<Bytes>& written, const Saved& before, Epoch epoch);

  // Publishes what is over by `clock`: of one block, or of all.
  void publish(uint64_t block, const Clock& clock);
  void publish(const Clock& clock);

  // The block is free: nobody will see what was written there.
  void drop(uint64_t block) { held_.erase(block); }

 private:
  struct Held {
    Bytes where;
    std::vector<char> bytes;
    Epoch epoch;
  };

  static void publish(std::vector<Held>& held, const Clock* clock);

  Kind kind_ = Kind::kEarly;
  uint64_t seed_ = 0;
  uint64_t trace_ = 0;
  std::vector<uint64_t> counts_;                         // of kernels, by lane
  std::unordered_map<uint64_t, std::vector<Held>> held_; // by block, in order
};

} // namespace torch_ext::sim::races
