#include "memory_snapshot.h"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "allocator.h"
#include "block_pool.h"
#include "call_stack.h"
#include "device.h"
#include "memory_history.h"

namespace torch_ext::sim {
namespace {

namespace py = pybind11;

// Names all stacks of a snapshot at once.
class Frames {
 public:
  // The list is filled by `fill`.
  py::list add(const CallStack& stack) {
    py::list frames;
    if (stack != nullptr) {
      stacks_.push_back(stack);
      lists_.push_back(frames);
    }
    return frames;
  }

  void fill() const {
    std::vector<torch::CapturedTraceback*> raw;
    raw.reserve(stacks_.size());
    for (const auto& stack : stacks_) {
      raw.push_back(stack.get());
    }
    const auto named = torch::symbolize(raw);
    std::vector<py::dict> all;
    all.reserve(named.all_frames.size());
    for (const auto& frame : named.all_frames) {
      py::dict one;
      one["filename"] = frame.filename;
      one["line"] = frame.lineno;
      one["name"] = frame.funcname;
      all.push_back(std::move(one));
    }
    for (size_t i = 0; i < lists_.size(); ++i) {
      for (const auto index : named.tracebacks[i]) {
        py::list(lists_[i]).append(all[index]);
      }
    }
  }

 private:
  std::vector<CallStack> stacks_;
  std::vector<py::list> lists_;
};

uint64_t address(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

const char* name_of(BlockFacts::State state) {
  switch (state) {
    case BlockFacts::State::kLive:
      return "active_allocated";
    case BlockFacts::State::kInUse:
      return "active_awaiting_free";
    default:
      return "inactive";
  }
}

// A block is a segment of its own here.
py::dict segment_of(c10::DeviceIndex device, const BlockFacts& facts, Frames& frames) {
  const bool live = facts.state == BlockFacts::State::kLive, idle = facts.state == BlockFacts::State::kIdle;
  py::dict block;
  block["address"] = address(facts.data);
  block["size"] = facts.capacity;
  block["requested_size"] = idle ? 0 : facts.requested;
  block["state"] = name_of(facts.state);
  block["frames"] = live ? frames.add(stack_of_memory(facts.data)) : py::list();
  block["operator"] = name_of_tag(idle ? 0 : facts.tag);
  py::list blocks;
  blocks.append(block);
  py::dict segment;
  segment["device"] = static_cast<int>(device);
  segment["address"] = address(facts.data);
  segment["total_size"] = facts.capacity;
  segment["allocated_size"] = live ? facts.rounded : 0;
  segment["active_size"] = idle ? 0 : facts.rounded;
  segment["requested_size"] = idle ? 0 : facts.requested;
  segment["stream"] = facts.home;
  constexpr size_t kSmallBytes = size_t{1} << 20;
  segment["segment_type"] = facts.capacity <= kSmallBytes ? "small" : "large";
  segment["segment_pool_id"] = py::make_tuple(0, 0);
  segment["is_expandable"] = false;
  segment["frames"] = py::list();
  segment["blocks"] = blocks;
  return segment;
}

void add_event(py::list& trace, const MemoryEvent& event, Frames& frames) {
  const auto entry = [&](const char* action) {
    py::dict one;
    one["action"] = action;
    one["addr"] = address(event.data);
    one["size"] = event.size;
    one["stream"] = event.stream;
    one["time_us"] = event.time_us;
    one["frames"] = frames.add(event.stack);
    if (event.kind == MemoryEvent::Kind::kOutOfMemory) {
      one["device_free"] = event.free;
    }
    trace.append(one);
  };
  switch (event.kind) {
    case MemoryEvent::Kind::kAllocate:
      entry("alloc");
      break;
    case MemoryEvent::Kind::kFree:
      entry("free_requested");
      entry("free_completed");
      break;
    case MemoryEvent::Kind::kOutOfMemory:
      entry("oom");
      break;
  }
}

py::dict snapshot() {
  Frames frames;
  py::list segments, traces;
  std::vector<py::list> by_device;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    for (const auto& facts : blocks_on(device)) {
      segments.append(segment_of(device, facts, frames));
    }
    by_device.emplace_back();
    traces.append(by_device.back());
  }
  for (const auto& event : memory_events()) {
    add_event(by_device.at(static_cast<size_t>(event.device)), event, frames);
  }
  frames.fill();
  py::dict whole;
  whole["segments"] = segments;
  whole["device_traces"] = traces;
  whole["allocator_settings"] = py::dict();
  whole["external_annotations"] = py::list();
  return whole;
}

} // namespace

void bind_memory_snapshot(py::module_& m) {
  m.def("start_memory_history", [](bool stacks, bool events, size_t most_events) {
    start_memory_history({stacks, events, most_events});
  });
  m.def("stop_memory_history", &stop_memory_history);
  m.def("is_recording_memory", &is_recording_memory);
  m.def("memory_snapshot", &snapshot);
}

} // namespace torch_ext::sim
