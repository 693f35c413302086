#include "schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "clock.h"

namespace torch_ext::sim::races {
namespace {

constexpr int kPoison = 0xff; // NaN, or -1 in integers

// The finalizer of splitmix64 (Steele, Lea and Flood 2014).
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31U);
}

uint64_t digest(std::string_view text) {
  uint64_t value = 0;
  for (const char each : text) {
    value = mixed(value ^ static_cast<unsigned char>(each));
  }
  return value;
}

} // namespace

void Schedule::set(Kind kind, uint64_t seed) {
  for (auto& [block, held] : held_) {
    publish(held, nullptr);
  }
  held_.clear();
  counts_.clear();
  kind_ = kind;
  seed_ = seed;
  trace_ = 0;
}

bool Schedule::next_is_late(Lane lane, std::string_view kernel) {
  if (lane >= counts_.size()) {
    counts_.resize(size_t{lane} + 1);
  }
  const uint64_t drawn = mixed(mixed(seed_) ^ mixed((uint64_t{lane} << 32U) + counts_[lane]++));
  const bool late = kind_ == Kind::kLate || (drawn & 1U) != 0;
  trace_ = mixed(trace_ ^ digest(kernel) ^ mixed((uint64_t{lane} << 1U) | (late ? 1U : 0U)));
  return late;
}

void Schedule::hold(const std::vector<Bytes>& written, const Saved& before, Epoch epoch) {
  // Stretches may overlap: all are read before any is taken back.
  for (const auto& where : written) {
    held_[where.block].push_back({where, std::vector<char>(where.at, where.at + where.size), epoch});
  }
  for (const auto& where : written) {
    const auto known = std::find_if(before.begin(), before.end(), [&](const auto& saved) {
      return saved.first.at == where.at && saved.first.size == where.size;
    });
    if (known == before.end()) {
      std::memset(where.at, kPoison, where.size);
    }
  }
  for (const auto& [where, bytes] : before) {
    std::memcpy(where.at, bytes.data(), where.size);
  }
}

void Schedule::publish(uint64_t block, const Clock& clock) {
  const auto found = held_.find(block);
  if (found != held_.end()) {
    publish(found->second, &clock);
    if (found->second.empty()) {
      held_.erase(found);
    }
  }
}

void Schedule::publish(const Clock& clock) {
  for (auto each = held_.begin(); each != held_.end();) {
    publish(each->second, &clock);
    each = each->second.empty() ? held_.erase(each) : std::next(each);
  }
}

// Without a clock, all.
void Schedule::publish(std::vector<Held>& held, const Clock* clock) {
  std::erase_if(held, [&](const Held& each) {
    if (clock != nullptr && !clock->covers(each.epoch)) {
      return false;
    }
    std::memcpy(each.where.at, each.bytes.data(), each.where.size);
    return true;
  });
}

} // namespace torch_ext::sim::races
