// What ranks compare before data moves, and how a difference is told. Pure functions, but for `site_of_call`.
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "transport.h"

namespace torch_ext::sim {

using Counts = std::vector<int64_t>;

// The numbers of elements that ranks compare: see the table of Call.
Counts counts_of(const Call& call);

Fingerprint fingerprint_of(const Call& call, const Counts& counts);

// One rank's call, as its peers see it.
struct Said {
  std::string who;
  const Fingerprint* print;
  Counts counts;
};

// "all_reduce(SUM) of 4 x Float at train.py:12"
std::string phrase(const Said& said);

// What two ranks disagree in; empty where they agree.
std::string difference(const Said& one, const Said& other);

// Of the ranks of an all-to-all, in order, the first pair of which one sends what the other does not expect.
std::string unequal_exchange(const std::vector<Said>& ranks);

// Of all ranks, in order, the first two that use one device; empty where there are none.
std::string shared_device(const std::vector<Said>& ranks);

// Element type as programs spell it, or "nothing" for -1.
std::string type_name(int8_t type);

// File and line of the innermost Python frame of the calling thread outside torch; empty where there is none. Takes the
// GIL for about a microsecond.
std::string site_of_call();

void copy_text(char* to, size_t bytes, const std::string& text);

} // namespace torch_ext::sim
