#include "memory_history.h"

#include <c10/util/StringUtil.h>

#include "allocator.h"
#include "bindings.h"
#include "block_pool.h"
#include "blocks.h"
#include "clock.h"
#include "device.h"
#include "machine_memory.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {

namespace {
thread_local CallStack replaced_stack;

// Python's "no line" is -1, which torch stores without a sign.
uint64_t line_of(uint64_t number) {
  return static_cast<int64_t>(number) < 0 ? 0 : number;
}
} // namespace

CallStackOf::CallStackOf(const CallStack& stack) {
  replaced_stack = stack;
}

CallStackOf::~CallStackOf() {
  replaced_stack = nullptr;
}

CallStack current_call_stack() {
  if (replaced_stack != nullptr) {
    return replaced_stack;
  }
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

std::string lines_of(const CallStack& stack, size_t most) {
  if (stack == nullptr) {
    return "";
  }
  const auto named = torch::symbolize({stack.get()});
  const auto& frames = named.tracebacks.front();
  std::string lines;
  for (size_t i = 0; i < std::min(frames.size(), most); ++i) {
    const auto& frame = named.all_frames[frames[i]];
    lines += c10::str("\n    ", frame.filename, ":", line_of(frame.lineno), " in ", frame.funcname);
  }
  if (frames.size() > most) {
    lines += c10::str("\n    and ", frames.size() - most, " frames that called it");
  }
  return lines;
}

namespace {

struct History {
  std::mutex mutex;       // guards what follows
  size_t most_events = 0; // older ones are dropped
  std::unordered_map<const void*, CallStack> live;
  std::deque<MemoryEvent> events;
};

// Here as in other files, objects made by `new` for a reference are never freed: threads may outlive static objects.
History& history = *new History();

std::atomic<bool> recording{false};
std::atomic<bool> with_stacks{false};

// The stack of a live block's allocation. Null if recording was off then.
CallStack stack_of_memory(const void* data) {
  std::lock_guard<std::mutex> lock(history.mutex);
  const auto found = history.live.find(data);
  return found == history.live.end() ? nullptr : found->second;
}

constexpr size_t kMostHolders = 8;
constexpr size_t kFramesOfHolder = 4;

std::string readable(size_t nbytes) {
  constexpr std::array<const char*, 4> kUnits{"bytes", "KiB", "MiB", "GiB"};
  constexpr double kNext = 1024;
  auto amount = static_cast<double>(nbytes);
  size_t unit = 0;
  while (amount >= kNext && unit + 1 < kUnits.size()) {
    amount /= kNext;
    ++unit;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << amount << " " << kUnits.at(unit);
  return text.str();
}

struct Held {
  size_t bytes = 0;
  size_t blocks = 0;
};

// Groups live memory by the allocating lines if they are known, else by the kernel, or by size: most operators allocate
// results through torch.empty.
std::vector<std::pair<std::string, Held>> holders(const std::vector<SegmentFacts>& segments) {
  std::map<std::string, Held> by_whom;
  for (const auto& segment : segments) {
    for (const auto& block : segment.blocks) {
      if (block.state != Block::State::kLive) {
        continue;
      }
      const auto lines = lines_of(stack_of_memory(block.data), kFramesOfHolder);
      const std::string made = block.kernel == nullptr ? "of " + readable(block.size) : "made by " + *block.kernel;
      auto& held = by_whom[lines.empty() ? made : "made at" + lines];
      held.bytes += block.size;
      held.blocks += 1;
    }
  }
  std::vector<std::pair<std::string, Held>> sorted(by_whom.begin(), by_whom.end());
  std::ranges::stable_sort(sorted, std::greater(), [](const auto& each) { return each.second.bytes; });
  return sorted;
}

std::string list_of(const std::vector<std::pair<std::string, Held>>& held) {
  std::string text;
  for (size_t i = 0; i < std::min(held.size(), kMostHolders); ++i) {
    const auto& [made, what] = held[i];
    text +=
        c10::str("\n  ", readable(what.bytes), " in ", what.blocks, what.blocks == 1 ? " block " : " blocks ", made);
  }
  if (held.size() > kMostHolders) {
    size_t rest = 0;
    for (size_t i = kMostHolders; i < held.size(); ++i) {
      rest += held[i].second.bytes;
    }
    text += c10::str("\n  ", readable(rest), " in other blocks");
  }
  return text;
}

std::string message_of_machine(size_t nbytes) {
  const auto memory = machine_memory();
  if (memory.cap == 0) {
    return c10::str(": the machine's, not the device's. The host refused ", readable(nbytes), ".");
  }
  return c10::str(
      ": the machine's, not the device's. Tried to allocate ", readable(nbytes), ". The processes of this run hold ",
      readable(memory.run), " on simulated devices together, this one ", readable(memory.process), "; they may hold ",
      readable(memory.cap), ", by default 80 % of what the machine or its cgroup had available when the run began.");
}

std::string message_of_device(c10::DeviceIndex device, const Amounts& amounts, size_t nbytes) {
  const auto [allocated, reserved, limit, allowed] = amounts;
  return c10::str(
      ". Tried to allocate ", readable(nbytes), ". Device ", kSimName, ":", static_cast<int>(device),
      " has a total capacity of ", readable(limit), " of which ", readable(amounts.left()),
      " is free, and a new segment takes ", readable(segment_size(nbytes)), ".",
      allowed < limit ? c10::str(" ", readable(allowed), " allowed;") : std::string(), " Of the memory in use ",
      readable(allocated), " is allocated by tensors, and ", readable(reserved > allocated ? reserved - allocated : 0),
      " is reserved but unallocated.");
}

namespace py = pybind11;
using namespace pybind11::literals;

py::dict segment_of(c10::DeviceIndex device, const SegmentFacts& facts, Frames& frames) {
  constexpr std::array<const char*, 3> kStates{"active_allocated", "active_pending_free", "inactive"};
  size_t allocated = 0, active = 0, requested = 0;
  py::list blocks;
  for (const auto& block : facts.blocks) {
    const bool live = block.state == Block::State::kLive, idle = block.state == Block::State::kIdle;
    allocated += live ? block.size : 0;
    active += idle ? 0 : block.size;
    requested += idle ? 0 : block.requested;
    blocks.append(
        py::dict(
            "address"_a = address_of(block.data), "size"_a = block.size, "requested_size"_a = block.requested,
            "state"_a = kStates.at(static_cast<size_t>(block.state)),
            "frames"_a = live ? frames.add(stack_of_memory(block.data)) : py::list(),
            "operator"_a = idle || block.kernel == nullptr ? std::string() : *block.kernel));
  }
  return py::dict(
      "device"_a = static_cast<int>(device), "address"_a = address_of(facts.start), "total_size"_a = facts.size,
      "allocated_size"_a = allocated, "active_size"_a = active, "requested_size"_a = requested, "stream"_a = facts.home,
      "segment_type"_a = facts.is_small ? "small" : "large", "segment_pool_id"_a = facts.mempool,
      "is_expandable"_a = facts.is_expandable, "frames"_a = py::list(), "blocks"_a = blocks);
}

void add_event(py::list& trace, const MemoryEvent& event, Frames& frames) {
  static const std::array<std::vector<const char*>, 3> actions{
      {{"alloc"}, {"free_requested", "free_completed"}, {"oom"}}}; // by kind
  for (const char* action : actions.at(static_cast<size_t>(event.kind))) {
    py::dict entry(
        "action"_a = action, "addr"_a = address_of(event.data), "size"_a = event.size, "stream"_a = event.stream,
        "time_us"_a = event.time_us, "frames"_a = frames.add(event.stack));
    if (event.kind == MemoryEvent::Kind::kOutOfMemory) {
      entry["device_free"] = event.free;
    } else {
      entry["allocated_size"] = event.charged; // CUDA's has no such key
    }
    trace.append(entry);
  }
}

py::dict snapshot() {
  Frames frames;
  py::list segments, traces;
  std::vector<py::list> by_device;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    for (const auto& facts : pool_of(device).segments()) {
      segments.append(segment_of(device, facts, frames));
    }
    by_device.emplace_back();
    traces.append(by_device.back());
  }
  std::deque<MemoryEvent> events;
  {
    std::lock_guard<std::mutex> lock(history.mutex);
    events = history.events;
  }
  for (const auto& event : events) {
    add_event(by_device.at(static_cast<size_t>(event.device)), event, frames);
  }
  frames.fill();
  return py::dict(
      "segments"_a = segments, "device_traces"_a = traces, "allocator_settings"_a = py::dict(),
      "external_annotations"_a = py::list());
}

void stop() {
  decltype(history.live) live; // dropped without the lock: stacks belong to Python
  decltype(history.events) events;
  std::lock_guard<std::mutex> lock(history.mutex);
  recording = false;
  live.swap(history.live);
  events.swap(history.events);
}

// Starts recording, and forgets all earlier stacks and events. stacks: of live blocks and events. events: whether to
// keep events, besides live blocks.
void start(bool stacks, bool events, size_t most_events) {
  stop();
  std::lock_guard<std::mutex> lock(history.mutex);
  history.most_events = events ? most_events : 0;
  with_stacks = stacks;
  recording = true;
}

} // namespace

pybind11::list Frames::add(const CallStack& stack) {
  pybind11::list frames;
  if (stack != nullptr) {
    stacks_.push_back(stack);
    lists_.push_back(frames);
  }
  return frames;
}

void Frames::fill() const {
  const auto named = torch::symbolize(c10::fmap(stacks_, [](const CallStack& stack) { return stack.get(); }));
  const auto all = c10::fmap(named.all_frames, [](const auto& frame) {
    return py::dict("filename"_a = frame.filename, "line"_a = line_of(frame.lineno), "name"_a = frame.funcname);
  });
  for (size_t i = 0; i < lists_.size(); ++i) {
    for (const auto index : named.tracebacks[i]) {
      pybind11::list(lists_[i]).append(all[index]);
    }
  }
}

const std::string* lasting_name(std::string_view name) {
  if (name.empty()) {
    return nullptr;
  }
  // Kernel names rarely move, so the cache is keyed by address; a hit compares the text.
  constexpr size_t kPlaces = 256;
  thread_local std::array<const std::string*, kPlaces> seen{};
  auto& place = seen[(address_of(name.data()) >> 3U) % kPlaces];
  if (place == nullptr || *place != name) {
    static std::mutex mutex;
    static auto* names = new std::set<std::string>();
    std::lock_guard<std::mutex> lock(mutex);
    place = &*names->emplace(name).first;
  }
  return place;
}

bool is_recording_memory() noexcept {
  return recording.load(std::memory_order_relaxed);
}

void note_memory(MemoryEvent event) {
  event.time_us = (is_virtual() ? host_stamp().at - clock::epoch() : c10::getTime()) / 1000;
  event.stack = with_stacks ? current_call_stack() : nullptr;
  CallStack dropped;
  MemoryEvent oldest{};
  std::lock_guard<std::mutex> lock(history.mutex);
  if (!is_recording_memory()) {
    return;
  }
  auto& [mutex, most_events, live, events] = history;
  if (event.kind == MemoryEvent::Kind::kAllocate) {
    dropped = std::exchange(live[event.data], event.stack);
  } else if (const auto found = live.find(event.data); found != live.end()) {
    dropped = std::move(found->second);
    live.erase(found);
  }
  events.push_back(std::move(event));
  if (events.size() > most_events) {
    oldest = std::move(events.front());
    events.pop_front();
  }
}

void raise_out_of_memory(BlockPool& pool, size_t nbytes, Short whose) {
  const auto amounts = pool.amounts();
  if (is_recording_memory()) {
    note_memory({MemoryEvent::Kind::kOutOfMemory, pool.device(), nullptr, nbytes, 0, 0, 0, amounts.left(), nullptr});
  }
  const bool of_device = whose == Short::kDevice;
  const auto held = holders(pool.segments());
  const auto list =
      c10::str("\nAllocated by tensors", of_device ? "" : " of this process", ", most first:", list_of(held), "\n");
  C10_THROW_ERROR(
      OutOfMemoryError,
      c10::str(
          kSimTitle, " out of memory",
          of_device ? message_of_device(pool.device(), amounts, nbytes) : message_of_machine(nbytes),
          held.empty() ? " " : list,
          of_device ? "Free tensors, or raise the capacity with torch.sim.set_memory_limit."
                    : "Free tensors, use fewer ranks, or bound each device with --memory SIZE. "
                      "TORCH_EXT_SIM_MACHINE_MEMORY=BYTES sets another cap.",
          is_recording_memory()
              ? ""
              : " To see the lines that allocated it, call torch.sim.memory._record_memory_history() first."));
}

void bind_memory_history(py::module_& m) {
  m.def("start_memory_history", &start);
  m.def("stop_memory_history", &stop);
  m.def("memory_snapshot", &snapshot);
  m.def("memory_events", [](c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(history.mutex);
    return std::ranges::count(history.events, device, &MemoryEvent::device);
  });
}

} // namespace torch_ext::sim
