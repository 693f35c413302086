#include "report.h"

#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../allocator.h"
#include "../block_pool.h"
#include "../kernel_observer.h"
#include "checker.h"
#include "history.h"
#include "host_operators.h"
#include "operation.h"
#include "python_reads.h"
#include "schedule.h"
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
  set_danger([](const void* data, c10::Stream stream) { return watch().is_dangerous(data, stream); });
  set_poison(PoisonFor::kRaces, true);
  watch_host_operators();
  watch_python_reads();
}

void stop() {
  if (!is_checking) {
    return;
  }
  is_checking = false;
  watch().set_schedule(Schedule::Kind::kEarly, 0);
  leave_python_reads();
  leave_host_operators();
  set_poison(PoisonFor::kRaces, false);
  set_danger(nullptr);
  set_observer(before);
}

const Operation* operation_of(const OriginPtr& origin) {
  return static_cast<const Operation*>(origin.get());
}

// Finds names and lines for all stacks of a report at once.
class Stacks {
 public:
  // Returns the place of the stack in what `symbolized` returns.
  pybind11::object add(const Stack& stack) {
    if (stack == nullptr) {
      return pybind11::none();
    }
    stacks_.push_back(stack);
    return pybind11::int_(stacks_.size() - 1);
  }

  // Frames as (file, line, function), innermost first.
  pybind11::list symbolized() const {
    std::vector<torch::CapturedTraceback*> raw;
    raw.reserve(stacks_.size());
    for (const auto& stack : stacks_) {
      raw.push_back(stack.get());
    }
    const auto found = torch::symbolize(raw);
    pybind11::list all;
    for (const auto& frames : found.tracebacks) {
      pybind11::list one;
      for (const uint64_t index : frames) {
        const auto& frame = found.all_frames[index];
        one.append(pybind11::make_tuple(frame.filename, frame.lineno, frame.funcname));
      }
      all.append(std::move(one));
    }
    return all;
  }

 private:
  std::vector<Stack> stacks_;
};

pybind11::object origin_stack(const OriginPtr& origin, Stacks& stacks) {
  return origin == nullptr ? pybind11::none() : stacks.add(operation_of(origin)->stack);
}

pybind11::dict described(const Access& access, const LaneFacts& lane, std::optional<int> rank, Stacks& stacks) {
  const auto& by = *operation_of(access.origin);
  const auto& operand = by.operands[access.operand];
  pybind11::dict dict;
  dict["operator"] = by.name;
  dict["sequence"] = by.sequence;
  dict["node"] = by.node == nullptr ? pybind11::object(pybind11::none()) : pybind11::str(*by.node);
  dict["rank"] = rank;
  dict["writes"] = access.kind == Kind::kWrite;
  dict["lane"] = lane.name;
  dict["lane_kind"] = lane.device < 0 ? "host" : lane.is_stream ? "stream" : "communication";
  dict["lane_stack"] = stacks.add(lane.handed_out);
  dict["dtype"] = pybind11::str(pybind11::handle(reinterpret_cast<PyObject*>(torch::getTHPDtype(operand.type))));
  dict["sizes"] = std::vector<int64_t>(operand.sizes.begin(), operand.sizes.end());
  dict["stack"] = stacks.add(by.stack);
  return dict;
}

// The races found since the last call, how many more there were like them, and
// the stacks that they name by number.
pybind11::tuple take() {
  auto [findings, more] = watch().take();
  Stacks stacks;
  pybind11::list races;
  for (const auto& finding : findings) {
    const auto& race = finding.race;
    pybind11::dict dict;
    dict["earlier"] = described(race.earlier, finding.earlier_lane, finding.earlier_rank, stacks);
    dict["later"] = described(race.later, finding.later_lane, finding.later_rank, stacks);
    dict["begin"] = race.bytes.begin;
    dict["end"] = race.bytes.end;
    dict["reused"] = race.earlier.life != race.life;
    dict["allocated"] = origin_stack(race.allocated, stacks);
    dict["freed"] = origin_stack(race.freed, stacks);
    dict["pinned"] = race.is_pinned;
    races.append(std::move(dict));
  }
  return pybind11::make_tuple(std::move(races), more, stacks.symbolized());
}

} // namespace

void bind_races(pybind11::module& m) {
  pybind11::enum_<Schedule::Kind>(m, "Schedule")
      .value("early", Schedule::Kind::kEarly)
      .value("late", Schedule::Kind::kLate)
      .value("random", Schedule::Kind::kRandom);
  m.def("start_race_check", &start, pybind11::arg("schedule") = Schedule::Kind::kEarly, pybind11::arg("seed") = 0);
  m.def("schedule_trace", [] { return watch().trace(); });
  m.def("stop_race_check", &stop);
  m.def("is_checking_races", [] { return is_checking; });
  m.def("take_races", &take);
}

} // namespace torch_ext::sim::races
