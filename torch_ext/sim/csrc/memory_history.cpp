#include "memory_history.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "call_stack.h"

namespace torch_ext::sim {
namespace {

struct Tags {
  std::mutex mutex;
  std::deque<std::string> names{""}; // by number; none is ever moved
  std::unordered_map<std::string_view, uint32_t> numbers{{"", 0}};
};

// Never freed: threads may outlive static objects.
Tags& tags() {
  static auto* made = new Tags();
  return *made;
}

std::pair<std::string_view, uint32_t> registered(std::string_view name) {
  auto& all = tags();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.numbers.find(name);
  if (found == all.numbers.end()) {
    const auto& kept = all.names.emplace_back(name);
    found = all.numbers.emplace(kept, static_cast<uint32_t>(all.names.size() - 1)).first;
  }
  return *found;
}

struct History {
  std::mutex mutex; // guards what follows
  HistoryOptions options{};
  std::unordered_map<const void*, CallStack> live;
  std::deque<MemoryEvent> events;
};

History& history() {
  static auto* made = new History();
  return *made;
}

std::atomic<bool> recording{false};
std::atomic<bool> with_stacks{false};

int64_t now_us() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

} // namespace

uint32_t tag_of(std::string_view name) {
  if (name.empty()) {
    return 0;
  }
  // Names of kernels stay where they are, so where one lies finds it; that it is still the same is checked.
  constexpr size_t kPlaces = 256;
  thread_local std::array<std::pair<std::string_view, uint32_t>, kPlaces> seen{};
  auto& place = seen[(reinterpret_cast<uintptr_t>(name.data()) >> 3U) % kPlaces];
  if (place.first != name) {
    place = registered(name);
  }
  return place.second;
}

std::string name_of_tag(uint32_t tag) {
  auto& all = tags();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.names.at(tag);
}

void start_memory_history(HistoryOptions options) {
  stop_memory_history();
  std::lock_guard<std::mutex> lock(history().mutex);
  history().options = options;
  with_stacks = options.stacks;
  recording = true;
}

void stop_memory_history() {
  // Out of the lock: stacks belong to Python.
  std::unordered_map<const void*, CallStack> live;
  std::deque<MemoryEvent> events;
  std::lock_guard<std::mutex> lock(history().mutex);
  recording = false;
  live.swap(history().live);
  events.swap(history().events);
}

bool is_recording_memory() noexcept {
  return recording.load(std::memory_order_relaxed);
}

void note_memory(MemoryEvent event) {
  event.time_us = now_us();
  event.stack = with_stacks ? current_call_stack() : nullptr;
  CallStack dropped;
  MemoryEvent oldest{};
  std::lock_guard<std::mutex> lock(history().mutex);
  if (!is_recording_memory()) {
    return;
  }
  auto& [mutex, options, live, events] = history();
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
  std::lock_guard<std::mutex> lock(history().mutex);
  const auto found = history().live.find(data);
  return found == history().live.end() ? nullptr : found->second;
}

std::deque<MemoryEvent> memory_events() {
  std::lock_guard<std::mutex> lock(history().mutex);
  return history().events;
}

} // namespace torch_ext::sim
