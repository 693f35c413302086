// An observer that logs kernels, operations and edges, for tests and for inspecting a program. `torch.sim` does not use
// it.
#include "bindings.h"
#include "device.h"
#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

using LoggedAccess = std::tuple<std::string, uintptr_t, size_t, bool>; // device, address, bytes, whether it writes

// The observer's method, a kernel's or an operation's name, device and stream (-1: none), the number of a moment (0:
// none), accesses. Without Python's objects: a callback must not take the GIL.
using LogEntry = std::tuple<std::string, std::string, int64_t, int64_t, int64_t, std::vector<LoggedAccess>>;

class ObserverLog final : public Observer {
 public:
  void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses) noexcept override {
    add("kernel", stream.device_index(), stream.id(), nullptr, name, accesses);
  }
  Moment recorded(c10::Stream stream) noexcept override {
    return add("recorded", stream.device_index(), stream.id(), new_moment());
  }
  void stream_waits(c10::Stream stream, const Moment& moment) noexcept override {
    add("stream_waits", stream.device_index(), stream.id(), moment);
  }
  void host_knows(const Moment& moment) noexcept override { add("host_knows_moment", -1, -1, moment); }
  void host_knows(c10::Stream stream) noexcept override {
    add("host_knows_stream", stream.device_index(), stream.id(), nullptr);
  }
  void host_knows(c10::DeviceIndex device) noexcept override { add("host_knows_device", device, -1, nullptr); }
  Moment launched(const Launch& launch) noexcept override {
    const auto stream = launch.stream;
    return add("launched", stream.device_index(), stream.id(), new_moment(), launch.name, launch.accesses);
  }
  Moment joined(c10::ArrayRef<Moment> /*moments*/) noexcept override { return new_moment(); }

  std::vector<LogEntry> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(entries_, {});
  }

 private:
  Moment new_moment() { return std::make_shared<int64_t>(++moments_); }

  Moment add(
      const char* kind, int64_t device, int64_t stream, Moment moment, std::string_view name = "",
      c10::ArrayRef<Access> used = {}) {
    const int64_t number = moment == nullptr ? 0 : *static_cast<const int64_t*>(moment.get());
    const auto accesses = c10::fmap(used, [](const Access& access) {
      return LoggedAccess(access.device.str(), address_of(access.data), access.bytes, access.write);
    });
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.emplace_back(kind, name, device, stream, number, accesses);
    return moment;
  }

  std::atomic<int64_t> moments_{0};
  std::mutex mutex_;
  std::vector<LogEntry> entries_;
};

ObserverLog& observer_log = *new ObserverLog(); // never freed: threads may be reporting to it

} // namespace

void bind_observer_log(pybind11::module_& m) {
  m.def("start_observer_log", [] {
    observer_log.take();
    set_observer(&observer_log);
  });
  m.def("stop_observer_log", [] {
    set_observer(nullptr);
    return observer_log.take();
  });
}

} // namespace torch_ext::sim
