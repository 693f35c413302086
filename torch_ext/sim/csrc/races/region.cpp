#include "region.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_ext::sim::races {
namespace {

// Sorts, and joins what overlaps or touches.
void tidy(std::vector<Range>& runs) {
  const auto starts_earlier = [](const Range& one, const Range& other) { return one.begin < other.begin; };
  if (!std::is_sorted(runs.begin(), runs.end(), starts_earlier)) {
    std::sort(runs.begin(), runs.end(), starts_earlier);
  }
  size_t kept = 0;
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].begin <= runs[kept].end) {
      runs[kept].end = std::max(runs[kept].end, runs[i].end);
    } else {
      runs[++kept] = runs[i];
    }
  }
  runs.resize(std::min(runs.size(), kept + 1));
}

} // namespace

Region::Region(uint64_t begin, uint64_t itemsize, std::span<const int64_t> sizes, std::span<const int64_t> strides)
    : begin_(begin), run_(itemsize), extent_(itemsize) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      run_ = extent_ = 0;
      dims_.clear();
      return;
    }
    if (sizes[i] > 1 && strides[i] > 0) {
      dims_.push_back({static_cast<uint64_t>(sizes[i]), static_cast<uint64_t>(strides[i]) * itemsize});
    }
  }
  std::sort(dims_.begin(), dims_.end(), [](const Dim& one, const Dim& other) { return one.stride < other.stride; });
  size_t kept = 0;
  for (const Dim dim : dims_) {
    extent_ += dim.stride * (dim.size - 1);
    if (kept == 0 && dim.stride <= run_) {
      run_ += dim.stride * (dim.size - 1);
    } else if (kept > 0 && dim.stride == dims_[kept - 1].stride * dims_[kept - 1].size) {
      dims_[kept - 1].size *= dim.size;
    } else {
      dims_[kept++] = dim;
    }
  }
  dims_.resize(kept);
}

uint64_t Region::run_count() const {
  uint64_t count = 1;
  for (const Dim& dim : dims_) {
    count *= dim.size;
  }
  return count;
}

std::vector<Range> Region::runs() const {
  if (empty()) {
    return {};
  }
  std::vector<Range> found{{begin_, begin_ + run_}};
  found.reserve(run_count());
  for (const Dim& dim : dims_) {
    const size_t inner = found.size();
    for (uint64_t i = 1; i < dim.size; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        found.push_back({found[j].begin + i * dim.stride, found[j].end + i * dim.stride});
      }
    }
  }
  tidy(found);
  return found;
}

bool Region::meets(const Region& other) const {
  if (empty() || other.empty() || !extent().meets(other.extent())) {
    return false;
  }
  if (is_one_run() && other.is_one_run()) {
    return true;
  }
  const auto mine = runs();
  const auto theirs = other.runs();
  for (size_t i = 0, j = 0; i < mine.size() && j < theirs.size();) {
    if (mine[i].meets(theirs[j])) {
      return true;
    }
    ++(mine[i].end <= theirs[j].begin ? i : j);
  }
  return false;
}

bool Region::operator==(const Region& other) const {
  return begin_ == other.begin_ && run_ == other.run_ && dims_ == other.dims_;
}

} // namespace torch_ext::sim::races
