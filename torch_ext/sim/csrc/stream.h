// Streams and events.
//
// Note [Streams of an eager device]
// Kernels run to their end before the call that launches them returns, so a stream holds no queue. What it does hold is
// a horizon: the moment until which it counts as busy. `sleep` moves the horizon of the current stream into the future
// without delaying the host; recording an event captures the horizon; waiting for an event moves a stream's horizon to
// the event's. Queries and host waits compare horizons with the clock. So ordering, overlap and timing look to a
// program as they do on hardware, while values are always those of an execution in program order.
//
// A stream id packs class and index; 0 is the default stream:
//     id = 0                                 default
//     id = 1 + class * kStreamsPerClass + i  class 0: normal, class 1: high priority; i < kStreamsPerClass
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

#include "device.h"
#include "kernel_observer.h"

namespace torch_ext::sim {

constexpr c10::StreamId kStreamsPerClass = 32;
constexpr c10::StreamId kStreamClasses = 2;
constexpr c10::StreamId kStreamCount = 1 + kStreamClasses * kStreamsPerClass;

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);

// Hands out the streams of a class in turn; after kStreamsPerClass it starts over, as on GPUs.
c10::Stream next_stream(c10::DeviceIndex device, bool high_priority);

void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);

// Until when, on the clock of streams, `stream` counts as busy. Asking tells the host nothing.
int64_t busy_until(c10::Stream stream);
int64_t stream_clock(); // nanoseconds, steady

// What a device does besides kernels: `settle` runs, without the GIL, when somebody waits for a whole device. Set once.
void set_settle(void (*settle)());

// Keeps the current stream of the current device busy for `nanoseconds` more. Returns at once.
void sleep(int64_t nanoseconds);

struct Event {
  int64_t done_at = 0; // nanoseconds on the steady clock
  Moment moment{};     // for whoever observes
};

Event record(c10::Stream stream);
void wait(c10::Stream stream, const Event& event);
void synchronize(const Event& event);

// Whether the host could wait for them without waiting. What it learns by asking counts as waited for.
bool is_idle(c10::Stream stream);
bool is_done(const Event& event);

void install_guard();

} // namespace torch_ext::sim
