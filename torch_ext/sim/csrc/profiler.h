// Device events for torch.profiler: kernels on their streams, operations of process groups on their own row.
//
// Note [Device time]
// A kernel's device time is its host time. An operation of a process group lasts from its launch until this rank knows
// that it is over. Torch links both to the operator that launched them, by its correlation number.
#pragma once

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

extern std::atomic<bool> profiling;

// Whether torch.profiler records device events at the moment.
inline bool is_profiling() noexcept {
  return profiling.load(std::memory_order_relaxed);
}

struct DeviceWork {
  std::string name;
  c10::DeviceIndex device;
  int64_t row;     // of the device: the id of a stream, or kLaneRow
  int64_t started; // nanoseconds on the clock of streams
  int64_t ended;
  int64_t correlation; // of the operator that launched it
};

constexpr int64_t kLaneRow = 1000;

// The number of the operator that this thread runs; 0 outside of operators and without a profiler.
int64_t current_correlation() noexcept;
void record_device_work(DeviceWork work);

// Makes torch.profiler ask this device for its events. Called once, when the library loads.
void register_profiler();

} // namespace torch_ext::sim
