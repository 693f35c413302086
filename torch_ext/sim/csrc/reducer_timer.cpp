// How DistributedDataParallel times an iteration on the device, for its log: with events on the current stream, as on a
// GPU. Without it DDP warns that it keeps no times.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace c10d {
namespace {

class SimTimer : public Timer {
 public:
  explicit SimTimer(c10::Device device) : device_(device) {}

  void record(Event event) override {
    Timer::record(event); // the host's time, which DDP's log has too
    auto& at = events_[event];
    if (at == nullptr) {
      at = std::make_unique<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    at->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = events_.find(start);
    const auto to = events_.find(end);
    if (from == events_.end() || to == events_.end()) {
      return std::nullopt;
    }
    to->second->synchronize();
    const double milliseconds = from->second->elapsedTime(*to->second);
    if (milliseconds < 0) {
      return std::nullopt; // recorded in different iterations
    }
    constexpr double kNanosecondsPerMillisecond = 1e6;
    return static_cast<int64_t>(milliseconds * kNanosecondsPerMillisecond);
  }

 private:
  c10::Device device_;
  std::map<Event, std::unique_ptr<c10::Event>> events_;
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, SimTimer);

} // namespace
} // namespace c10d
