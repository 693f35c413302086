// What operations move in virtual time: bytes, messages, and over which links.
//
// Note [Traffic]
// By NCCL's rings, or as sends and receives. A model with `node` puts that many ranks, by their global numbers, on each
// node. A ring visits all ranks of a node before it goes on to the next node, so it has as many edges between nodes as
// there are nodes (NCCL's tuning.cc, and torch/_inductor/comm_analysis.py after it, count its steps so). Each rank of a
// node has a network adapter, and NCCL's channels cross to the next node by all those of the group's ranks. Other
// groups' traffic slows nothing down.
#pragma once

#include "clock.h"
#include "transport/transport.h"

namespace torch_ext::sim {

clock::Traffic traffic_of(const Call& call, const Group& group);

} // namespace torch_ext::sim
