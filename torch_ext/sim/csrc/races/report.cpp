// Python's interface of the checker: start, stop, the races found, and the edges between ranks that are threads of one
// process.
#include <c10/util/SmallVector.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include "../allocator.h"
#include "../bindings.h"
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

// schedule: a Schedule::Kind.
void start(uint8_t schedule, uint64_t seed) {
  if (is_checking) {
    return;
  }
  is_checking = true;
  watch().forget();
  watch().set_schedule(static_cast<Schedule::Kind>(schedule), seed);
  before = set_observer(&watch());
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
  if (by.rank.has_value()) {
    dict["rank"] = *by.rank;
  } else {
    dict["rank"] = watch().rank_of(access);
  }
  dict["site"] = by.stack == nullptr ? by.site : std::string();
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
    dict["symmetric_of"] = race.symmetric_of;
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

// The checker for tests: they feed it events by hand, over memory that does not exist.
void bind_checker(pybind11::module_& m) {
  const pybind11::class_<Clock> clock(m, "RaceClock");
  pybind11::class_<Memory>(m, "RaceMemory").def(pybind11::init()).def("kept", [](const Memory& memory) {
    return memory.history.size();
  });
  pybind11::class_<Checker>(m, "RaceChecker")
      .def(pybind11::init())
      .def_readonly_static("HOST", &kHost)
      .def("lane", [](Checker& checker) { return checker.lanes().add(); })
      .def("record", [](Checker& checker, Lane lane) { return checker.lanes().record(lane); })
      .def(
          "wait",
          [](Checker& checker, Lane lane, const Clock& event) {
            checker.lanes().launch(lane);
            return checker.lanes().wait(lane, event);
          })
      .def(
          "access",
          [](Checker& checker, Lane lane, Memory& memory, bool writes, uint64_t begin, uint64_t itemsize,
             const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, uint64_t origin) {
            checker.lanes().launch(lane);
            const Region region(begin, itemsize, sizes, strides);
            const auto kind = writes ? Kind::kWrite : Kind::kRead;
            return checker.access(memory, Owner{}, region, lane, kind, 0, std::make_shared<Origin>(origin));
          })
      .def(
          "free",
          [](Checker& checker, Memory& memory, const std::vector<Lane>& users) {
            checker.free(memory, Owner{}, users, nullptr);
          })
      .def(
          "is_dangerous",
          [](const Checker& checker, const Memory& memory, Lane lane) {
            return checker.first_danger(memory, Owner{}.bytes, lane).has_value();
          })
      .def("races", [](const Checker& checker) {
        return c10::fmap(checker.races(), [](const Race& race) {
          return std::pair(race.earlier.origin->alike, race.later.origin->alike);
        });
      });
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
  m.def("start_race_check", &start);
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
  m.def("set_unobserved", [](bool unobserved) { is_unobserved = unobserved; });
  m.def("use_tensors", &use);
  m.def("host_stamp", [] {
    std::string stamp;
    notify([&](Observer& to) { stamp = to.host_stamp(); });
    return pybind11::bytes(stamp);
  });
  m.def("host_learns", [](const std::vector<std::string>& stamps) {
    Moment moment;
    notify([&](Observer& to) { moment = to.learned(stamps); });
    notify(moment, [&](Observer& to) { to.host_knows(moment); });
  });
  bind_checker(m);
}

} // namespace torch_ext::sim::races
