#include "memory_history.h"

#include <c10/util/StringUtil.h>

#include "allocator.h"
#include "bindings.h"
#include "block_pool.h"
#include "blocks.h"
#include "device.h"
#include "machine_memory.h"
#include "std.h"

namespace torch_ext::sim {

namespace {
thread_local CallStack replaced_stack;
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
    lines += c10::str("\n    ", frame.filename, ":", frame.lineno, " in ", frame.funcname);
  }
  if (frames.size() > most) {
    lines += c10::str("\n    and ", frames.size() - most, " frames that called it");
  }
  return lines;
}

namespace {

struct Tags {
  std::mutex mutex;
  std::deque<std::string> names{""}; // by number; none is ever moved
  std::unordered_map<std::string_view, uint32_t> numbers{{"", 0}};
};

// Here as in other files, objects made by `new` for a reference are never freed: threads may outlive static objects.
Tags& tags = *new Tags();

std::pair<std::string_view, uint32_t> registered(std::string_view name) {
  std::lock_guard<std::mutex> lock(tags.mutex);
  auto found = tags.numbers.find(name);
  if (found == tags.numbers.end()) {
    const auto& kept = tags.names.emplace_back(name);
    found = tags.numbers.emplace(kept, static_cast<uint32_t>(tags.names.size() - 1)).first;
  }
  return *found;
}

struct History {
  std::mutex mutex; // guards what follows
  HistoryOptions options{};
  std::unordered_map<const void*, CallStack> live;
  std::deque<MemoryEvent> events;
};

// Here as in other files, objects made by `new` for a reference are never freed: threads may outlive static objects.
History& history = *new History();

std::atomic<bool> recording{false};
std::atomic<bool> with_stacks{false};

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
      const auto tag = name_of_tag(block.tag);
      const auto lines = lines_of(stack_of_memory(block.data), kFramesOfHolder);
      const std::string made = tag.empty() ? "of " + readable(block.size) : "made by " + tag;
      auto& held = by_whom[lines.empty() ? made : "made at" + lines];
      held.bytes += block.size;
      held.blocks += 1;
    }
  }
  std::vector<std::pair<std::string, Held>> sorted(by_whom.begin(), by_whom.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& one, const auto& other) {
    return one.second.bytes > other.second.bytes;
  });
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
      ". Tried to allocate ", readable(nbytes), ". Device " SIM_NAME ":", static_cast<int>(device),
      " has a total capacity of ", readable(limit), " of which ", readable(amounts.left()),
      " is free, and a new segment takes ", readable(segment_size(nbytes)), ".",
      allowed < limit ? c10::str(" ", readable(allowed), " allowed;") : std::string(), " Of the memory in use ",
      readable(allocated), " is allocated by tensors, and ", readable(reserved > allocated ? reserved - allocated : 0),
      " is reserved but unallocated.");
}

namespace py = pybind11;
using namespace pybind11::literals;

uint64_t address(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

py::dict segment_of(c10::DeviceIndex device, const SegmentFacts& facts, Frames& frames) {
  constexpr std::array<const char*, 3> kStates{"active_allocated", "active_awaiting_free", "inactive"};
  size_t allocated = 0, active = 0, requested = 0;
  py::list blocks;
  for (const auto& block : facts.blocks) {
    const bool live = block.state == Block::State::kLive, idle = block.state == Block::State::kIdle;
    allocated += live ? block.size : 0;
    active += idle ? 0 : block.size;
    requested += idle ? 0 : block.requested;
    blocks.append(
        py::dict(
            "address"_a = address(block.data), "size"_a = block.size, "requested_size"_a = block.requested,
            "state"_a = kStates.at(static_cast<size_t>(block.state)),
            "frames"_a = live ? frames.add(stack_of_memory(block.data)) : py::list(),
            "operator"_a = name_of_tag(idle ? 0 : block.tag)));
  }
  return py::dict(
      "device"_a = static_cast<int>(device), "address"_a = address(facts.start), "total_size"_a = facts.size,
      "allocated_size"_a = allocated, "active_size"_a = active, "requested_size"_a = requested, "stream"_a = facts.home,
      "segment_type"_a = facts.is_small ? "small" : "large", "segment_pool_id"_a = facts.mempool,
      "is_expandable"_a = false, "frames"_a = py::list(), "blocks"_a = blocks);
}

void add_event(py::list& trace, const MemoryEvent& event, Frames& frames) {
  static const std::array<std::vector<const char*>, 3> actions{
      {{"alloc"}, {"free_requested", "free_completed"}, {"oom"}}}; // by kind
  for (const char* action : actions.at(static_cast<size_t>(event.kind))) {
    py::dict entry(
        "action"_a = action, "addr"_a = address(event.data), "size"_a = event.size, "stream"_a = event.stream,
        "time_us"_a = event.time_us, "frames"_a = frames.add(event.stack));
    if (event.kind == MemoryEvent::Kind::kOutOfMemory) {
      entry["device_free"] = event.free;
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
  for (const auto& event : memory_events()) {
    add_event(by_device.at(static_cast<size_t>(event.device)), event, frames);
  }
  frames.fill();
  return py::dict(
      "segments"_a = segments, "device_traces"_a = traces, "allocator_settings"_a = py::dict(),
      "external_annotations"_a = py::list());
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
  std::vector<torch::CapturedTraceback*> raw;
  raw.reserve(stacks_.size());
  for (const auto& stack : stacks_) {
    raw.push_back(stack.get());
  }
  const auto named = torch::symbolize(raw);
  std::vector<pybind11::dict> all;
  all.reserve(named.all_frames.size());
  for (const auto& frame : named.all_frames) {
    all.emplace_back("filename"_a = frame.filename, "line"_a = frame.lineno, "name"_a = frame.funcname);
  }
  for (size_t i = 0; i < lists_.size(); ++i) {
    for (const auto index : named.tracebacks[i]) {
      pybind11::list(lists_[i]).append(all[index]);
    }
  }
}

uint32_t tag_of(std::string_view name) {
  if (name.empty()) {
    return 0;
  }
  // Kernel names rarely move, so the cache is keyed by address; a hit compares the text.
  constexpr size_t kPlaces = 256;
  thread_local std::array<std::pair<std::string_view, uint32_t>, kPlaces> seen{};
  auto& place = seen[(reinterpret_cast<uintptr_t>(name.data()) >> 3U) % kPlaces];
  if (place.first != name) {
    place = registered(name);
  }
  return place.second;
}

std::string name_of_tag(uint32_t tag) {
  std::lock_guard<std::mutex> lock(tags.mutex);
  return tags.names.at(tag);
}

void start_memory_history(HistoryOptions options) {
  stop_memory_history();
  std::lock_guard<std::mutex> lock(history.mutex);
  history.options = options;
  with_stacks = options.stacks;
  recording = true;
}

void stop_memory_history() {
  decltype(history.live) live; // dropped without the lock: stacks belong to Python
  decltype(history.events) events;
  std::lock_guard<std::mutex> lock(history.mutex);
  recording = false;
  live.swap(history.live);
  events.swap(history.events);
}

bool is_recording_memory() noexcept {
  return recording.load(std::memory_order_relaxed);
}

void note_memory(MemoryEvent event) {
  event.time_us = c10::getTime() / 1000;
  event.stack = with_stacks ? current_call_stack() : nullptr;
  CallStack dropped;
  MemoryEvent oldest{};
  std::lock_guard<std::mutex> lock(history.mutex);
  if (!is_recording_memory()) {
    return;
  }
  auto& [mutex, options, live, events] = history;
  if (event.kind == MemoryEvent::Kind::kAllocate) {
    dropped = std::exchange(live[event.data], event.stack);
  } else if (const auto found = live.find(event.data); found != live.end()) {
    dropped = std::move(found->second);
    live.erase(found);
  }
  if (options.events) {
    events.push_back(std::move(event));
    if (events.size() > options.most_events) {
      oldest = std::move(events.front());
      events.pop_front();
    }
  }
}

CallStack stack_of_memory(const void* data) {
  std::lock_guard<std::mutex> lock(history.mutex);
  const auto found = history.live.find(data);
  return found == history.live.end() ? nullptr : found->second;
}

std::deque<MemoryEvent> memory_events() {
  std::lock_guard<std::mutex> lock(history.mutex);
  return history.events;
}

void raise_out_of_memory(BlockPool& pool, size_t nbytes, Short whose) {
  const auto amounts = pool.amounts();
  if (is_recording_memory()) {
    note_memory({MemoryEvent::Kind::kOutOfMemory, pool.device(), nullptr, nbytes, 0, 0, amounts.left(), nullptr});
  }
  const bool of_device = whose == Short::kDevice;
  const auto held = holders(pool.segments());
  const auto list =
      c10::str("\nAllocated by tensors", of_device ? "" : " of this process", ", most first:", list_of(held), "\n");
  C10_THROW_ERROR(
      OutOfMemoryError,
      c10::str(
          SIM_TITLE " out of memory",
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
  m.def("start_memory_history", [](bool stacks, bool events, size_t most_events) {
    start_memory_history({stacks, events, most_events});
  });
  m.def("stop_memory_history", &stop_memory_history);
  m.def("memory_snapshot", &snapshot);
}

} // namespace torch_ext::sim
