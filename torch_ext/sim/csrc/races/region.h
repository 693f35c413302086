// The bytes of a block that a view reaches, exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_ext::sim::races {

// Bytes from `begin` to before `end`, counted from the start of a block.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;

  bool empty() const { return begin >= end; }
  bool meets(Range other) const { return begin < other.end && other.begin < end; }
  bool contains(Range other) const { return begin <= other.begin && other.end <= end; }
  bool operator==(const Range&) const = default;
};

// Runs of equal length at regular distances, over any number of dimensions. Most views are one run: then no memory is
// allocated and every question is a compare.
class Region {
 public:
  Region(uint64_t begin, uint64_t nbytes) : begin_(begin), run_(nbytes), extent_(nbytes) {}

  // The elements of a view: `begin` is the first one's byte, `strides` count elements and are not negative.
  Region(uint64_t begin, uint64_t itemsize, std::span<const int64_t> sizes, std::span<const int64_t> strides);

  bool empty() const { return extent_ == 0; }
  bool is_one_run() const { return dims_.empty(); }
  uint64_t run_count() const;

  // From the first byte to the last, whatever lies between.
  Range extent() const { return {begin_, begin_ + extent_}; }

  // In order, none of them touching another.
  std::vector<Range> runs() const;

  // Whether both reach some byte. Compares run by run where the extents meet.
  bool meets(const Region& other) const;

  bool operator==(const Region& other) const;

 private:
  struct Dim {
    uint64_t size;
    uint64_t stride; // bytes
    bool operator==(const Dim&) const = default;
  };

  uint64_t begin_;
  uint64_t run_; // bytes
  uint64_t extent_;
  std::vector<Dim> dims_; // by rising stride
};

} // namespace torch_ext::sim::races
