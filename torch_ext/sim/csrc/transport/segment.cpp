#include "segment.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>

#include "../std.h"

namespace torch_ext::sim {
namespace {

// About 2 us: ranks outnumber cores, so the awaited rank may need this core.
constexpr int kLooks = 50;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t kFirstHeap = uint64_t{256} << 10;

uint64_t control_bytes(int size) {
  return rounded_up(kPage + kSlots * kSlotStride + static_cast<uint64_t>(size) * sizeof(uint64_t), kPage);
}

std::byte* mapped(int file, uint64_t offset, uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  TORCH_CHECK(memory != MAP_FAILED, "simccl cannot map shared memory: ", std::strerror(errno), ".");
  return static_cast<std::byte*>(memory);
}

} // namespace

void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds slice) {
  for (int look = 0; look < kLooks; ++look) {
    if (word.load(std::memory_order_acquire) != seen) {
      return;
    }
    pause_core();
  }
  timespec left{};
  left.tv_sec = static_cast<time_t>(slice.count() / 1000);
  left.tv_nsec = static_cast<long>(slice.count() % 1000) * 1000000;
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &left, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ring(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_release);
  wake(word);
}

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 // the same number on every architecture
#endif

std::shared_ptr<const Process> Process::find(pid_t pid) {
  static auto* mutex = new std::mutex(); // never freed: groups may outlive static objects
  static auto* known = new std::map<pid_t, std::weak_ptr<const Process>>();
  std::lock_guard<std::mutex> lock(*mutex);
  if (auto found = (*known)[pid].lock(); found != nullptr && !found->has_ended()) {
    return found;
  }
  const int file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (file < 0) {
    return nullptr;
  }
  auto made = std::make_shared<const Process>(pid, file);
  (*known)[pid] = made;
  return made;
}

Process::~Process() {
  ::close(file_);
}

bool Process::has_ended() const {
  pollfd entry{file_, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

uint64_t Arena::allocate(uint64_t bytes) {
  const uint64_t length = std::max(rounded_up(bytes, kCacheLine), kCacheLine);
  uint64_t offset = kCacheLine;
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

std::unique_ptr<Segment> Segment::create(int size) {
  const int file = memfd_create("simccl", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0, "simccl cannot make shared memory: ", std::strerror(errno), ".");
  auto made = std::make_unique<Segment>(file, size, /*is_own=*/true);
  TORCH_CHECK(
      ftruncate(file, static_cast<off_t>(made->control_bytes_ + kFirstHeap)) == 0,
      "simccl cannot size its shared memory: ", std::strerror(errno), ".");
  return made;
}

Segment::Segment(int file, int size, bool is_own) : file_(file), control_bytes_(control_bytes(size)) {
  control_ = mapped(file, 0, control_bytes_);
  heap_ = mapped(file, control_bytes_, kFirstHeap);
  heap_bytes_ = kFirstHeap;
  if (!is_own) {
    ::close(std::exchange(file_, -1));
  }
}

Segment::~Segment() {
  munmap(heap_, heap_bytes_);
  munmap(control_, control_bytes_);
  if (file_ >= 0) {
    ::close(file_);
  }
}

Slot& Segment::slot(uint64_t number) const {
  return *reinterpret_cast<Slot*>(control_ + kPage + number % kSlots * kSlotStride);
}

std::atomic<uint64_t>& Segment::first_letter(int to) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(control_ + kPage + kSlots * kSlotStride)[to];
}

void Segment::remap_heap(uint64_t bytes) {
  void* moved = mremap(heap_, heap_bytes_, bytes, MREMAP_MAYMOVE);
  TORCH_CHECK(moved != MAP_FAILED, "simccl cannot map more shared memory: ", std::strerror(errno), ".");
  heap_ = static_cast<std::byte*>(moved);
  heap_bytes_ = bytes;
}

std::byte* Segment::heap(uint64_t offset, uint64_t bytes) {
  const uint64_t needed = offset + bytes;
  if (needed > heap_bytes_) {
    // The owner has grown its file before it published this range. Double the mapping, so that remaps stay rare; pages
    // beyond the end of the file are mapped but not touched.
    remap_heap(std::max(2 * heap_bytes_, rounded_up(needed, kPage)));
  }
  return heap_ + offset;
}

void Segment::grow(uint64_t bytes) {
  if (bytes <= heap_bytes_) {
    return;
  }
  const uint64_t wanted = std::max(2 * heap_bytes_, rounded_up(bytes, kPage));
  TORCH_CHECK(
      ftruncate(file_, static_cast<off_t>(control_bytes_ + wanted)) == 0, "simccl cannot get ", wanted,
      " bytes of shared memory: ", std::strerror(errno), ".");
  remap_heap(wanted);
}

void Segment::discard(uint64_t offset, uint64_t bytes) {
  const uint64_t first = rounded_up(offset, kPage);
  const uint64_t last = (offset + bytes) / kPage * kPage;
  if (first < last) {
    fallocate(
        file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(control_bytes_ + first),
        static_cast<off_t>(last - first));
  }
}

} // namespace torch_ext::sim
