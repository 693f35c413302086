// Who allocated device memory: stacks of live blocks, and a trace of allocations and frees. Off by default.
//
// What names are known without it: every block keeps the kernel that allocated it, as a number (see `tag_of`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "call_stack.h"
#include "device.h"

namespace torch_ext::sim {

// The number that stands for a name of a kernel; 0 for the empty one. Cheap for names that were seen before.
uint32_t tag_of(std::string_view name);
// Empty for 0.
std::string name_of_tag(uint32_t tag);

struct MemoryEvent {
  enum class Kind : uint8_t { kAllocate, kFree, kOutOfMemory };
  Kind kind;
  c10::DeviceIndex device;
  const void* data; // of what ran out of memory: nothing
  size_t size;      // bytes, as charged; of what ran out of memory: as requested
  int64_t stream;
  int64_t time_us; // since 1970
  size_t free;     // bytes of the device, of what ran out of memory
  CallStack stack;
};

struct HistoryOptions {
  bool stacks;        // of live blocks and events
  bool events;        // whether to keep events beside what is live
  size_t most_events; // older ones are dropped
};

// Starts over with nothing known.
void start_memory_history(HistoryOptions options);
void stop_memory_history();
bool is_recording_memory() noexcept;

// Called with no lock held.
void note_memory(MemoryEvent event);

// Of a live block. Null where it was allocated while nobody recorded.
CallStack stack_of_memory(const void* data);
std::deque<MemoryEvent> memory_events();

} // namespace torch_ext::sim
