// Fingerprints, which ranks compare before data moves, and the message for a difference. Pure functions, but for
// `site_of_call`.
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

// One rank's call, as its peers see it: valid as long as the memory that it was read from.
struct Said {
  std::string who() const { return c10::str("rank ", global_rank); }

  int64_t global_rank;
  const Fingerprint* print;
  std::span<const int64_t> counts;
};

// "all_reduce(SUM) of 4 x Float at train.py:12"
std::string phrase(const Said& said);

// What two ranks disagree in; empty where they agree.
std::string difference(const Said& one, const Said& other);

// What a sender and a receiver disagree in, given that they do.
std::string unequal_letter(
    const std::string& sender, int64_t elements, int8_t type, const char* site, const std::string& receiver,
    const Call& recv);

// What is wrong with the calls of all ranks, in order, of which no two have a difference: two ranks use one device, or
// one of an all-to-all sends what the other does not expect. Empty where nothing is.
std::string disagreement_of_all(const std::vector<Said>& ranks);

// Element type as programs spell it, or "nothing" for -1.
std::string type_name(int8_t type);

// File and line of the innermost Python frame of the calling thread outside torch; empty where there is none. Takes the
// GIL for about a microsecond.
std::string site_of_call();

void copy_text(char* to, size_t bytes, const std::string& text);

} // namespace torch_ext::sim
