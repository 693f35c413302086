// The collectives of a group over shared memory, in order.
//
// Note [States of a collective]
//
//   published ---> checked ---> over       data was moved
//       |            |
//       |            `--------> sharing ---> over        an all-reduce too large for each to do alone
//       `---------------------> over       with an error: ranks disagree, a peer has gone, time limit, abort
//
//   published   this rank has copied its inputs to its memory and says what it called; peers can take them from there
//               whatever this rank does next, so nobody depends on when it waits
//   checked     every peer has published the same number, and all fingerprints agree
//   sharing     pieces of the result are being reduced, by whoever is there
//
// A collective leaves a state only while somebody waits for it or polls, on that thread. The collectives of a group end
// in order, so whoever waits for one does the earlier ones first.
//
// Note [Who reduces]
// The result of a small all-reduce is computed by each rank for itself, which saves a second round. That of a large one
// is cut into pieces, which lie in order over the input of the group's first rank, in its memory. Whoever is waiting
// claims the next free piece (compare and swap on Slot::claims), reduces it, and says that it is done; then everybody
// copies the whole. So a rank that has launched but does not wait holds nobody up. A rank that dies within a piece is
// found by its claim.
//
//   claim: 0 free -> 1 + rank: being reduced -> kReduced
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
  void move(Pending& front);
  std::optional<Wait> reduce_shared(Pending& front, bool look);
  Fold fold_of(const Pending& front, const at::Tensor& to) const;

  Said said_by(int peer, uint64_t number) const;
  std::byte* input(int peer, uint64_t number, size_t index, uint64_t bytes) const;
  std::vector<const std::byte*> inputs_of_all(uint64_t number, size_t index, uint64_t bytes) const;

  std::shared_ptr<Group> group_;
  uint64_t started_ = 0;
  std::deque<std::shared_ptr<Pending>> pending_; // not over, or over behind one that is not
  std::deque<Published> published_;              // whose memory peers may still read
};

} // namespace torch_ext::sim
