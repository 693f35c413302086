// What the operations of one group on one rank share: the ranks' memory, and how to wait for them.
//
// Threading: everything but `sleep` is called with the lock held. Nobody sleeps with the lock held.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "arena.h"
#include "fold.h"
#include "rendezvous.h"
#include "transport.h"

namespace torch_ext::sim {

// What a transfer that cannot go on waits for.
struct Wait {
  const std::atomic<uint32_t>* word; // in a control area
  uint32_t seen;
  int peer; // -1: anyone
};

struct Group {
  std::vector<Member> members;
  int rank;
  std::vector<int64_t> global_ranks; // in order of rank in this group
  FoldOrder order;
  std::chrono::milliseconds timeout; // of calls that name none
  std::string name{};
  std::mutex mutex{};
  Arena arena{};

  int size() const { return static_cast<int>(members.size()); }
  Segment& own() { return members[static_cast<size_t>(rank)].memory; }
  Header& header(int peer) const { return members[static_cast<size_t>(peer)].memory.header(); }
  GroupState state(int peer) const;

  // Why nothing more can be expected of a peer; empty where something can. look: ask the kernel too, which costs a
  // call.
  std::string gone(int peer, bool look) const;

  // A range of this rank's heap.
  uint64_t allocate(uint64_t bytes);
  void free(uint64_t offset);

  // As a user knows the rank.
  std::string called(int peer) const { return c10::str("rank ", global_ranks[static_cast<size_t>(peer)]); }
};

// A DistBackendError that begins with "simccl on rank N: ".
std::exception_ptr failure(const Group& group, const std::string& what);

class Pending;

// The transfers of one kind that are under way on this rank.
class Queue {
 public:
  virtual ~Queue() = default;

  // Brings transfers on as far as is possible without waiting, `wanted` at least. Returns what `wanted` waits for, if
  // it is not over then. look: find out whether peers have ended. Called with the group's lock held.
  virtual Wait progress(Pending& wanted, bool look) = 0;
};

// A call over shared memory. Its fields are guarded by the group's lock.
class Pending final : public Transfer {
 public:
  Pending(std::shared_ptr<Group> group, std::shared_ptr<Queue> queue, Call call, uint64_t number)
      : call(std::move(call)), number(number), group_(std::move(group)), queue_(std::move(queue)) {}

  bool advance() override;
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override;
  int source() const override { return from; }

  bool over() const { return over_; }
  void end(const std::exception_ptr& why = nullptr);

  Call call;
  const uint64_t number; // of the collective, or of the letter
  int from = -1;         // of a letter that was received
  bool checked = false;  // all ranks take part and agree
  uint64_t reduced = 0;  // which pieces of a shared all-reduce are in the output already

 private:
  std::exception_ptr timed_out(const Wait& wait, std::chrono::milliseconds limit) const;

  std::shared_ptr<Group> group_;
  std::shared_ptr<Queue> queue_;
  bool over_ = false;
  std::exception_ptr why_;
};

} // namespace torch_ext::sim
