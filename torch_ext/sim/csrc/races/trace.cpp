#include "trace.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "checker.h"
#include "clock.h"
#include "history.h"
#include "region.h"

namespace torch_ext::sim::races {
namespace {

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
        memories_.at(memory), Region(begin, itemsize, sizes, strides), lane, kind, 0, numbered(origin));
  }
  void free(size_t memory, const std::vector<Lane>& users) { checker_.free(memories_.at(memory), users, nullptr); }
  bool is_dangerous(size_t memory, Lane lane) { return checker_.is_dangerous(memories_.at(memory), lane); }
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

void bind_trace(pybind11::module& m) {
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
