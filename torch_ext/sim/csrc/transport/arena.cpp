#include "arena.h"

#include <algorithm>
#include <cstdint>

namespace torch_ext::sim {

uint64_t Arena::allocate(uint64_t bytes) {
  const uint64_t length = std::max((bytes + kAlign - 1) / kAlign * kAlign, kAlign);
  uint64_t offset = kAlign;
  for (const auto& [start, used] : used_) {
    if (start - offset >= length) {
      break;
    }
    offset = start + used;
  }
  used_.emplace(offset, length);
  high_water_ = std::max(high_water_, offset + length);
  return offset;
}

uint64_t Arena::free(uint64_t offset) {
  const auto found = used_.find(offset);
  const uint64_t length = found->second;
  used_.erase(found);
  return length;
}

} // namespace torch_ext::sim
