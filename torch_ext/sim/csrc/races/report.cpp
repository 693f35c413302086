// Python's interface of the checker: start, stop, the races found, and the edges between ranks that are threads of one
// process. RaceTrace is the checker for tests: they feed it events by hand, over memory that does not exist.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include "../allocator.h"
#include "../bindings.h"
#include "../block_pool.h"
#include "../device.h"
#include "../kernel.h"
#include "../kernel_observer.h"
#include "../memory_history.h"
#include "../std.h"
#include "../stream.h"
#include "checker.h"
#include "watch.h"

namespace torch_ext::sim::races {
namespace {

bool is_checking = false; // read and written under the GIL
Observer* before = nullptr;

void start(Schedule::Kind schedule, uint64_t seed) {
  if (is_checking) {
    return;
  }
  is_checking = true;
  watch().forget();
  watch().set_schedule(schedule, seed);
  before = set_observer(&watch());
  set_danger([](const void* data, size_t size, c10::Stream stream) {
    return watch().first_danger(data, size, stream);
  });
  set_poison(PoisonFor::kRaces, true);
  begin_host_reads();
}

void stop() {
  if (!is_checking) {
    return;
  }
  is_checking = false;
  watch().set_schedule(Schedule::Kind::kEarly, 0);
  end_host_reads();
  set_poison(PoisonFor::kRaces, false);
  set_danger(nullptr);
  set_observer(before);
}

const Operation* operation_of(const OriginPtr& origin) {
  return static_cast<const Operation*>(origin.get());
}

pybind11::list frames_of(const OriginPtr& origin, Frames& frames) {
  return frames.add(origin == nullptr ? nullptr : operation_of(origin)->stack);
}

pybind11::dict described(const Access& access, Frames& frames) {
  const auto lane = watch().facts_of(access.epoch.lane);
  const auto& by = *operation_of(access.origin);
  const auto& operand = by.operands[access.operand];
  pybind11::dict dict;
  dict["operator"] = by.name;
  dict["sequence"] = by.sequence;
  dict["node"] = by.node == nullptr ? pybind11::object(pybind11::none()) : pybind11::str(*by.node);
  dict["rank"] = watch().rank_of(access);
  dict["writes"] = access.kind == Kind::kWrite;
  dict["lane"] = lane.name;
  dict["lane_kind"] = lane.device < 0 ? "host" : lane.is_stream ? "stream" : "communication";
  dict["lane_stack"] = frames.add(lane.handed_out);
  dict["dtype"] = pybind11::str(pybind11::handle(reinterpret_cast<PyObject*>(torch::getTHPDtype(operand.type))));
  dict["sizes"] = std::vector<int64_t>(operand.sizes.begin(), operand.sizes.end());
  dict["stack"] = frames.add(by.stack);
  return dict;
}

// The races found since the last call.
pybind11::list take() {
  Frames frames;
  pybind11::list races;
  for (const auto& race : watch().take()) {
    pybind11::dict dict;
    dict["earlier"] = described(race.earlier, frames);
    dict["later"] = described(race.later, frames);
    dict["begin"] = race.bytes.begin;
    dict["end"] = race.bytes.end;
    dict["reused"] = race.earlier.life != race.life;
    dict["allocated"] = frames_of(race.allocated, frames);
    dict["freed"] = frames_of(race.freed, frames);
    dict["pinned"] = race.is_pinned;
    races.append(std::move(dict));
  }
  frames.fill();
  return races;
}

using Devices = std::vector<c10::DeviceIndex>;
using Tensors = std::vector<at::Tensor>;

// Reports that a kernel `name` used `tensors`, each on the current stream of its device, or on the host for host
// tensors.
void use(const std::string& name, const Tensors& tensors, bool write) {
  std::map<c10::DeviceIndex, c10::SmallVector<sim::Access, 8>> by_device; // -1: the host
  for (const auto& tensor : tensors) {
    if (const auto access = access_to(tensor, write)) {
      by_device[access->device.type() == kSim ? access->device.index() : c10::DeviceIndex(-1)].push_back(*access);
    }
  }
  for (const auto& [device, accesses] : by_device) {
    if (device < 0) {
      watch().host_used(name, accesses);
    } else {
      watch().launch_begins(current_stream(device), accesses);
      watch().kernel(name, current_stream(device), accesses);
    }
  }
}

struct Numbered final : Origin {
  explicit Numbered(uint64_t number) : Origin(number) {}
};

OriginPtr numbered(uint64_t number) {
  return std::make_shared<Numbered>(number);
}

class Trace {
 public:
  Lane lane() { return checker_.lanes().add(); }
  size_t memory() {
    memories_.emplace_back();
    return memories_.size() - 1;
  }
  size_t record(Lane lane) {
    events_.push_back(checker_.lanes().record(lane));
    return events_.size() - 1;
  }
  bool wait(Lane lane, size_t event) {
    checker_.lanes().launch(lane);
    return checker_.lanes().wait(lane, events_.at(event));
  }
  bool access(
      Lane lane, size_t memory, bool writes, uint64_t begin, uint64_t itemsize, const std::vector<int64_t>& sizes,
      const std::vector<int64_t>& strides, uint64_t origin) {
    checker_.lanes().launch(lane);
    const auto kind = writes ? Kind::kWrite : Kind::kRead;
    return checker_.access(
        memories_.at(memory), Owner{}, Region(begin, itemsize, sizes, strides), lane, kind, 0, numbered(origin));
  }
  void free(size_t memory, const std::vector<Lane>& users) {
    checker_.free(memories_.at(memory), Owner{}, users, nullptr);
  }
  bool is_dangerous(size_t memory, Lane lane) {
    return checker_.first_danger(memories_.at(memory), Owner{}.bytes, lane).has_value();
  }
  size_t kept(size_t memory) const { return memories_.at(memory).history.size(); }

  std::vector<std::pair<uint64_t, uint64_t>> races() const {
    std::vector<std::pair<uint64_t, uint64_t>> found;
    for (const auto& race : checker_.races()) {
      found.emplace_back(race.earlier.origin->alike, race.later.origin->alike);
    }
    return found;
  }

 private:
  Checker checker_;
  std::deque<Memory> memories_;
  std::vector<Clock> events_;
};

bool regions_meet(
    const std::tuple<uint64_t, uint64_t, std::vector<int64_t>, std::vector<int64_t>>& one,
    const std::tuple<uint64_t, uint64_t, std::vector<int64_t>, std::vector<int64_t>>& other) {
  const auto region = [](const auto& view) {
    return Region(std::get<0>(view), std::get<1>(view), std::get<2>(view), std::get<3>(view));
  };
  return region(one).meets(region(other));
}

} // namespace

const std::string* current_autograd_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return nullptr;
  }
  const auto& evaluated = *node;
  const std::type_index type = typeid(evaluated);
  if (std::string_view(type.name()).find("PyNode") != std::string_view::npos) {
    return nullptr; // written in Python; its name would need the GIL
  }
  static auto* mutex = new std::mutex();
  static auto* names = new std::unordered_map<std::type_index, std::string>();
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = names->find(type);
  return found != names->end() ? &found->second : &names->emplace(type, node->name()).first->second;
}

void bind_races(pybind11::module_& m) {
  pybind11::enum_<Schedule::Kind>(m, "Schedule")
      .value("early", Schedule::Kind::kEarly)
      .value("late", Schedule::Kind::kLate)
      .value("random", Schedule::Kind::kRandom);
  m.def("start_race_check", &start, pybind11::arg("schedule") = Schedule::Kind::kEarly, pybind11::arg("seed") = 0);
  m.def("schedule_trace", [] { return watch().trace(); });
  m.def("stop_race_check", &stop);
  m.def("is_checking_races", [] { return is_checking; });
  m.def("take_races", &take);
  pybind11::class_<Handover>(m, "RaceHandover")
      .def(pybind11::init())
      .def(
          "give", [](Handover& handover, const Devices& devices) { watch().give(handover, devices); },
          pybind11::arg("devices") = Devices())
      .def(
          "take", [](const Handover& handover, const Devices& devices) { watch().take(handover, devices); },
          pybind11::arg("devices") = Devices());
  m.def("begin_rank_thread", [](int rank) { watch().begin_rank(rank); });
  m.def("end_rank_thread", [] { watch().end_rank(); });
  m.def("rank_of_thread", [] { return watch().rank_of_thread(); });
  m.def("set_unobserved", &set_unobserved);
  m.def("use_tensors", &use);
  pybind11::class_<Trace>(m, "RaceTrace")
      .def(pybind11::init())
      .def_readonly_static("HOST", &kHost)
      .def("lane", &Trace::lane)
      .def("memory", &Trace::memory)
      .def("record", &Trace::record)
      .def("wait", &Trace::wait)
      .def("access", &Trace::access)
      .def("free", &Trace::free)
      .def("is_dangerous", &Trace::is_dangerous)
      .def("kept", &Trace::kept)
      .def("races", &Trace::races);
  m.def("regions_meet", &regions_meet);
}

} // namespace torch_ext::sim::races
