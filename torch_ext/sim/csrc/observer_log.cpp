// An observer that logs every call, for tests and for inspecting a program. `torch.sim` does not use it.
#include <pybind11/stl.h>

#include "bindings.h"
#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

struct LoggedAccess {
  std::string device;
  uintptr_t address;
  size_t bytes;
  bool write;
};

struct LogEntry {
  explicit LogEntry(const char* kind, std::string_view name = "") : kind(kind), name(name) {}
  LogEntry(const char* kind, c10::Stream stream, std::string_view name = "", c10::ArrayRef<Access> used = {})
      : LogEntry(kind, name) {
    numbers["device"] = stream.device_index();
    numbers["stream"] = stream.id();
    for (const auto& access : used) {
      accesses.push_back({access.device.str(), reinterpret_cast<uintptr_t>(access.data), access.bytes, access.write});
    }
  }
  LogEntry&& with(const char* number, int64_t value) && {
    numbers[number] = value;
    return std::move(*this);
  }
  LogEntry&& with(const void* data) && { return std::move(*this).with("address", reinterpret_cast<intptr_t>(data)); }
  LogEntry&& with(const Moment& moment) && {
    return std::move(*this).with("moment", *static_cast<const int64_t*>(moment.get()));
  }

  std::string kind; // the observer's method
  std::string name;
  std::map<std::string, int64_t> numbers{{"device", -1}, {"stream", -1}, {"moment", 0}, {"address", 0}};
  std::vector<LoggedAccess> accesses;
};

class ObserverLog final : public Observer {
 public:
  void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses) noexcept override {
    add({"kernel", stream, name, accesses});
  }
  Moment recorded(c10::Stream stream) noexcept override { return add_moment({"recorded", stream}); }
  void stream_waits(c10::Stream stream, const Moment& moment) noexcept override {
    add(LogEntry("stream_waits", stream).with(moment));
  }
  void host_knows(const Moment& moment) noexcept override { add(LogEntry("host_knows_moment").with(moment)); }
  void host_knows(c10::Stream stream) noexcept override { add({"host_knows_stream", stream}); }
  void host_knows(c10::DeviceIndex device) noexcept override {
    add(LogEntry("host_knows_device").with("device", device));
  }
  void handed_out(c10::Stream stream) noexcept override { add({"handed_out", stream}); }
  Moment launched(const Launch& launch) noexcept override {
    return add_moment(
        LogEntry("launched", launch.stream, launch.name, launch.accesses)
            .with("sequence", static_cast<int64_t>(launch.sequence))
            .with("peer", launch.peer)
            .with("asynchronous", launch.asynchronous ? 1 : 0));
  }
  Moment joined(c10::ArrayRef<Moment> /*moments*/) noexcept override { return add_moment(LogEntry("joined")); }
  void allocated(const void* data, size_t bytes, c10::Stream stream) noexcept override {
    add(LogEntry("allocated", stream).with(data).with("bytes", static_cast<int64_t>(bytes)));
  }
  void freed(const void* data, c10::DeviceIndex device) noexcept override {
    add(LogEntry("freed").with(data).with("device", device));
  }
  void used_on(const void* data, c10::Stream stream) noexcept override { add(LogEntry("used_on", stream).with(data)); }

  std::vector<LogEntry> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(entries_, {});
  }

 private:
  void add(LogEntry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  Moment add_moment(LogEntry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(std::move(entry).with("moment", ++moments_));
    return std::make_shared<int64_t>(moments_);
  }

  std::mutex mutex_;
  int64_t moments_ = 0;
  std::vector<LogEntry> entries_;
};

ObserverLog& observer_log = *new ObserverLog(); // never freed: threads may be reporting to it

pybind11::dict described(const LogEntry& entry) {
  pybind11::dict dict = pybind11::cast(entry.numbers);
  dict["kind"] = entry.kind;
  dict["name"] = entry.name;
  pybind11::list accesses;
  for (const auto& access : entry.accesses) {
    accesses.append(pybind11::make_tuple(access.device, access.address, access.bytes, access.write));
  }
  dict["accesses"] = accesses;
  return dict;
}

} // namespace

void bind_observer_log(pybind11::module_& m) {
  m.def("start_observer_log", [] {
    observer_log.take();
    set_observer(&observer_log);
  });
  m.def("stop_observer_log", [] {
    set_observer(nullptr);
    pybind11::list entries;
    for (const auto& entry : observer_log.take()) {
      entries.append(described(entry));
    }
    return entries;
  });
}

} // namespace torch_ext::sim
