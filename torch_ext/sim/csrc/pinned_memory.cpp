// Pinned host memory. Nothing is locked in RAM; the allocator only records the ranges, so that `is_pinned` is right,
// also for interior pointers.
#include "pinned_memory.h"

#include <ATen/core/CachingHostAllocator.h>

#include "bindings.h"
#include "device.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kPageBytes = 4096;

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    ensure_initialized();
    if (nbytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, posix_memalign(&data, kPageBytes, nbytes) == 0, "Cannot pin ", nbytes,
        " bytes of host memory.");
    add(data, nbytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  std::optional<PinnedBlock> find(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto* wanted = static_cast<const char*>(pointer);
    auto after = ranges_.upper_bound(wanted);
    if (after == ranges_.begin()) {
      return std::nullopt;
    }
    const auto& [start, range] = *std::prev(after);
    return wanted < start + range.nbytes ? std::make_optional(PinnedBlock{start, range.serial}) : std::nullopt;
  }

  uint64_t made() const { return made_.load(std::memory_order_relaxed); }

  // Copies are finished when the call that starts them returns, so memory never has to wait for an event.
  bool record_event(void* pointer, void* /*context*/, c10::Stream /*stream*/) override {
    return find(pointer).has_value();
  }
  // Does nothing: freed ranges go straight back to the host, without a cache.
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override { reset(&at::Stat::reset_accumulated); }
  void reset_peak_stats() override { reset(&at::Stat::reset_peak); }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  static void release(void* data);

  void reset(void (at::Stat::*by)()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (at::Stat* stat :
         {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes}) {
      (stat->*by)();
    }
  }

  void add(void* data, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[static_cast<const char*>(data)] = {nbytes, ++made_};
    stats_.active_requests.increase(1);
    stats_.allocations.increase(1);
    stats_.active_bytes.increase(nbytes);
    stats_.allocated_bytes.increase(nbytes);
    stats_.num_host_alloc += 1;
  }

  void remove(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranges_.find(static_cast<const char*>(data));
    stats_.active_requests.decrease(1);
    stats_.allocations.decrease(1);
    stats_.active_bytes.decrease(found->second.nbytes);
    stats_.allocated_bytes.decrease(found->second.nbytes);
    stats_.num_host_free += 1;
    ranges_.erase(found);
  }

  struct PinnedRange {
    size_t nbytes;
    uint64_t serial;
  };

  std::mutex mutex_;
  std::map<const char*, PinnedRange> ranges_;
  std::atomic<uint64_t> made_{0};
  at::HostStats stats_;
};

PinnedAllocator& pinned = *new PinnedAllocator(); // never freed: torch keeps it

void PinnedAllocator::release(void* data) {
  pinned.remove(data);
  std::free(data);
}

} // namespace

c10::Allocator* pinned_allocator() {
  return &pinned;
}

std::optional<PinnedBlock> pinned_block_at(const void* pointer) {
  return pinned.find(pointer);
}

uint64_t pinned_blocks_made() {
  return pinned.made();
}

void bind_pinned_memory(pybind11::module_& m) {
  m.def("pinned_memory_stats", [] {
    using namespace pybind11::literals;
    const auto stats = pinned.get_stats();
    const auto as_dict = [](const at::Stat& stat) {
      return pybind11::dict(
          "current"_a = stat.current, "peak"_a = stat.peak, "allocated"_a = stat.allocated, "freed"_a = stat.freed);
    };
    return pybind11::dict(
        "active_requests"_a = as_dict(stats.active_requests), "active_bytes"_a = as_dict(stats.active_bytes),
        "allocations"_a = as_dict(stats.allocations), "allocated_bytes"_a = as_dict(stats.allocated_bytes),
        "num_host_alloc"_a = stats.num_host_alloc, "num_host_free"_a = stats.num_host_free);
  });
  m.def("reset_accumulated_pinned_memory_stats", [] { pinned.reset_accumulated_stats(); });
  m.def("reset_peak_pinned_memory_stats", [] { pinned.reset_peak_stats(); });
}

void install_pinned_allocator() {
  at::setHostAllocator(kSim, &pinned, /*priority=*/1); // overrides the one of builds with CUDA's kernels
}

} // namespace torch_ext::sim
