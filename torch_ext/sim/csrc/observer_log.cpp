#include "observer_log.h"

#include <cstddef>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernel_observer.h"

namespace torch_ext::sim {
namespace {

struct LoggedAccess {
  std::string device;
  uintptr_t address;
  size_t bytes;
  bool write;
};

struct LogEntry {
  std::string kind; // the observer's method
  std::string name;
  int device = -1;
  int64_t stream = -1;
  uint64_t moment = 0;
  uintptr_t address = 0;
  std::vector<LoggedAccess> accesses{};
  std::map<std::string, int64_t> details{};
};

class ObserverLog final : public Observer {
 public:
  void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses) noexcept override {
    LogEntry entry = on("kernel", stream);
    entry.name = name;
    entry.accesses = copied(accesses);
    add(std::move(entry));
  }
  Moment recorded(c10::Stream stream) noexcept override {
    LogEntry entry = on("recorded", stream);
    return add_moment(std::move(entry));
  }
  void stream_waits(c10::Stream stream, const Moment& moment) noexcept override {
    LogEntry entry = on("stream_waits", stream);
    entry.moment = number_of(moment);
    add(std::move(entry));
  }
  void host_knows(const Moment& moment) noexcept override {
    LogEntry entry{"host_knows_moment", ""};
    entry.moment = number_of(moment);
    add(std::move(entry));
  }
  void host_knows(c10::Stream stream) noexcept override { add(on("host_knows_stream", stream)); }
  void host_knows(c10::DeviceIndex device) noexcept override {
    LogEntry entry{"host_knows_device", ""};
    entry.device = device;
    add(std::move(entry));
  }
  void handed_out(c10::Stream stream) noexcept override { add(on("handed_out", stream)); }
  Moment launched(const Launch& launch) noexcept override {
    LogEntry entry = on("launched", launch.stream);
    entry.name = launch.name;
    entry.accesses = copied(launch.accesses);
    entry.details = {
        {"sequence", static_cast<int64_t>(launch.sequence)},
        {"peer", launch.peer},
        {"asynchronous", launch.asynchronous ? 1 : 0}};
    return add_moment(std::move(entry));
  }
  Moment joined(c10::ArrayRef<Moment> /*moments*/) noexcept override { return add_moment({"joined", ""}); }
  void allocated(const void* data, size_t bytes, c10::Stream stream) noexcept override {
    LogEntry entry = on("allocated", stream);
    entry.address = reinterpret_cast<uintptr_t>(data);
    entry.details = {{"bytes", static_cast<int64_t>(bytes)}};
    add(std::move(entry));
  }
  void freed(const void* data, c10::DeviceIndex device) noexcept override {
    LogEntry entry{"freed", ""};
    entry.device = device;
    entry.address = reinterpret_cast<uintptr_t>(data);
    add(std::move(entry));
  }
  void used_on(const void* data, c10::Stream stream) noexcept override {
    LogEntry entry = on("used_on", stream);
    entry.address = reinterpret_cast<uintptr_t>(data);
    add(std::move(entry));
  }

  std::vector<LogEntry> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(entries_, {});
  }

 private:
  static LogEntry on(const char* kind, c10::Stream stream) {
    LogEntry entry{kind, ""};
    entry.device = stream.device_index();
    entry.stream = stream.id();
    return entry;
  }
  static std::vector<LoggedAccess> copied(c10::ArrayRef<Access> accesses) {
    std::vector<LoggedAccess> copies;
    for (const auto& access : accesses) {
      copies.push_back({access.device.str(), reinterpret_cast<uintptr_t>(access.data), access.bytes, access.write});
    }
    return copies;
  }
  static uint64_t number_of(const Moment& moment) { return *static_cast<const uint64_t*>(moment.get()); }

  void add(LogEntry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  Moment add_moment(LogEntry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entry.moment = ++moments_;
    entries_.push_back(std::move(entry));
    return std::make_shared<uint64_t>(moments_);
  }

  std::mutex mutex_;
  uint64_t moments_ = 0;
  std::vector<LogEntry> entries_;
};

// Never freed: threads may be telling it something.
ObserverLog& observer_log() {
  static auto* made = new ObserverLog();
  return *made;
}

pybind11::dict described(const LogEntry& entry) {
  pybind11::dict dict;
  dict["kind"] = entry.kind;
  dict["name"] = entry.name;
  dict["device"] = entry.device;
  dict["stream"] = entry.stream;
  dict["moment"] = entry.moment;
  dict["address"] = entry.address;
  for (const auto& [name, value] : entry.details) {
    dict[name.c_str()] = value;
  }
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
    observer_log().take();
    set_observer(&observer_log());
  });
  m.def("stop_observer_log", [] {
    set_observer(nullptr);
    pybind11::list entries;
    for (const auto& entry : observer_log().take()) {
      entries.append(described(entry));
    }
    return entries;
  });
}

} // namespace torch_ext::sim
