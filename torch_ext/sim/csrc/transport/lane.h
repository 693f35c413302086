// The collectives of a group over shared memory, in order.
//
// Note [States of a collective]
//
//   published ---> checked ---> over       data was moved
//       |            |
//       |            `--------> sharing ---> over        an all-reduce too large for each to do alone: see
//                                                      Note [Who reduces] (movement.h)
//       `---------------------> over       with an error: ranks disagree, a peer has gone, time limit, abort
//
//   published   this rank has copied its inputs to its memory and says what it called; peers can take them from there
//               whatever this rank does next, so nobody depends on when it waits
//   checked     every peer has published the same number, and all fingerprints agree
//   sharing     pieces of the result are being reduced, by whoever is there
//
// A collective leaves a state only while somebody waits for it or polls, on that thread. The collectives of a group end
// in order, so whoever waits for one does the earlier ones first.
#pragma once

#include <deque>

#include "fingerprint.h"
#include "group.h"

namespace torch_ext::sim {

class Lane final : public Queue, public std::enable_shared_from_this<Lane> {
 public:
  explicit Lane(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  // Waits where the call reads what one before it has yet to write, and where peers are kSlots collectives behind.
  TransferPtr start(Call call);

  // The youngest that is not over; nullptr where all are.
  std::shared_ptr<Pending> last_pending();

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

  // Brings one collective on; returns what it waits for, unless it is over then.
  Wait step(Pending& front, bool look);
  std::optional<Wait> gather(Pending& front, bool look);

  std::shared_ptr<Group> group_;
  uint64_t started_ = 0;
  std::deque<std::shared_ptr<Pending>> pending_; // not over, or over behind one that is not
  std::deque<Published> published_;              // whose memory peers may still read
};

} // namespace torch_ext::sim
