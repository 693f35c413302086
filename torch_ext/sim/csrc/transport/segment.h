// A rank's shared memory, seen by its owner or by a peer: see Note [Memory of a rank].
//
// Ownership: the mapping belongs to the object; the memory to all who have mapped it, and the kernel frees it with the
// last of them, however they end. It has no name in any file system. Threading: the control area stays where it is for
// the object's life and may be read by any thread. The heap may move when it grows: hold the group's lock.
#pragma once

#include "layout.h"

namespace torch_ext::sim {

class Segment {
 public:
  // Made anew, of a group of `size` ranks. Raises RuntimeError where the kernel refuses.
  static Segment create(int size);

  // That of a peer, over an open file that this closes. Raises RuntimeError if it is too small to be one.
  static Segment open(int file, int size);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  explicit operator bool() const { return control_ != nullptr; }
  Header& header() const { return *reinterpret_cast<Header*>(control_); }
  Slot& slot(uint64_t number) const;
  std::atomic<uint64_t>& first_letter(int to) const;

  // Bytes at an offset of the heap, valid until the next call that grows it.
  std::byte* heap(uint64_t offset, uint64_t bytes);

  // The owner's: makes the heap at least `bytes` long.
  void grow(uint64_t bytes);

  // Drops the pages behind a range that is no longer used.
  void discard(uint64_t offset, uint64_t bytes);

  int file() const { return file_; } // the owner's; -1 of a peer's

 private:
  void map(int file, uint64_t heap_bytes);
  void remap_heap(uint64_t bytes);

  std::byte* control_ = nullptr;
  std::byte* heap_ = nullptr;
  uint64_t control_bytes_ = 0;
  uint64_t heap_bytes_ = 0;
  int file_ = -1;
};

} // namespace torch_ext::sim
