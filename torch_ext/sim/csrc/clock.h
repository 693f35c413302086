// Virtual time.
//
// Note [Virtual time]
// While it is on, the streams' horizons (Note [Streams of an eager device] in stream.h), the host's time and the ends
// of operations are numbers that the model computes, in nanoseconds; the machine's clock plays no part.
//
//   kernel, copy, sleep   The host pays for the launch. The work starts when its stream is free and it is launched, a
//                         copy also waits for the copy engine of its direction, and lasts as the model says.
//   collective            It is ready at the end of its stream's work. It starts when it is ready on all ranks and the
//                         one before it in its group is over, and ends on all ranks at once. Ranks exchange the moments
//                         with their data (Slot::timing). Its stream waits if it is no `async_op`.
//   send, receive         A send starts when the sends before it to that rank are over, and waits for nobody: NCCL
//                         buffers it. A receive is over when it was launched and the bytes have arrived.
//   host                  A wait moves its time to the end of what it waits for, for a device also the operations of
//                         groups that no stream waits for; a sleep by its length. A query first waits, on the machine's
//                         clock, until that end is known, and answers by its moment; the answer "not yet" costs a poll.
//                         Nothing else takes time.
//
// Every process has one host time, so ranks that are threads share it. Groups of other backends move no time.
//
// Moments are 64-bit numbers: those of the machine's clock lie below kEpoch, those of each stretch of virtual time
// above all before. So whatever was recorded earlier is over, and stays so.
#pragma once

#include <c10/util/ArrayRef.h>

#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {

// A moment, and the number of the work in the trace that ends then; -1: none. The later of two with equal moments is
// that with the larger number, so the latest of many does not depend on the order in which they are met.
struct Stamp {
  int64_t at = 0;
  int64_t by = -1;
  auto operator<=>(const Stamp&) const = default;
};

extern std::atomic<bool> virtual_time;
inline bool is_virtual() noexcept {
  return virtual_time.load(std::memory_order_relaxed);
}
constexpr int64_t kEpoch = int64_t{1} << 61;

namespace clock {

struct Span {
  int64_t start = 0; // 0: not known
  int64_t end = 0;
  int last = -1; // the rank that was ready last
};

// What a collective or transfer moves (Note [Traffic] in traffic.h), as far as this rank goes. The bytes through its
// link and through its network adapter go at the same time.
struct Traffic {
  int64_t steps = 0;     // messages one after another
  int64_t far_steps = 0; // of these, to other nodes
  uint64_t sent = 0;     // bytes that leave the rank
  uint64_t near = 0;     // bytes through its link
  uint64_t far = 0;      // bytes through its network adapter
};

struct Work {
  const char* kind = nullptr; // kernel, copy, collective, transfer, host
  std::string name;
  int device = -1;
  int64_t stream = -1; // that it runs on; -1: the lane of its group
  std::string group{};
  int peer = -1; // of a transfer; of a collective, the rank that was ready last
  uint64_t bytes = 0;
  int64_t ready = 0; // without waiting for others' ranks or for engines
  int64_t start = 0; // 0: not known yet
  int64_t end = 0;
  int64_t after = -1; // the work whose end made it ready
};

std::string model(); // its name, which ranks compare
int64_t epoch();     // of this stretch of virtual time; ranks exchange moments counted from it

// A kernel or copy that has run on `stream`. is_launched: the host pays for a launch.
Span kernel(
    std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses, bool host_reads,
    bool is_launched = true);
void sleep(c10::Stream stream, int64_t nanoseconds);

// The host launches an operation of a group on `stream`; the parts of a coalesced one have one launch. Returns the
// moment when its inputs are ready.
Stamp launch(c10::Stream stream, bool is_launched);
int64_t duration(Traffic traffic);
int64_t ranks_per_node(); // 0: all ranks are on one node
bool has_limits();        // works have their time limits in virtual time

// Adds work to the trace and returns its number, or gives its times to earlier work.
int64_t trace(Work work);
void trace(int64_t number, Span span);         // of an operation of a group
void add_sent(int64_t number, uint64_t bytes); // of a further part of a transfer, which then counts as a send

void host_waits(Stamp until);
void host_sleeps(int64_t nanoseconds);
void poll(); // the answer to the host was "not yet"

} // namespace clock
} // namespace torch_ext::sim
