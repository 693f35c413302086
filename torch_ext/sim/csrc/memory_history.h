// Call stacks, and the origin of device memory: stacks of live blocks, a trace of allocations and frees, and the
// message when a device runs out of memory. Recording is off by default; without it, every block still keeps the name
// of the kernel that allocated it.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include "allocator.h"
#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// Python frames, captured at once and named only when they are shown. The capture costs well under a microsecond. Null
// where Python is not running.
using CallStack = std::shared_ptr<torch::CapturedTraceback>;

// Acquires the GIL briefly, so call it without any lock of ours.
CallStack current_call_stack();

// While alive, `current_call_stack` of this thread returns `stack`, unless that is null.
class CallStackOf {
 public:
  explicit CallStackOf(const CallStack& stack);
  ~CallStackOf();
  C10_DISABLE_COPY_AND_ASSIGN(CallStackOf);
};

// A line for each frame, innermost first and at most `most` of them: "\n    train.py:8 in step". Empty without frames.
std::string lines_of(const CallStack& stack, size_t most);

// Names the frames of many stacks at once. With the GIL.
class Frames {
 public:
  // Returns a list to which `fill` adds a dictionary for each frame, innermost first; empty without a stack.
  pybind11::list add(const CallStack& stack);
  void fill() const;

 private:
  std::vector<CallStack> stacks_;
  std::vector<pybind11::list> lists_;
};

// A copy of a kernel's name that lasts as long as the process; null for an empty name. Cheap for repeated names.
const std::string* lasting_name(std::string_view name);

struct MemoryEvent {
  enum class Kind : uint8_t { kAllocate, kFree, kOutOfMemory };
  Kind kind;
  c10::DeviceIndex device;
  const void* data; // kOutOfMemory: null
  size_t size;      // bytes, as requested
  size_t charged;   // bytes of the block; kOutOfMemory: 0
  int64_t stream;
  int64_t time_us; // since 1970, or of virtual time
  size_t free;     // bytes of the device; kOutOfMemory only
  CallStack stack;
};

bool is_recording_memory() noexcept;

// Called with no lock held.
void note_memory(MemoryEvent event);

// Raises OutOfMemoryError, which names the exhausted memory and the holders of `pool`'s. Called with no lock held.
[[noreturn]] void raise_out_of_memory(BlockPool& pool, size_t nbytes, Short whose);

} // namespace torch_ext::sim
