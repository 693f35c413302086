// Who waits for whom, told to a supervisor.
//
// Note [The page of waits]
// TORCH_EXT_WAIT_PAGE=FD names a descriptor of 4096 bytes of shared memory that this process inherited. Whatever waits
// for a peer longer than a few milliseconds has an entry there until the wait is over, so the supervisor reads what
// this process is in without its help, also when it holds the GIL, is stopped, or has died. A thread that has an entry
// goes on if the peer does or the time is up, and not otherwise, whatever it called: any kernel may be the one to wait.
//
//   offset   size   what                                                    type
//   0        8      2: the version of this layout; 0: nothing was written   uint64
//   64       504    entry 0; 8 of them, 504 bytes apart
//
//   entry +0     4     grows before and after each change: odd while it is being changed   uint32
//         +4     4     global rank that is waited for; -1: any                             int32
//         +8     8     since when, nanoseconds of CLOCK_MONOTONIC; 0: the entry is free    int64
//         +16    8     number of the collective in its group; 0: a transfer                uint64
//         +24    64    name of the group, with a closing 0
//         +88    40    operation
//         +128   200   file and line of the call, cut off in front
//         +328   8     when the wait ends by itself, nanoseconds of CLOCK_MONOTONIC       int64
//         +336   4     the thread that waits, as the kernel numbers it                    int32
//         +340   164   -
//
// A reader takes an entry as it is if +0 was even and the same before and after. Numbers are in the machine's order.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace torch_ext::sim {

struct WaitEntry;

// An entry for its lifetime; nothing where there is no page, or more threads wait than it has entries.
class WaitNote {
 public:
  WaitNote(
      const std::string& group, const std::string& operation, const std::string& site, uint64_t number,
      std::chrono::steady_clock::time_point until);
  ~WaitNote();
  WaitNote(const WaitNote&) = delete;
  WaitNote& operator=(const WaitNote&) = delete;

  void waits_for(int64_t global_rank);

 private:
  WaitEntry* entry_;
};

} // namespace torch_ext::sim
