// Where a plan of faults takes hold of a rank's communication.
//
// Note [Seams]
// Every transport of every group stands behind `with_seams`, so each call passes one place on its way in. A fault that
// was planted for it is done there, by a function of its own:
//
//   delay     the launching thread sleeps first
//   drop      the call never reaches the peers. A send is over at once, as a lost message is; anything else runs into
//             its time limit, here as well as on the peers
//   corrupt   one bit of what the call sends is flipped, in a copy; where it sends nothing, of what it receives
//   kill      the process ends by SIGKILL
//
// Calls are counted by group, from 1 with its first. An operation on a list of tensors, such as a coalesced one, is a
// call for each of them.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport.h"

namespace torch_ext::sim {

enum class FaultKind : uint8_t { kDelay, kDrop, kCorrupt, kKill };

struct Fault {
  FaultKind kind;
  uint64_t at;                          // number of the call in its group
  std::string group;                    // by name; empty: any
  std::chrono::milliseconds duration{}; // of a delay
};

// Any thread, at any time; a fault is done once in each group that it fits.
void plant(Fault fault);
void clear_faults();

std::shared_ptr<Transport> with_seams(std::shared_ptr<Transport> transport);

void bind_seams(pybind11::module_& m);

} // namespace torch_ext::sim
