// An entry of the page of waits: see Note [The page of waits] in torch_ext/world/operations.py.
#pragma once

#include "../std.h"

namespace torch_ext::sim {

struct WaitEntry;

// Holds an entry of the page for its lifetime; does nothing without a page, or if all entries are in use.
class WaitNote {
 public:
  // number: of the collective in its group; 0: another wait. until: its end at the latest.
  WaitNote(
      const std::string& group, const char* operation, const std::string& site, uint64_t number,
      std::chrono::steady_clock::time_point until);
  ~WaitNote();
  C10_DISABLE_COPY_AND_ASSIGN(WaitNote);

  void waits_for(int64_t global_rank);

 private:
  WaitEntry* entry_ = nullptr;
};

} // namespace torch_ext::sim
