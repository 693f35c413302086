// Fingerprints, which ranks compare before data moves, and the message for a difference. All functions but
// `site_of_call` are pure.
#pragma once

#include <c10/util/StringUtil.h>

#include "../std.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {

using Counts = std::vector<int64_t>;

// The numbers of elements that ranks compare: see the table of Call.
Counts counts_of(const Call& call);

Fingerprint fingerprint_of(const Call& call, const Counts& counts);

// One rank's call, as its peers see it: valid as long as the memory behind it.
struct Participant {
  std::string who() const { return c10::str("rank ", global_rank); }

  int64_t global_rank;
  const Fingerprint* print;
  std::span<const int64_t> counts;
};

// "all_reduce(SUM) of 4 x Float at train.py:12"
std::string phrase(const Participant& participant);

// The difference between two ranks' calls; empty where they agree.
std::string difference(const Participant& one, const Participant& other);

Envelope envelope_of(const Call& send);

// Whether a letter fits the output of its receive.
bool fits(const Envelope& sent, const Call& recv);

// The fault in a send and the receive that gets it: ranks disagree, or would block each other on a GPU (Note [Transfers
// that block each other] in transport.cpp). Null without a fault.
std::exception_ptr fault_of(const Group& group, const Envelope& sent, const Call& recv);

// The fault in the calls of all ranks, in order, of which no two have a `difference`: two ranks use one device, or one
// sends the other an unexpected number of elements in an all-to-all. Empty without a fault.
std::string disagreement_of_all(const std::vector<Participant>& ranks);

// File and line of the innermost Python frame of the calling thread outside torch; empty where there is none. Takes the
// GIL for about a microsecond.
std::string site_of_call();

void copy_text(char* to, size_t bytes, const std::string& text);

} // namespace torch_ext::sim
