// Streams and events.
//
// Note [Streams of an eager device]
// A kernel ends before its launch returns, so a stream has no queue but a horizon: the time until which it counts as
// busy. `sleep` advances the horizon of the current stream; recording an event copies it; a stream that waits for an
// event advances its own to the event's; queries and host waits compare it with the clock. So order, overlap and timing
// look as on hardware, and values are those of program order.
//
// Note [What a stream waits for]
// Operations of a process group run on the lane of their group, until all its ranks take part. A stream that waits for
// an operation lists it; so does an event recorded on the stream afterwards, and a stream that waits for that event.
// The host blocks, without the GIL, where the result is due: at the next kernel on such a stream, and in waits for the
// stream, event or device. The thread that blocks does this rank's part of the operation. A failed operation raises
// there, once for each stream or event that waits for it.
//
// A stream id packs class and index; 0 is the default stream:
//     id = 0                                 default
//     id = 1 + class * kStreamsPerClass + i  class c: priority -c, as torch has them on GPUs; i < kStreamsPerClass
//     id = ... + b                           branch b of a graph: see Note [Streams of a capture] in graph.h
//     id = kStreamCount                      the lane of an operation: see AtEnd
#pragma once

#include "clock.h"
#include "device.h"
#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {

constexpr c10::StreamId kStreamsPerClass = 32;
constexpr c10::StreamId kStreamClasses = 4;
constexpr c10::StreamId kFirstBranch = 1 + kStreamClasses * kStreamsPerClass;
constexpr c10::StreamId kStreamCount = kFirstBranch + kStreamsPerClass;

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);

// Hands out the streams of a class in turn, and starts over after kStreamsPerClass, as on GPUs.
// Priorities beyond the range stand for its ends.
c10::Stream next_stream(c10::DeviceIndex device, int priority);
constexpr int kHighestPriority = 1 - static_cast<int>(kStreamClasses);

int priority_of(c10::StreamId id);

// The stream's handle as torch.cuda has it: null for a default stream.
void* handle_of(c10::Stream stream);

// The id of the stream whose native handle is `handle`; none if it is no stream of the device.
std::optional<c10::StreamId> stream_with_handle(c10::DeviceIndex device, uintptr_t handle);

// Work outside of streams that streams wait for. Call it on any thread, without the GIL.
class Elsewhere {
 public:
  virtual ~Elsewhere() = default;

  // Makes progress without waiting; returns whether the work is over, even by an error. Raises nothing.
  virtual bool advance() = 0;

  // Waits until the work is over. Raises if it failed.
  virtual void finish() = 0;

  // The end of the work, in nanoseconds on the steady clock; 0: not yet.
  virtual int64_t over_at() const = 0;

  // The number of the work in the trace of virtual time.
  virtual int64_t number() const = 0;

  // Whether the work is known to have failed.
  virtual bool failed() const = 0;

  // The work of other ranks that is over then, for the observer; null if none is known.
  virtual Moment learned() const { return nullptr; }
};
using Elsewheres = std::vector<std::shared_ptr<Elsewhere>>;

// Blocks until all work that the stream waits for is over, and forgets it. Raises if any of it failed.
void catch_up(c10::Stream stream);

// And until it is no longer busy. Virtual time passes if `takes_time`; a kernel that the host reads takes its own.
void synchronize(c10::Stream stream, bool takes_time = true);
void synchronize_device(c10::DeviceIndex device);

// The time, on the clock of streams, until which `stream` counts as busy, and what it waits for then. Orders nothing
// for the host.
int64_t busy_until(c10::Stream stream);
Elsewheres pending_of(c10::Stream stream);
int64_t stream_clock(); // nanoseconds, steady
void sleep_until(Stamp moment);

// Makes the clock stand still at `moment`; 0 lets it run. For tests, which so decide when work is over.
void stop_stream_clock(int64_t moment);

// Of virtual time (clock.h): the end of what a stream has been given, without what it waits for elsewhere, and the
// host's time. The first two make the stream or the host later, never earlier.
void extend(c10::Stream stream, Stamp end);
void move_host(Stamp to);
Stamp end_of(c10::Stream stream);
void extend_lanes(c10::DeviceIndex device, Stamp end); // the groups' lanes on a device
Stamp host_stamp();
void begin_virtual_time(int64_t moment);
void end_virtual_time();

// Finishes work besides kernels in a wait for a whole device. Set once.
extern void (*settle_others)();

// Keeps the current stream of the current device busy for `nanoseconds` more. Returns at once.
void sleep(int64_t nanoseconds);

struct Event {
  int64_t done_at = 0;    // nanoseconds on the steady clock
  Elsewheres elsewhere{}; // work that was not over when the event was recorded
  Moment moment{};        // for the observer
  c10::DeviceIndex device = -1;
  std::shared_ptr<struct CapturePoint> point{}; // of an event that a capture recorded
  int64_t number = -1;                          // of the work that ends at `done_at`, in the trace of virtual time
};

Event record(c10::Stream stream);
void wait(c10::Stream stream, const Event& event); // returns at once
void synchronize(const Event& event);

// While alive, events that this thread records on the current stream of `device` are `end`, the end of an operation.
// So torch's futures, which record an event when they complete, wait for the operation only.
class AtEnd {
 public:
  AtEnd(c10::DeviceIndex device, const Event& end);
  ~AtEnd();
  C10_DISABLE_COPY_AND_ASSIGN(AtEnd);

 private:
  c10::DeviceIndex device_;
  c10::StreamId previous_;
};

// Whether a host wait would return at once. The answer true counts as a wait by the host.
bool is_idle(c10::Stream stream);
bool is_done(const Event& event);

enum class SyncDebug : uint8_t { kOff, kWarn, kError };
extern std::atomic<SyncDebug> sync_debug;

// Warns or raises RuntimeError before the host blocks, where a program asks for it (torch.sim.set_sync_debug_mode). As
// with CUDA: for host reads such as `item()` and `nonzero()`, for copies between host and device that are not
// non-blocking, and for `Stream.synchronize()`; not for `torch.sim.synchronize()`, whose name says that it blocks.
void report_host_block(std::string_view what);

} // namespace torch_ext::sim
