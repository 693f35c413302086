// What ranks tell one another of their work on symmetric memory, while they are checked for races.
//
// Note [Races between ranks]
// A clock knows lanes of other ranks as it knows those of its own. It travels as a stamp: with a signal, from its put
// to its wait; with a collective or a transfer of simccl, from the ranks that give data to those that get it; with a
// rendezvous and a collective of the host, between all their ranks. A rank without symmetric memory sends no stamps,
// but passes on those it has got.
//
// Accesses to symmetric memory are kept in its journal, which all ranks map. Each rank compares an access with those
// that are there, and adds it, under one lock: of two accesses that nothing orders, the second one finds the first,
// whichever that is. Stamps follow from the order of calls, not from time, so each run finds the same pairs.
//
// The accesses of one lane from one line to the same bytes are kept once, the last: what is not ordered after it may
// race, and what raced with an earlier one has been found, or races with the last one too.
//
//   offset                  what, from Memory::journal on
//   0                       a lock, and the number of accesses
//   4096                    kLogged * Logged: the last accesses
//   ... rounded to 4096     for each slot of the signal pad the stamp of its put: length, then bytes
#pragma once

#include <functional>

#include "../kernel_observer.h"
#include "../std.h"
#include "../symmetric_memory.h"

namespace torch_ext::sim::races {

// One tick of a lane, for other processes.
struct Stamped {
  uint32_t process;
  uint32_t lane;
  uint32_t tick;
};

std::string as_stamp(const std::vector<Stamped>& ticks);
std::vector<Stamped> from_stamp(const std::string& stamp);

constexpr size_t kLoggedDims = 8;

// An access to symmetric memory.
struct Logged {
  uint32_t check; // which check of its process, by number
  Stamped epoch;
  int32_t rank; // global
  int8_t type;  // at::ScalarType
  bool writes;
  uint8_t dims;
  uint64_t begin; // from the start of the buffer
  std::array<int64_t, kLoggedDims> sizes;
  std::array<int64_t, kLoggedDims> strides;
  char name[64];
  char lane[96];
  char site[200];

  std::span<const int64_t> all_sizes() const { return {sizes.data(), dims}; }
  std::span<const int64_t> all_strides() const { return {strides.data(), dims}; }
  bool is_alike(const Logged& other) const;
};

// Calls `visit` with each access in the journal, then adds `access`. No other process does so meanwhile.
void log_access(symmetric::Memory& memory, const Logged& access, const std::function<void(const Logged&)>& visit);

// The stamp of the put in slot `place` of the pad. Without a check nothing is written or read.
void write_stamp(symmetric::Memory& memory, size_t place, const std::string& stamp);
std::string read_stamp(symmetric::Memory& memory, size_t place);

size_t journal_bytes(size_t pad_bytes);

} // namespace torch_ext::sim::races
