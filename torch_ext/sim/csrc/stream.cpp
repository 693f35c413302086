#include "stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "allocator.h"
#include "bindings.h"
#include "clock.h"
#include "device.h"
#include "graph.h"
#include "kernel_observer.h"
#include "std.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

std::atomic<int64_t> clock_stopped_at{0}; // 0: the clock runs; in virtual time, the host's time
std::atomic<int64_t> host_waited_for{-1}; // the work whose end the host's time follows

Stamp stamp_of(const Elsewhere& one) {
  return {one.over_at(), one.number()};
}

// Whether `moment` is over. Outside of virtual time all its moments are.
bool is_past(int64_t moment) {
  return moment <= stream_clock() || (moment >= kEpoch && !is_virtual());
}

void wait_for_end(Elsewhere& one) {
  try {
    one.finish();
  } catch (...) { // the next kernel on a stream that waits for it raises
    return;
  }
}

// In virtual time, an answer "not yet" takes time, so that a loop of queries ends.
bool answer(bool done) {
  if (!done && is_virtual()) {
    clock::poll();
  }
  return done;
}

bool are_over(const Elsewheres& all) {
  if (all.empty()) {
    return true;
  }
  WithoutGil without;
  if (is_virtual()) { // the answer depends on when they end, not on whether they have done so
    std::ranges::for_each(all, [](const auto& one) { wait_for_end(*one); });
    return std::ranges::all_of(all, [](const auto& one) { return is_past(one->over_at()); });
  }
  return std::ranges::all_of(all, [](const auto& one) { return one->advance(); });
}

// Reports what a stream, or the host, learns from work elsewhere that is over.
void learn(c10::Stream stream, const Elsewhere& one) {
  const auto moment = one.learned();
  notify(moment, [&](Observer& to) { to.stream_waits(stream, moment); });
}
void host_learns(const Elsewheres& all) {
  for (const auto& one : all) {
    const auto moment = one->learned();
    notify(moment, [&](Observer& to) { to.host_knows(moment); });
  }
}

// The state of a stream.
class Track {
 public:
  std::atomic<int64_t> busy_until{0};
  std::atomic<int64_t> number{-1}; // of the work that ends then, in the trace of virtual time

  void extend(Stamp end) {
    if (end > this->end()) {
      busy_until = end.at;
      number = end.by;
    }
  }

  Stamp end() const { return {busy_until, number}; }

  bool is_waiting() const { return count_.load(std::memory_order_acquire) > 0; }

  Elsewheres waits_for() {
    if (!is_waiting()) {
      return {};
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return elsewhere_;
  }

  void wait_for(const Elsewheres& more) {
    for (const auto& one : more) {
      if (is_virtual() && one->over_at() != 0) {
        extend(stamp_of(*one));
      }
      if (one->over_at() == 0 || one->failed()) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (std::ranges::count(elsewhere_, one) == 0) {
          elsewhere_.push_back(one);
          count_.store(elsewhere_.size(), std::memory_order_release);
        }
      }
    }
  }

  // Call without the GIL.
  void catch_up(c10::Stream stream) {
    while (const auto first = oldest()) {
      const auto forgotten = c10::make_scope_exit([&] {
        forget(first);
        learn(stream, *first);
        if (is_virtual()) {
          extend(stamp_of(*first));
        }
      });
      first->finish();
    }
  }

 private:
  std::shared_ptr<Elsewhere> oldest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return elsewhere_.empty() ? nullptr : elsewhere_.front();
  }

  // The caller also owns `one`, so that its destructor does not run with the lock held.
  void forget(const std::shared_ptr<Elsewhere>& one) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase(elsewhere_, one);
    count_.store(elsewhere_.size(), std::memory_order_release);
  }

  std::mutex mutex_;
  Elsewheres elsewhere_; // guarded by mutex_, in the order of the waits
  std::atomic<size_t> count_{0};
};

struct StreamTable {
  std::array<Track, kStreamCount> tracks{};
  std::array<std::atomic<uint32_t>, kStreamClasses> handed_out{};
  Track lanes; // of groups, as one: in virtual time, the end of the last operation
};

// Never freed: threads may outlive static objects.
StreamTable& table_of(c10::DeviceIndex device) {
  static auto* tables = new std::array<StreamTable, kMaxDevices>();
  return (*tables)[static_cast<size_t>(device)];
}

Track& track_of(c10::Stream stream) {
  const auto index = checked_index(stream.device());
  const auto id = stream.id();
  TORCH_CHECK(id >= 0 && id < kStreamCount, kSimName, ":", static_cast<int>(index), " has no stream with id ", id, ".");
  return table_of(index).tracks[static_cast<size_t>(id)];
}

constexpr c10::StreamId kAtEnd = kStreamCount;

thread_local std::array<c10::StreamId, kMaxDevices> current_ids{};
thread_local const Event* end_of_operation = nullptr;

// The time when `event`, which is over, was reached.
Stamp stamp_of(const Event& event) {
  Stamp end{event.done_at, event.number};
  for (const auto& one : event.elsewhere) {
    end = std::max(end, stamp_of(*one));
  }
  return end;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous(kSim, current_device());
    set_current_device(checked_index(device));
    return previous;
  }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(checked_index(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    if (is_in_bad_fork()) {
      // Autograd calls this to make a leaf's accumulator, where an exception ends the process. The operator raises.
      return c10::Stream(c10::Stream::DEFAULT, device);
    }
    return current_stream(checked_index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(checked_index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return next_stream(checked_index(device), high_priority ? kHighestPriority : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return next_stream(checked_index(device), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    report_host_block("Stream.synchronize");
    synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(checked_index(device)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag /*flag*/)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "Event device ", static_cast<int>(device),
        " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
    if (*event == nullptr) {
      *event = new Event();
      trace([&](const auto& to) { to.trace_gpu_event_creation(kSim, address_of(*event)); });
    }
    *static_cast<Event*>(*event) = sim::record(stream);
    trace([&](const auto& to) { to.trace_gpu_event_record(kSim, address_of(*event), address_of(handle_of(stream))); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait(stream, *static_cast<Event*>(event));
      trace([&](const auto& to) { to.trace_gpu_event_wait(kSim, address_of(event), address_of(handle_of(stream))); });
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_done(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event));
      trace([&](const auto& to) { to.trace_gpu_event_synchronization(kSim, address_of(event)); });
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    if (event != nullptr) {
      trace([&](const auto& to) { to.trace_gpu_event_deletion(kSim, address_of(event)); });
    }
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    constexpr double kNanosecondsPerMillisecond = 1e6;
    const auto* start = static_cast<Event*>(first);
    const auto* end = static_cast<Event*>(second);
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(is_done(*start) && is_done(*end), "Both events must be completed before calculating elapsed time.");
    TORCH_CHECK(
        start->device == end->device,
        "Both events must be recorded on one device before calculating elapsed time, but ", "one was recorded on ",
        kSimName, ":", static_cast<int>(start->device), " and the other on ", kSimName, ":",
        static_cast<int>(end->device), ".");
    return static_cast<double>(stamp_of(*end).at - stamp_of(*start).at) / kNanosecondsPerMillisecond;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return is_capturing() && capture_of(stream) != nullptr;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }
};

// Times an iteration of DistributedDataParallel on the device, for DDP's log, by events on the current stream, as on a
// GPU. Without a timer, DDP warns that it keeps no times.
class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(c10::Device device) : device_(device) {}

  void record(c10d::Timer::Event event) override {
    Timer::record(event); // the host's time, also for DDP's log
    events_[event] = sim::record(current_stream(device_.index()));
  }

  std::optional<int64_t> measureDifference(c10d::Timer::Event start, c10d::Timer::Event end) override {
    const auto from = events_.find(start), to = events_.find(end);
    if (from == events_.end() || to == events_.end()) {
      return std::nullopt;
    }
    synchronize(from->second);
    synchronize(to->second);
    const int64_t passed = stamp_of(to->second).at - stamp_of(from->second).at;
    return passed < 0 ? std::nullopt : std::optional(passed); // recorded in different iterations
  }

 private:
  c10::Device device_;
  std::map<c10d::Timer::Event, sim::Event> events_;
};

} // namespace

void (*settle_others)() = nullptr;
std::atomic<SyncDebug> sync_debug{SyncDebug::kOff};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_ids[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  track_of(stream); // raises for a stream that does not exist
  const auto device = stream.device_index();
  const auto previous = current_stream(device);
  current_ids[device] = stream.id();
  return previous;
}

c10::Stream next_stream(c10::DeviceIndex device, int priority) {
  const c10::StreamId kind = -std::clamp(priority, kHighestPriority, 0);
  const auto turn = table_of(device).handed_out[static_cast<size_t>(kind)].fetch_add(1) % kStreamsPerClass;
  const auto stream = stream_of(device, 1 + kind * kStreamsPerClass + turn);
  notify([&](Observer& to) { to.handed_out(stream); });
  trace([&](const auto& to) { to.trace_gpu_stream_creation(kSim, address_of(handle_of(stream))); });
  return stream;
}

int priority_of(c10::StreamId id) {
  return id == 0 ? 0 : -static_cast<int>((id - 1) / kStreamsPerClass);
}

void* handle_of(c10::Stream stream) {
  return stream.id() == 0 || stream.id() == kAtEnd ? nullptr : &track_of(stream);
}

std::optional<c10::StreamId> stream_with_handle(c10::DeviceIndex device, uintptr_t handle) {
  for (c10::StreamId id = 0; id < kStreamCount; ++id) {
    if (address_of(handle_of(stream_of(device, id))) == handle) {
      return id;
    }
  }
  return std::nullopt;
}

void catch_up(c10::Stream stream) {
  auto& track = track_of(stream);
  if (track.is_waiting()) {
    WithoutGil without;
    track.catch_up(stream);
  }
}

bool is_idle(c10::Stream stream) {
  check_host_wait(stream);
  auto& track = track_of(stream);
  const auto waits_for = track.waits_for();
  const bool idle = answer(is_past(track.busy_until) && are_over(waits_for));
  if (idle) {
    host_learns(waits_for);
    notify([&](Observer& to) { to.host_knows(stream); });
  }
  return idle;
}

void synchronize(c10::Stream stream, bool takes_time) {
  check_host_wait(stream);
  catch_up(stream);
  if (takes_time) {
    sleep_until(end_of(stream));
  }
  notify([&](Observer& to) { to.host_knows(stream); });
  trace([&](const auto& to) { to.trace_gpu_stream_synchronization(kSim, address_of(handle_of(stream))); });
}

int64_t busy_until(c10::Stream stream) {
  return stream.id() == kAtEnd ? 0 : track_of(stream).busy_until.load();
}

Elsewheres pending_of(c10::Stream stream) {
  return stream.id() == kAtEnd ? Elsewheres() : track_of(stream).waits_for();
}

int64_t stream_clock() {
  if (const auto moment = clock_stopped_at.load(std::memory_order_relaxed); C10_UNLIKELY(moment != 0)) {
    return moment;
  }
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void sleep_until(Stamp moment) {
  if (is_virtual()) {
    clock::host_waits(moment);
  } else if (!is_past(moment.at)) {
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(moment.at)));
  }
}

void extend(c10::Stream stream, Stamp end) {
  track_of(stream).extend(end);
}

Stamp end_of(c10::Stream stream) {
  return track_of(stream).end();
}

void extend_lanes(c10::DeviceIndex device, Stamp end) {
  table_of(device).lanes.extend(end);
}

Stamp host_stamp() {
  return {clock_stopped_at, host_waited_for};
}

void move_host(Stamp to) {
  if (to.at > clock_stopped_at) {
    clock_stopped_at = to.at;
    host_waited_for = to.by;
  }
}

void begin_virtual_time(int64_t moment) {
  clock_stopped_at = moment;
  host_waited_for = -1;
  virtual_time = true;
}

void end_virtual_time() {
  if (!virtual_time.exchange(false)) {
    return;
  }
  clock_stopped_at = 0;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    const auto reset = [](Track& track) {
      track.busy_until = 0;
      track.number = -1;
    };
    std::ranges::for_each(table_of(device).tracks, reset);
    reset(table_of(device).lanes);
  }
}

void stop_stream_clock(int64_t moment) {
  clock_stopped_at = moment;
}

void synchronize_device(c10::DeviceIndex device) {
  check_host_wait(device);
  if (settle_others != nullptr) {
    settle_others();
  }
  Stamp until = table_of(device).lanes.end();
  for (c10::StreamId id = 0; id < kStreamCount; ++id) {
    catch_up(stream_of(device, id));
    until = std::max(until, end_of(stream_of(device, id)));
  }
  sleep_until(until);
  notify([&](Observer& to) { to.host_knows(device); });
  trace([](const auto& to) { to.trace_gpu_device_synchronization(kSim); });
}

void sleep(int64_t nanoseconds) {
  const auto stream = current_stream(checked_index(c10::DeviceIndex(-1)));
  if (const auto capture = is_capturing() ? capture_of(stream) : nullptr) {
    capture->add({"sleep", stream, [nanoseconds](Slots&) { sleep(nanoseconds); }});
    return;
  }
  catch_up(stream);
  if (is_virtual()) {
    clock::sleep(stream, nanoseconds);
    return;
  }
  auto& until = track_of(stream).busy_until;
  int64_t seen = until.load();
  while (!until.compare_exchange_weak(seen, std::max(seen, stream_clock()) + nanoseconds)) {
  }
}

Event record(c10::Stream stream) {
  if (stream.id() == kAtEnd && end_of_operation != nullptr) {
    return *end_of_operation;
  }
  if (const auto capture = is_capturing() ? capture_of(stream) : nullptr) {
    return {0, {}, {}, stream.device_index(), capture->record(stream)};
  }
  auto& track = track_of(stream);
  Event event{std::max(track.busy_until.load(), stream_clock()), track.waits_for(), {}, stream.device_index()};
  if (is_virtual()) {
    event.number = std::max(end_of(stream), host_stamp()).by;
  }
  notify([&](Observer& to) { event.moment = to.recorded(stream); });
  return event;
}

void wait(c10::Stream stream, const Event& event) {
  if (event.point != nullptr || is_capturing()) {
    if (const auto capture = capture_to_wait_in(stream, event)) {
      capture->wait(stream, *event.point);
      return;
    }
  }
  auto& track = track_of(stream);
  if (is_virtual()) {
    track.extend({event.done_at, event.number});
  } else if (!is_past(event.done_at)) {
    int64_t seen = track.busy_until;
    while (seen < event.done_at && !track.busy_until.compare_exchange_weak(seen, event.done_at)) {
    }
  }
  track.wait_for(event.elsewhere);
  notify(event.moment, [&](Observer& to) { to.stream_waits(stream, event.moment); });
  for (const auto& one : event.elsewhere) {
    learn(stream, *one); // of those that are not over, when it has caught up
  }
}

bool is_done(const Event& event) {
  check_host_wait(event);
  const bool done = answer(is_past(event.done_at) && are_over(event.elsewhere));
  if (done) {
    notify(event.moment, [&](Observer& to) { to.host_knows(event.moment); });
    host_learns(event.elsewhere);
  }
  return done;
}

void synchronize(const Event& event) {
  check_host_wait(event);
  for (const auto& one : event.elsewhere) {
    WithoutGil without;
    one->finish();
  }
  sleep_until(is_virtual() ? stamp_of(event) : Stamp{event.done_at});
  notify(event.moment, [&](Observer& to) { to.host_knows(event.moment); });
  host_learns(event.elsewhere);
}

AtEnd::AtEnd(c10::DeviceIndex device, const Event& end) : device_(device), previous_(current_ids[device]) {
  end_of_operation = &end;
  current_ids[device] = kAtEnd;
}

AtEnd::~AtEnd() {
  end_of_operation = nullptr;
  current_ids[device_] = previous_;
}

void install_guard() {
  c10::impl::registerDeviceGuard(kSim, new Guard());
}

void report_host_block(std::string_view what) {
  const auto mode = sync_debug.load(std::memory_order_relaxed);
  if (C10_LIKELY(mode == SyncDebug::kOff)) {
    return;
  }
  TORCH_CHECK(mode != SyncDebug::kError, "called a synchronizing ", kSimTitle, " operation: ", what);
  TORCH_WARN("called a synchronizing ", kSimTitle, " operation: ", what);
}

} // namespace torch_ext::sim

namespace c10d {
namespace {
// Overrides the timer of builds with CUDA's kernels.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    TimerRegistry, torch_ext::sim::kSim, c10::REGISTRY_PREFERRED, torch_ext::sim::ReducerTimer);
} // namespace
} // namespace c10d
