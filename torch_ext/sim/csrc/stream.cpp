#include "stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "allocator.h"
#include "device.h"

namespace torch_ext::sim {
namespace {

struct StreamTable {
  std::array<std::atomic<int64_t>, kStreamCount> horizons{};
  std::array<std::atomic<uint32_t>, kStreamClasses> handed_out{};
};

std::array<StreamTable, kMaxDevices> tables;
void (*settle_others)() = nullptr;
thread_local std::array<c10::StreamId, kMaxDevices> current_ids{};

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void sleep_until(int64_t moment) {
  const int64_t left = moment - now();
  if (left > 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(left));
  }
}

std::atomic<int64_t>& horizon(c10::Stream stream) {
  const auto index = checked_index(stream.device());
  const auto id = stream.id();
  TORCH_CHECK(id >= 0 && id < kStreamCount, "sim:", static_cast<int>(index), " has no stream with id ", id, ".");
  return tables[index].horizons[id];
}

void raise_to(std::atomic<int64_t>& value, int64_t minimum) {
  int64_t seen = value.load();
  while (seen < minimum && !value.compare_exchange_weak(seen, minimum)) {
  }
}

c10::Stream make(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
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

  c10::Stream getStream(c10::Device device) const override { return current_stream(checked_index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(checked_index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return next_stream(checked_index(device), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return next_stream(checked_index(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &horizon(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(checked_index(device)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag /*flag*/)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "Event device ", static_cast<int>(device),
        " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
    if (*event == nullptr) {
      *event = new Event();
    }
    *static_cast<Event*>(*event) = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait(stream, *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_done(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    constexpr double kNanosecondsPerMillisecond = 1e6;
    const auto* start = static_cast<Event*>(first);
    const auto* end = static_cast<Event*>(second);
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(is_done(*start) && is_done(*end), "Both events must be completed before calculating elapsed time.");
    return static_cast<double>(end->done_at - start->done_at) / kNanosecondsPerMillisecond;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }
};

} // namespace

c10::Stream default_stream(c10::DeviceIndex device) {
  return make(device, 0);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return make(device, current_ids[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  horizon(stream); // refuses a stream that does not exist
  const auto device = stream.device_index();
  const auto previous = current_stream(device);
  current_ids[device] = stream.id();
  return previous;
}

c10::Stream next_stream(c10::DeviceIndex device, bool high_priority) {
  const c10::StreamId kind = high_priority ? 1 : 0;
  const auto turn = tables[device].handed_out[kind].fetch_add(1) % kStreamsPerClass;
  const auto stream = make(device, 1 + kind * kStreamsPerClass + turn);
  tell([&](Observer& to) { to.handed_out(stream); });
  return stream;
}

bool is_idle(c10::Stream stream) {
  const bool idle = horizon(stream) <= now();
  if (idle) {
    tell([&](Observer& to) { to.host_knows(stream); });
  }
  return idle;
}

void synchronize(c10::Stream stream) {
  sleep_until(horizon(stream));
  tell([&](Observer& to) { to.host_knows(stream); });
}

int64_t busy_until(c10::Stream stream) {
  return horizon(stream);
}

int64_t stream_clock() {
  return now();
}

void set_settle(void (*settle)()) {
  settle_others = settle;
}

void synchronize_device(c10::DeviceIndex device) {
  if (settle_others != nullptr) {
    settle_others();
  }
  const auto& horizons = tables[device].horizons;
  sleep_until(*std::max_element(horizons.begin(), horizons.end()));
  tell([&](Observer& to) { to.host_knows(device); });
}

void sleep(int64_t nanoseconds) {
  auto& until = horizon(current_stream(checked_index(c10::DeviceIndex(-1))));
  int64_t seen = until.load();
  while (!until.compare_exchange_weak(seen, std::max(seen, now()) + nanoseconds)) {
  }
}

Event record(c10::Stream stream) {
  Event event{std::max(horizon(stream).load(), now())};
  tell([&](Observer& to) { event.moment = to.recorded(stream); });
  return event;
}

void wait(c10::Stream stream, const Event& event) {
  raise_to(horizon(stream), event.done_at);
  tell(event.moment, [&](Observer& to) { to.stream_waits(stream, event.moment); });
}

bool is_done(const Event& event) {
  const bool done = event.done_at <= now();
  if (done) {
    tell(event.moment, [&](Observer& to) { to.host_knows(event.moment); });
  }
  return done;
}

void synchronize(const Event& event) {
  sleep_until(event.done_at);
  tell(event.moment, [&](Observer& to) { to.host_knows(event.moment); });
}

void install_guard() {
  c10::impl::registerDeviceGuard(kSim, new Guard());
}

} // namespace torch_ext::sim
