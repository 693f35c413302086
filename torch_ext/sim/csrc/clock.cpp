#include "clock.h"

#include "bindings.h"
#include "device.h"
#include "kernel_observer.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {

std::atomic<bool> virtual_time{false};

namespace clock {
namespace {

namespace py = pybind11;

// Longer than any program runs, short enough for 2^15 of them.
constexpr int64_t kStretch = int64_t{1} << 47;

// The constants of a profile in sim/clock/models, by name.
using Model = std::map<std::string, double>;

struct State {
  std::recursive_mutex mutex; // guards all
  std::string name;           // of the model
  Model model;
  py::object* count_flops = nullptr; // count_flops(name, reads, writes) -> int; null: no kernel has any
  std::unordered_map<std::string, double> flops;
  std::map<std::pair<int, bool>, Stamp> engines; // by device and direction: the last copy
  int64_t epoch = kEpoch;
  bool has_limits = false;
  std::vector<Work> trace;
  std::set<std::string> unknown; // names that the model lacks and that were asked for
};

State& state = *new State(); // never freed: threads may outlive static objects
using Lock = std::lock_guard<std::recursive_mutex>;

// A latency or a number that the model lacks is 0.
double constant(const std::string& name) {
  const auto found = state.model.find(name);
  return found == state.model.end() ? 0 : found->second;
}

// Nanoseconds for an amount of bytes or operations at a rate of the model, per nanosecond.
double time_of(double amount, const std::string& rate) {
  if (amount <= 0) {
    return 0;
  }
  const auto found = state.model.find(rate);
  if (found == state.model.end()) {
    state.unknown.insert(rate);
    return 0;
  }
  return amount / found->second;
}

uint64_t bytes_of(const Access& access) {
  return static_cast<uint64_t>(c10::multiply_integers(access.sizes)) * c10::elementSize(access.type);
}

// Call it without the lock, since it may wait for the GIL.
double flops_of(std::string_view name, c10::ArrayRef<Access> accesses) {
  if (state.count_flops == nullptr) {
    return 0;
  }
  std::string key(name);
  for (const auto& access : accesses) {
    key += c10::str(access.write ? '>' : '<', access.sizes);
  }
  {
    const Lock lock(state.mutex);
    if (const auto known = state.flops.find(key); known != state.flops.end()) {
      return known->second;
    }
  }
  double counted = 0;
  {
    const py::gil_scoped_acquire gil;
    std::vector<std::vector<int64_t>> reads, writes;
    for (const auto& access : accesses) {
      (access.write ? writes : reads).push_back(access.sizes.vec());
    }
    try {
      counted = (*state.count_flops)(std::string(name), reads, writes).cast<double>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the flops of a kernel");
    }
  }
  const Lock lock(state.mutex);
  return state.flops[key] = counted;
}

// The way of a copy, by the name of its rate in the model; null for a kernel.
const char* way_of(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses, bool host_reads) {
  const auto writes = [](const Access& access) { return access.write; };
  if (host_reads && std::ranges::none_of(accesses, writes)) {
    return "to_host";
  }
  for (const auto& access : accesses) {
    if (name == "aten::copy_" && access.device != stream.device()) {
      return access.device.type() == kSim ? "link" : access.write ? "to_host" : "to_device";
    }
  }
  return nullptr;
}

Work run(Work work, c10::Stream stream, int64_t lasts, Stamp* engine = nullptr) {
  const Stamp ready = std::max(end_of(stream), host_stamp());
  const Stamp free = engine == nullptr ? ready : std::max(ready, *engine);
  work.device = stream.device_index();
  work.stream = stream.id();
  work.ready = ready.at;
  work.start = free.at;
  work.end = free.at + lasts;
  work.after = free.by;
  const Stamp end{work.end, trace(work)};
  extend(stream, end);
  if (engine != nullptr) {
    *engine = end;
  }
  return work;
}

} // namespace

std::string model() {
  const Lock lock(state.mutex);
  return state.name;
}

int64_t epoch() {
  return state.epoch;
}

Span kernel(
    std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses, bool host_reads, bool is_launched) {
  const char* way = way_of(name, stream, accesses, host_reads);
  const double flops = way == nullptr ? flops_of(name, accesses) : 0;
  const Lock lock(state.mutex);
  if (is_launched) {
    host_sleeps(std::llround(constant("launch")));
  }
  uint64_t bytes = 0;
  std::string rate; // of operations, for the type of the first operand
  for (const auto& access : accesses) {
    if (way == nullptr) {
      bytes += bytes_of(access);
      rate = rate.empty() ? std::string("flops.") + c10::toString(access.type) : rate;
    } else {
      bytes = std::max(bytes, bytes_of(access));
    }
  }
  const auto amount = static_cast<double>(bytes);
  Work work{way == nullptr ? "kernel" : "copy", std::string(name)};
  work.bytes = bytes;
  if (way == nullptr) {
    const bool is_roofline = state.count_flops != nullptr;
    const double busy = is_roofline ? std::max(time_of(flops, rate), time_of(amount, "memory")) : 0;
    work = run(std::move(work), stream, std::llround(constant("kernel") + busy));
  } else {
    const bool has_engine = std::string_view(way) != "link";
    auto& engine = state.engines[{stream.device_index(), std::string_view(way) == "to_host"}];
    const auto lasts = std::llround(constant("copy") + time_of(amount, way));
    work = run(std::move(work), stream, lasts, has_engine ? &engine : nullptr);
  }
  if (host_reads) {
    host_waits(end_of(stream));
  }
  return {work.start, work.end};
}

void sleep(c10::Stream stream, int64_t nanoseconds) {
  const Lock lock(state.mutex);
  host_sleeps(std::llround(constant("launch")));
  run({"kernel", "sleep"}, stream, nanoseconds);
}

Stamp launch(c10::Stream stream, bool is_launched) {
  const Lock lock(state.mutex);
  if (is_launched) {
    host_sleeps(std::llround(constant("launch")));
  }
  return std::max(end_of(stream), host_stamp());
}

int64_t duration(Traffic traffic) {
  const Lock lock(state.mutex);
  const auto near_steps = static_cast<double>(traffic.steps - traffic.far_steps);
  const auto far_steps = static_cast<double>(traffic.far_steps);
  const double latencies = traffic.steps == 0
      ? 0
      : constant("collective") + near_steps * constant("message") + far_steps * constant("network_message");
  return std::llround(
      latencies +
      std::max(
          time_of(static_cast<double>(traffic.near), "link"), time_of(static_cast<double>(traffic.far), "network")));
}

int64_t ranks_per_node() {
  const Lock lock(state.mutex);
  return std::llround(constant("node"));
}

bool has_limits() {
  const Lock lock(state.mutex);
  return state.has_limits;
}

int64_t trace(Work work) {
  const Lock lock(state.mutex);
  state.trace.push_back(std::move(work));
  return static_cast<int64_t>(state.trace.size()) - 1;
}

void trace(int64_t number, Span span) {
  const Lock lock(state.mutex);
  if (number >= 0 && static_cast<size_t>(number) < state.trace.size()) {
    auto& work = state.trace[static_cast<size_t>(number)];
    work.start = span.start;
    work.end = span.end;
    work.peer = work.peer >= 0 ? work.peer : span.last;
    extend_lanes(static_cast<c10::DeviceIndex>(work.device), {span.end, number});
  }
}

void add_sent(int64_t number, uint64_t bytes) {
  const Lock lock(state.mutex);
  if (bytes > 0 && number >= 0 && static_cast<size_t>(number) < state.trace.size()) {
    auto& work = state.trace[static_cast<size_t>(number)];
    work.bytes += bytes;
    work.name = work.name == "recv" ? "send" : work.name;
  }
}

void host_waits(Stamp until) {
  const Lock lock(state.mutex);
  if (const auto now = host_stamp(); until.at > now.at) {
    Work wait{"host", "wait"};
    wait.ready = wait.start = now.at;
    wait.end = until.at;
    wait.after = until.by;
    trace(std::move(wait));
    move_host(until);
  }
}

void host_sleeps(int64_t nanoseconds) {
  const Lock lock(state.mutex);
  auto now = host_stamp();
  now.at += nanoseconds;
  move_host(now);
}

void poll() {
  const Lock lock(state.mutex);
  host_sleeps(std::llround(constant("poll")));
}

namespace {

void start(std::string name, Model model, py::object count_flops) {
  TORCH_CHECK(!is_virtual(), "Virtual time is on already.");
  // Nothing that was launched before may end in virtual time.
  for (c10::DeviceIndex device = 0; is_initialized() && device < device_count(); ++device) {
    synchronize_device(device);
  }
  const Lock lock(state.mutex);
  delete std::exchange(state.count_flops, count_flops.is_none() ? nullptr : new py::object(std::move(count_flops)));
  state.name = std::move(name);
  state.model = std::move(model);
  state.flops.clear();
  state.engines.clear();
  state.unknown.clear();
  state.trace.clear();
  state.epoch += kStretch;
  begin_virtual_time(state.epoch);
}

// The works from number `first` on. Their times count from the start of this stretch.
py::list works(size_t first) {
  const Lock lock(state.mutex);
  py::list list;
  for (size_t i = first; i < state.trace.size(); ++i) {
    const auto& work = state.trace[i];
    const auto since = [](int64_t moment) { return moment == 0 ? -1 : moment - state.epoch; };
    list.append(
        py::make_tuple(
            work.kind, work.name, work.device, work.stream, work.group, work.peer, work.bytes, since(work.ready),
            since(work.start), since(work.end), work.after));
  }
  return list;
}

} // namespace
} // namespace clock

void bind_clock(pybind11::module_& m) {
  m.def("start_clock", &clock::start);
  m.def("stop_clock", &end_virtual_time);
  m.def("is_clock_on", &is_virtual);
  m.def("set_clock_limits", [](bool on) { // returns the former value
    const clock::Lock lock(clock::state.mutex);
    return std::exchange(clock::state.has_limits, on);
  });
  m.def("clock_ns", [] { return host_stamp().at - clock::epoch(); });
  m.def("clock_host_sleeps", &clock::host_sleeps);
  m.def("clock_trace", &clock::works);
  m.def("clock_traced", [] {
    const clock::Lock lock(clock::state.mutex);
    return clock::state.trace.size();
  });
  m.def("clock_unknown", [] {
    const clock::Lock lock(clock::state.mutex);
    return std::exchange(clock::state.unknown, {});
  });
}

} // namespace torch_ext::sim
