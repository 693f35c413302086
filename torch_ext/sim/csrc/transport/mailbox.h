// Transfers between two ranks of a group over shared memory.
//
// Note [Letters]
// A sender copies its tensor to its own memory and appends a letter to the list that it keeps for the receiver, so a
// send is over when it has begun, to oneself too. A receiver walks the lists of the ranks it expects something from and
// takes the oldest letter with its tag; those with other tags stay, in order. Of receives that could take the same
// letter, the one that was started first gets it.
//
//   sender's list   first -> letter -> letter -> letter -> 0
//                            passed    passed    ^ cursor of the receiver: the last one it has seen
//                            and read            |
//                            = free              `- passed, not read: among the receiver's unread letters
//
// A letter is kept until the receiver has gone past it, because its `next` is where the list goes on.
#pragma once

#include <deque>

#include "fingerprint.h"
#include "group.h"

namespace torch_ext::sim {

class Mailbox final : public Queue, public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(std::shared_ptr<Group> group);

  TransferPtr send(Call call);
  TransferPtr receive(Call call);

  Wait progress(Pending& wanted, bool look) override;

 private:
  struct Sent {
    uint64_t letter; // in the heap of this rank
    uint64_t data;
  };
  struct Unread {
    uint64_t letter; // in the heap of the sender
    int tag;
  };

  Letter& letter(int rank, uint64_t place) const;
  void release_sent();
  void collect(int from);

  // Whether a letter for `to` was there.
  bool deliver(Pending& to);
  void open(Pending& to, int from, uint64_t place);
  std::string none_can_come(const Pending& to, bool look) const;

  std::shared_ptr<Group> group_;
  std::vector<uint64_t> last_sent_;        // by receiver: the end of its list
  std::deque<Sent> sent_;                  // not known to be free
  std::vector<uint64_t> cursor_;           // by sender
  std::vector<std::deque<Unread>> unread_; // by sender
  std::deque<std::shared_ptr<Pending>> receiving_;
};

} // namespace torch_ext::sim
