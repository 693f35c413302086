// What ranks have published of a collective, and its way from their memory to this rank's outputs.
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

#include <cstdint>
#include <optional>

#include "fingerprint.h"
#include "group.h"

namespace torch_ext::sim {

// What a rank, which has published its collective `number`, called.
Said said_by(Group& group, int peer, uint64_t number);

// Moves the data of a collective on which all ranks agree. Returns what to wait for while peers reduce pieces of it;
// ends it where one of them died at that. Called with the group's lock held.
std::optional<Wait> move_data(Group& group, Pending& front, bool look);

} // namespace torch_ext::sim
