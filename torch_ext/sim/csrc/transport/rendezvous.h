// How the ranks of a group find one another's memory, or agree that they cannot.
//
// Note [Agreeing on a transport]
// Every rank takes these steps when the group is made; a rank that waits longer than the group's time limit, or for a
// process that has ended, raises.
//
//   1. make memory, and write an address to the store: machine, pid namespace, process, descriptor, a random number
//   2. read all addresses. One of them says "gloo", names another machine or namespace: the answer is gloo, for
//   everyone,
//      because everyone reads the same
//   3. open each peer's memory through /proc/PID/fd and compare the random number, so that a process that took over a
//      pid, or another file under the number, is not mistaken for the peer
//   4. say in one's own memory whether all could be opened: kReady or kRefused
//   5. read that of all peers, sleeping until it is said. A rank that could not open a peer has refused itself; all
//      others see its refusal. So all are ready, or all take gloo
//
// A memory is found by its owner's process and not by a name, so nothing is left behind in a file system. When the last
// step is over everybody has everybody's memory, and a process may end without others losing what it had written.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "peers.h"
#include "segment.h"

namespace torch_ext::sim {

struct Member {
  Segment memory;
  std::shared_ptr<const Process> process; // of a peer
};

// Each rank's memory in order of rank, one's own among them; empty where the ranks agree on gloo. Blocks: call it
// without the GIL. settings: must be the same on all ranks, or a ValueError names two that differ.
std::vector<Member> meet(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    bool want_shared, const std::string& settings);

} // namespace torch_ext::sim
