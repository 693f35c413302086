// The transport between processes, or threads, of one machine. Collectives are in lane.cpp, transfers between two ranks
// in mailbox.cpp; segment.h lays out the memory, and choice.cpp says how ranks find it.
//
// Ownership: a transfer keeps the group's memory mapped, so it may outlive the transport. The transport starts no
// thread, and its destructor waits for nothing: the threads that launch, wait or poll do the work.
//
// Threading: all functions but `Pending::finish` and `Lane::start` require the group's lock; no thread sleeps with it.
#pragma once

#include "../std.h"
#include "fingerprint.h"
#include "fold.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {

// The event that a blocked transfer waits for.
struct Wait {
  const std::atomic<uint32_t>* word = nullptr; // in a control area; null: nothing to wait for
  uint32_t seen = 0;
  int peer = 0;
};

struct SharedGroup final : Group {
  SharedGroup(
      std::vector<Member> members, FoldOrder order, int rank, std::vector<int64_t> global_ranks,
      std::chrono::milliseconds timeout, bool any_device)
      : Group(rank, std::move(global_ranks), timeout, any_device), members(std::move(members)), order(order) {}

  std::vector<Member> members;
  const FoldOrder order;
  Arena arena;

  Segment& memory(int peer) { return *members[static_cast<size_t>(peer)].memory; }
  Segment& own() { return memory(rank); }
  Header& header(int peer) const { return members[static_cast<size_t>(peer)].memory->header(); }

  // The reason why a peer will do no more, for messages; empty while it may. look: ask the kernel too, which costs a
  // call. arrived: tells whether a rank has come to the operation; if so, its end is no cause of the peer's absence.
  std::string gone(int peer, bool look, const Arrived& arrived = {}) const;

  // A range of this rank's heap.
  uint64_t allocate(uint64_t bytes);
  void free(uint64_t offset);
};

class Pending;

// The transfers of one kind that are under way on this rank.
class Queue {
 public:
  virtual ~Queue() = default;

  // Advances transfers, `wanted` at least, as far as possible without waiting. Returns the event that `wanted` then
  // waits for, unless it is over. look: check whether peers have ended.
  virtual Wait progress(Pending& wanted, bool look) = 0;
};

// A call over shared memory. Its fields are guarded by the group's lock.
class Pending final : public Transfer {
 public:
  Pending(std::shared_ptr<SharedGroup> group, std::shared_ptr<Queue> queue, Call call, uint64_t number)
      : call(std::move(call)), number(number), group_(std::move(group)), queue_(std::move(queue)) {}

  bool advance() override;
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override;

  clock::Span span() const override { return times; }
  std::vector<std::string> stamps() const override { return stamps_; }

  bool over() const { return over_; }
  void end(const std::exception_ptr& why = nullptr);
  void add_stamp(const std::byte* bytes, uint64_t size);

  Call call;
  const uint64_t number; // of the collective, or of the letter
  bool checked = false;  // all ranks take part and agree
  clock::Span times{};   // in virtual time, once it is over

 private:
  const std::shared_ptr<SharedGroup> group_;
  const std::shared_ptr<Queue> queue_;
  bool over_ = false;
  std::exception_ptr why_;
  std::vector<std::string> stamps_;
};

// The collectives of a group, in order: see Note [States of a collective] in lane.cpp.
class Lane final : public Queue, public std::enable_shared_from_this<Lane> {
 public:
  explicit Lane(std::shared_ptr<SharedGroup> group) : group_(std::move(group)) {}

  // Waits if the call reads the pending output of an earlier call, or if peers are kSlots collectives behind.
  TransferPtr start(Call call);
  Wait progress(Pending& wanted, bool look) override;

 private:
  struct Published {
    uint64_t number;
    uint64_t block; // in the heap
  };

  void wait_for_writers(const Call& call);
  void wait_for_slot(uint64_t number);
  void publish(const Call& call, uint64_t number);
  void release_published();

  // Advances one collective; returns the event that it then waits for, unless it is over.
  Wait step(Pending& front, bool look);
  // Returns the event to wait for while peers are missing; raises if one is gone, or ranks disagree.
  Wait gather(Pending& front, bool look);
  // Gives a collective that all ranks have published its place in virtual time.
  void time(Pending& front);

  const std::shared_ptr<SharedGroup> group_;
  uint64_t started_ = 0;
  int64_t free_at_ = 0;                          // in virtual time
  std::deque<std::shared_ptr<Pending>> pending_; // not over, or over behind one that is not
  std::deque<Published> published_;              // peers may still read their memory
};

// The transfers between two ranks: see Note [Letters] in mailbox.cpp.
class Mailbox final : public Queue, public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(std::shared_ptr<SharedGroup> group);

  TransferPtr send(Call call);
  TransferPtr receive(Call call);
  Wait progress(Pending& wanted, bool look) override;

 private:
  Letter& letter(int rank, uint64_t place) const;
  void release_sent();
  void collect(int from);
  void open(Pending& to, uint64_t place);

  const std::shared_ptr<SharedGroup> group_;
  std::vector<uint64_t> last_sent_;          // by receiver: the end of its list
  std::vector<int64_t> send_ends_;           // by receiver, in virtual time
  std::vector<int64_t> receive_ends_;        // by sender
  std::deque<uint64_t> sent_;                // letters not known to be free
  std::vector<uint64_t> cursor_;             // by sender
  std::vector<std::deque<uint64_t>> unread_; // letters by sender, in its heap
  std::deque<std::shared_ptr<Pending>> receiving_;
};

class SharedMemory final : public Transport {
 public:
  explicit SharedMemory(std::shared_ptr<SharedGroup> group);
  ~SharedMemory() override;

  const char* kind() const override { return "shared"; }
  std::string gone(int peer, const Arrived& arrived) const override;
  void leave(bool broken) override;

 private:
  TransferPtr begin(Call call) override;

  const std::shared_ptr<SharedGroup> shared_;
  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<Mailbox> mailbox_;
};

} // namespace torch_ext::sim
