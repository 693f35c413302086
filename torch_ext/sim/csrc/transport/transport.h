// What carries the bytes of a group's operations.
//
// A transport works on host memory and knows nothing of devices, streams or works: simccl.cpp turns an operation into a
// Call, and sim_work.h makes a c10d::Work of the Transfer that it gets for it. There are two: shared_memory.h, and
// gloo.h for ranks that cannot share memory. rendezvous.h says which one a group gets.
//
// Threading: one thread at a time starts calls. Everything else may be called from any thread, and nothing here may be
// called with the GIL held, since it blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../reduction.h"
#include "../transport_view.h"

namespace torch_ext::sim {

// An operation on host tensors of one dimension each. `inputs` and `outputs` by kind, on a group of n ranks:
//
//   kind            inputs                   outputs                  must be equal on all ranks
//   BROADCAST       1 on the root            1                        number of elements
//   ALLREDUCE       1                        1, which may be input    number of elements
//   REDUCE          1                        1 on the root            number of elements
//   ALLGATHER       1                        n                        elements of each output
//   GATHER          1                        n on the root            number of elements
//   SCATTER         n on the root            1                        number of elements
//   REDUCE_SCATTER  n                        1                        elements of each input
//   ALLTOALL        n                        n                        what a rank sends to what its peer receives
//   BARRIER         -                        -
//   SEND            1                        -
//   RECV, RECVANYSOURCE -                    1
struct Call {
  c10d::OpType kind;
  std::string name; // as the program called it, for messages
  Tensors inputs{};
  Tensors outputs{};
  int root = -1; // of a transfer between two ranks: the peer
  int tag = 0;
  std::optional<Reduction> reduction{};
  int device = -1;    // index of the sim device that the tensors are on
  std::string site{}; // file and line of the call, as far as known
  std::chrono::milliseconds timeout{c10d::kUnsetTimeout};
};

// A call under way.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Does what can be done without waiting; returns whether the transfer is over, be it by an error.
  virtual bool advance() = 0;

  // Waits until it is over and does this rank's part. Raises DistBackendError where it failed, a peer has gone, or the
  // time limit passes, which counts from here; kNoTimeout stands for the call's own limit.
  virtual void finish(std::chrono::milliseconds timeout) = 0;

  // Fails it with `why` unless it is over, for whoever waits.
  virtual void abort(const std::exception_ptr& why) = 0;

  // The rank that a received message came from.
  virtual int source() const = 0;
};

using TransferPtr = std::shared_ptr<Transfer>;

class Transport {
 public:
  virtual ~Transport() = default;

  // Begins a call. What it reads has been read when this returns, so its inputs may be written again; its outputs are
  // held until the transfer is over. May wait for peers that are far behind.
  virtual TransferPtr start(Call call) = 0;

  // Of calls that name none.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  // "shared" or "gloo"
  virtual const char* kind() const = 0;

  // The group's.
  virtual void set_name(const std::string& name) = 0;

  // Waits until the calls that have been started are over, as far as they are known to it. Raises nothing: whoever
  // waits for one is told what became of it.
  virtual void settle() = 0;

  // Tells peers that this rank will start no more calls. `broken`: and that it has given up those under way.
  virtual void leave(bool broken) = 0;
};

} // namespace torch_ext::sim
