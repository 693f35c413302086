// The transports, which carry the bytes of a group's operations.
//
// A transport works on host memory and knows nothing of devices, streams or works: simccl.cpp turns an operation into a
// Call, and work.h makes a c10d::Work of the Transfer that it gets for it. There are two: shared_memory.h, and gloo.cpp
// for ranks that cannot share memory. choice.cpp says which one a group gets.
//
// Threading: one thread at a time starts calls. All other functions may be called from any thread. None may be called
// with the GIL held, since they block.
#pragma once

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../clock.h"
#include "../host_tensors.h"
#include "../std.h"
#include "fold.h"
#include "segment.h"

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
//   RECV            -                        1
struct Call {
  c10d::OpType kind;
  const char* name; // as the program called it, for messages; lives as long as the process
  Tensors inputs{};
  Tensors outputs{};
  int root = -1; // of a transfer between two ranks: the peer
  std::optional<Reduction> reduction{};
  int device = -1;             // index of the sim device that the tensors are on
  std::string site{};          // file and line of the call, as far as known
  Turn turn{};                 // of a transfer
  bool batched = false;        // a transfer that starts together with others
  std::string blocking_site{}; // of a receive: the send that `turn.blocking` names
  std::chrono::milliseconds timeout{c10d::kUnsetTimeout};
  Timing timing{};
  std::string stamp{}; // for the race check: see Note [Races between ranks] in races/journal.h

  // "all_reduce at train.py:12"
  std::string what() const { return c10::str(name, site.empty() ? "" : " at ", site); }
};

using Arrived = std::function<bool(int rank)>;

// A send of more bytes waits for its receive on a GPU.
constexpr const char* kBufferVariable = "NCCL_BUFFSIZE";
uint64_t bytes_that_nccl_buffers();

// A call under way.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Makes progress without waiting; returns whether the transfer is over, even by an error.
  virtual bool advance() = 0;

  // Waits until the transfer is over and does this rank's part. Raises DistBackendError if the transfer failed, a peer
  // has gone, or `timeout` passes, counted from this call; kNoTimeout stands for the limit of the `Call`.
  virtual void finish(std::chrono::milliseconds timeout) = 0;

  // Fails the transfer with `why` for all waiters, unless it is over.
  virtual void abort(const std::exception_ptr& why) = 0;

  // When a transfer that is over has run in virtual time. Without a start where that is not known: it failed, no peer
  // has virtual time, or it went through gloo.
  virtual clock::Span span() const { return {}; }

  // The stamps of the calls whose data this rank has got, once the transfer is over.
  virtual std::vector<std::string> stamps() const { return {}; }
};

using TransferPtr = std::shared_ptr<Transfer>;

// A transfer with a last step, which the first thread that waits for it runs.
class Stepped final : public Transfer {
 public:
  Stepped(TransferPtr inner, std::function<void()> step) : inner_(std::move(inner)), step_(std::move(step)) {}

  bool advance() override { return inner_->advance(); }
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override { inner_->abort(why); }
  clock::Span span() const override { return inner_->span(); }
  std::vector<std::string> stamps() const override { return inner_->stamps(); }

 private:
  const TransferPtr inner_;
  std::mutex mutex_;
  std::function<void()> step_; // guarded by mutex_
};

// Waits for a transfer or an operation. Raises nothing: the call's own `finish` reports the error.
template <typename T>
void settle(T& one) noexcept {
  try {
    one.finish(kNoTimeout);
  } catch (...) {
    return;
  }
}

// The state that the calls of one group on one rank share.
struct Group {
  Group(int rank, std::vector<int64_t> global_ranks, std::chrono::milliseconds timeout, bool any_device)
      : rank(rank), global_ranks(std::move(global_ranks)), any_device(any_device), timeout(timeout) {}

  const int rank;
  const std::vector<int64_t> global_ranks;        // in order of rank in this group
  const bool any_device;                          // whether several ranks may use one device, as with gloo on CUDA
  const pid_t owner = getpid();                   // a forked child must not act for this rank
  std::atomic<std::chrono::milliseconds> timeout; // of calls that name none
  mutable std::mutex mutex;
  std::string name; // guarded by mutex

  int size() const { return static_cast<int>(global_ranks.size()); }

  // The user's name of a rank: its global number.
  std::string called(int peer) const { return c10::str("rank ", global_ranks[static_cast<size_t>(peer)]); }

  // The time limit of a wait for `call`. asked: by the waiter, or kNoTimeout.
  std::chrono::milliseconds limit_of(const Call& call, std::chrono::milliseconds asked) const {
    return asked != kNoTimeout ? asked : call.timeout.count() > 0 ? call.timeout : timeout.load();
  }

  // In virtual time, where limits were asked for: raises if a call began longer before its `end` than its limit allows,
  // on the rank that launched it first. Moments count from the start of virtual time.
  void check_limit(const Call& call, int64_t launched, int64_t end, int first, int last) const;

  // A DistBackendError that begins with "simccl on rank N: ".
  std::exception_ptr failure(const std::string& what) const;

  // A failure of a collective in which ranks differ. Hold the lock.
  std::exception_ptr disagreement(uint64_t collective, const std::string& what) const {
    return failure(c10::str("collective ", collective, " of group ", name, ": ", what));
  }
};

// A transfer that another thread ends, or that never ends by itself. Any thread may call it.
class Awaited : public Transfer {
 public:
  // what: the call, for messages. limit: of waits that name none; gloo has its own.
  Awaited(std::shared_ptr<const Group> group, std::string what, std::chrono::milliseconds limit = kNoTimeout)
      : group_(std::move(group)), what_(std::move(what)), limit_(limit) {}

  bool advance() override;
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override { end(why); }

  // Ends the transfer, unless it is over.
  void end(const std::exception_ptr& why = nullptr);

 protected:
  const std::shared_ptr<const Group> group_;
  const std::string what_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  bool over_ = false;
  std::exception_ptr why_;
};

class Transport {
 public:
  explicit Transport(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  virtual ~Transport() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Transport);

  // Begins a call, and applies its fault, if any (Note [Seams] in transport.cpp). Reads all inputs before it
  // returns, so they may be overwritten or freed; writes the outputs until the transfer is over. May wait for peers
  // that are far behind.
  TransferPtr start(Call call);

  // Sets the limit of calls that name none.
  virtual void set_timeout(std::chrono::milliseconds timeout) { group_->timeout = timeout; }

  // "shared" or "gloo"
  virtual const char* kind() const = 0;

  const Group& group() const { return *group_; }

  // The reason why a peer will do no more, for messages; empty while it may, or where that is not known.
  virtual std::string gone(int /*peer*/, const Arrived& /*arrived*/) const { return ""; }

  // Sets the group's name.
  virtual void set_name(const std::string& name) {
    std::lock_guard<std::mutex> lock(group_->mutex);
    group_->name = name;
  }

  // Announces to peers that this rank will start no more calls. `broken`: and that it has aborted those under way.
  virtual void leave(bool broken) = 0;

 protected:
  virtual TransferPtr begin(Call call) = 0;

  const std::shared_ptr<Group> group_;

 private:
  // The transfers with a peer that were not batched.
  struct Pair {
    uint64_t sent = 0;
    uint64_t received = 0;
    uint64_t blocking = 0; // number of the last send that blocks
    std::string site{};    // and its place
  };

  void take_turn(Call& call);

  std::map<int, Pair> pairs_; // by peer
};

// Whether a collective uses the inputs of its root alone.
bool is_from_root(const Call& call);

// Input `index` of a rank, of as many bytes.
using InputOf = std::function<const std::byte*(int peer, size_t index, uint64_t bytes)>;

// Writes the outputs of a collective on this rank. number: of the collective, for the order of a reduction.
void write_outputs(const Call& call, const Group& group, FoldOrder order, uint64_t number, const InputOf& input);

// Gives a group the transport that its ranks agree on (Note [Agreeing on a transport] in choice.cpp) and that
// TORCH_EXT_SIM_TRANSPORT allows. Blocks until all ranks are there. any_device: whether several ranks may use one
// device.
std::shared_ptr<Transport> make_transport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int64_t>& global_ranks,
    std::chrono::milliseconds timeout, bool any_device);

// As Transport::gone, of any backend.
std::string gone_from(const c10d::Backend& backend, int peer, const Arrived& arrived); // simccl.cpp

// The transport of a group whose other ranks do not exist: see dry.cpp.
std::shared_ptr<Transport> make_dry_transport(std::shared_ptr<Group> group);

// Replaces the group's description in the flight recorder's entries of a transport's gloo.
constexpr const char* kTransportDescription = "simccl/transport";

// The transport over a gloo backend of the same group: see gloo.cpp.
std::shared_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Group> group);

} // namespace torch_ext::sim
