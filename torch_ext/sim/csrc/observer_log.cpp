// An observer that logs every call, for tests and for inspecting a program. `torch.sim` does not use it.

#include "bindings.h"
#include "device.h"
#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

using namespace pybind11::literals;
using Numbers = std::initializer_list<std::pair<const char*, int64_t>>;

int64_t number_of(const Moment& moment) {
  return *static_cast<const int64_t*>(moment.get());
}

class ObserverLog final : public Observer {
 public:
  void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses) noexcept override {
    add("kernel", stream, {}, name, accesses);
  }
  Moment recorded(c10::Stream stream) noexcept override { return add_moment("recorded", stream); }
  void stream_waits(c10::Stream stream, const Moment& moment) noexcept override {
    add("stream_waits", stream, {{"moment", number_of(moment)}});
  }
  void host_knows(const Moment& moment) noexcept override {
    add("host_knows_moment", {}, {{"moment", number_of(moment)}});
  }
  void host_knows(c10::Stream stream) noexcept override { add("host_knows_stream", stream); }
  void host_knows(c10::DeviceIndex device) noexcept override { add("host_knows_device", {}, {{"device", device}}); }
  void handed_out(c10::Stream stream) noexcept override { add("handed_out", stream); }
  Moment launched(const Launch& launch) noexcept override {
    const auto sequence = static_cast<int64_t>(launch.sequence);
    return add_moment(
        "launched", launch.stream,
        {{"sequence", sequence}, {"peer", launch.peer}, {"asynchronous", launch.asynchronous ? 1 : 0}}, launch.name,
        launch.accesses);
  }
  Moment joined(c10::ArrayRef<Moment> /*moments*/) noexcept override { return add_moment("joined", {}); }
  void allocated(const void* data, size_t bytes, c10::Stream stream) noexcept override {
    add("allocated", stream,
        {{"address", static_cast<int64_t>(address_of(data))}, {"bytes", static_cast<int64_t>(bytes)}});
  }
  void freed(const void* data, c10::DeviceIndex device) noexcept override {
    add("freed", {}, {{"address", static_cast<int64_t>(address_of(data))}, {"device", device}});
  }
  void used_on(const void* data, c10::Stream stream) noexcept override {
    add("used_on", stream, {{"address", static_cast<int64_t>(address_of(data))}});
  }

  // With the GIL.
  std::vector<pybind11::dict> take() { return std::exchange(entries_, {}); }

 private:
  // kind: the observer's method.
  void add(
      const char* kind, std::optional<c10::Stream> stream, Numbers numbers = {}, std::string_view name = "",
      c10::ArrayRef<Access> used = {}, int64_t moment = 0) {
    const pybind11::gil_scoped_acquire with_gil;
    pybind11::list accesses;
    for (const auto& access : used) {
      accesses.append(pybind11::make_tuple(access.device.str(), address_of(access.data), access.bytes, access.write));
    }
    auto& entry = entries_.emplace_back(
        "kind"_a = kind, "name"_a = name, "accesses"_a = accesses, "moment"_a = moment, "address"_a = 0,
        "device"_a = stream.has_value() ? stream->device_index() : -1,
        "stream"_a = stream.has_value() ? stream->id() : -1);
    for (const auto& [key, value] : numbers) {
      entry[key] = value;
    }
  }
  Moment add_moment(
      const char* kind, std::optional<c10::Stream> stream, Numbers numbers = {}, std::string_view name = "",
      c10::ArrayRef<Access> used = {}) {
    const auto moment = std::make_shared<int64_t>(++moments_);
    add(kind, stream, numbers, name, used, *moment);
    return moment;
  }

  std::atomic<int64_t> moments_{0};
  std::vector<pybind11::dict> entries_; // guarded by the GIL
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
