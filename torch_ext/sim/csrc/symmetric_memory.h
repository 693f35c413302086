// Symmetric memory: device memory that the ranks of a group map into one another's address spaces.
//
// Note [Memory that ranks share]
// Each allocation is a file without a name (memfd), which ranks open through /proc/PID/fd at their rendezvous, as the
// memory of a group is (Note [Agreeing on a transport] in transport/choice.cpp). So nothing is left behind, however a
// rank ends, and peers keep the memory of one that has ended.
//
//   offset                what
//   0                     the signal pad
//   pad, rounded          the buffer
//   buffer, rounded       the journal of the race check: see races/journal.h. Without pages until a check needs it
//
// The addresses of the memory freed last stay reserved in the process, so that a tensor that outlives its memory is
// found, and never reaches other memory: see Note [Bounds] in checks.h.
//
// Note [Signals]
// `barrier`, `put_signal` and `wait_signal` are work of the current stream. They begin once the stream's earlier work
// is over, put what they can at once, and leave the rest to the thread that needs it (Elsewhere in stream.h) or to one
// that looks at them now and then: peers may depend on them while the host is in a call that has no device. A slot of
// a pad is 0, or 1 from a put to its wait; a put waits for 0, a wait for 1. Puts and waits of a slot alternate, so the
// number of a wait tells which put it waited for, whatever the timing.
#pragma once

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "device.h"
#include "std.h"
#include "transport/segment.h"

namespace torch_ext::sim::symmetric {

// Whether this process has ever had symmetric memory.
extern std::atomic<bool> exists;

// One rank's memory, mapped by this process. Any thread may use it.
class Memory {
 public:
  // Maps `file`, which it owns from now on. rank: the owner's, global; -1 for this process.
  Memory(int file, size_t pad_bytes, size_t buffer_bytes, c10::DeviceIndex device, int64_t rank);
  ~Memory();
  C10_DISABLE_COPY_AND_ASSIGN(Memory);

  char* pad() const { return start_; }
  char* buffer() const { return start_ + pad_bytes; }

  size_t whole_bytes() const { return pad_bytes + rounded_up(std::max<size_t>(buffer_bytes, 1), kPage); }
  char* journal() const { return start_ + whole_bytes(); }

  // From the first call of `isolate` to the last of `rejoin`, writes of this process to the buffer are dropped, and
  // hidden from peers.
  void isolate();
  void rejoin();

  const int file;
  const size_t pad_bytes; // whole pages
  const size_t buffer_bytes;
  const c10::DeviceIndex device;
  const int64_t rank;
  std::atomic<bool> has_stamps{false};

 private:
  void map_buffer(int sharing);

  char* start_;
  std::atomic<int> isolations_{0};
};

// The memory that contains `pointer`; null if there is none.
std::shared_ptr<Memory> memory_at(const void* pointer);

// The reason why a tensor at `pointer` has no memory any more; empty for any other address.
std::string why_gone(const void* pointer);

// The rank of this process among all ranks, as far as a rendezvous has told it; -1 before.
int64_t rank_of_process();

// A rank of a rendezvous.
struct Peer {
  int64_t rank; // global
  std::shared_ptr<Memory> memory;
  std::shared_ptr<const Process> process; // null for this one
};

using HandlePtr = c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory>;
HandlePtr make_handle( // symmetric_signals.cpp
    std::shared_ptr<const std::vector<Peer>> peers, const std::string& group, int rank, size_t offset);

void install(); // called once

// For a thread of Python's: `advance_signals` does what is possible of those that are not over.
void bind_signals(pybind11::module_& m); // symmetric_signals.cpp

} // namespace torch_ext::sim::symmetric
