#include "checker.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "clock.h"
#include "history.h"
#include "region.h"

namespace torch_ext::sim::races {
namespace {

// A missing wait in a loop is met again and again. Origins that are alike may still differ in where they were called
// from, so more than one race of a kind is kept.
constexpr size_t kRacesAlike = 16;

} // namespace

bool Checker::access(Memory& memory, const Region& region, Lane lane, Kind kind, uint32_t operand, OriginPtr origin) {
  if (region.empty()) {
    return false;
  }
  const Access made{lanes_.begin_access(lane), kind, memory.life, operand, std::move(origin)};
  conflicts_.clear();
  memory.history.add(region, made, lanes_.clock(lane), conflicts_);
  std::erase_if(conflicts_, [&](const Conflict& conflict) {
    return lanes_.is_host(lane) && lanes_.is_host(conflict.earlier.epoch.lane);
  });
  for (auto& conflict : conflicts_) {
    keep(
        {std::move(conflict.earlier), made, conflict.bytes, memory.life, memory.is_pinned, memory.allocated,
         memory.freed});
  }
  return !conflicts_.empty();
}

void Checker::free(Memory& memory, const std::vector<Lane>& users, OriginPtr origin) {
  for (const Lane user : users) {
    memory.history.forget(lanes_.so_far(user));
  }
  ++memory.life;
  memory.freed = std::move(origin);
}

bool Checker::is_dangerous(const Memory& memory, Lane lane, Lane host) const {
  return memory.history.is_exposed(lanes_.clock(lane), lanes_.clock(host));
}

void Checker::keep(Race race) {
  auto& kept = alike_[{race.earlier.origin->alike, race.later.origin->alike}];
  if (kept < kRacesAlike) {
    ++kept;
    races_.push_back(std::move(race));
  } else {
    ++unkept_;
  }
}

void Checker::clear_races() {
  races_.clear();
  alike_.clear();
  unkept_ = 0;
}

} // namespace torch_ext::sim::races
