#include "kernel.h"

#include "alias.h"
#include "checks.h"
#include "clock.h"
#include "graph.h"
#include "kernel_observer.h"
#include "profiler.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

constexpr int64_t kNextByte = 1; // the stride of plain bytes

} // namespace

std::atomic<Observer*> current_observer{nullptr};
constinit thread_local bool is_unobserved = false;

std::optional<Access> access_to(const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.layout() != c10::kStrided || !tensor.has_storage()) {
    return std::nullopt;
  }
  const auto* start = static_cast<const char*>(tensor.storage().data());
  if (start == nullptr) {
    return std::nullopt;
  }
  const size_t before = static_cast<size_t>(tensor.storage_offset()) * tensor.dtype().itemsize();
  return Access{
      start + before,
      reach_of(tensor) - before,
      tensor.device(),
      tensor.scalar_type(),
      tensor.sizes(),
      tensor.strides(),
      write};
}

Kernel::Kernel(std::string_view name)
    : name_(name),
      is_timed_(is_virtual() && !is_unobserved),
      watched_(is_timed_ || observer() != nullptr || Recording::current != nullptr) {}

Kernel& Kernel::use(const at::Tensor& tensor, bool write) {
  if (!tensor.defined()) {
    return *this;
  }
  if (!is_settled_) {
    if (device_.has_value() && tensor.device() != *device_) {
      refuse_devices(*device_, tensor.device(), "an argument", name_);
    }
    device_ = tensor.device();
  }
  check_bounds(name_, tensor);
  if (watched_) {
    uses_.push_back({tensor, nullptr, 0, write});
  }
  return *this;
}

Kernel& Kernel::use(const void* data, size_t bytes, bool write) {
  if (watched_ && bytes > 0) {
    uses_.push_back({at::Tensor(), data, static_cast<int64_t>(bytes), write});
  }
  return *this;
}

c10::DeviceIndex Kernel::launch() {
  TORCH_INTERNAL_ASSERT(device_.has_value(), name_, " was launched without a device");
  if (touches_memory_) {
    if (host_reads_) {
      report_host_block(name_);
    }
    const auto stream = current_stream(device_->index());
    host_reads_ ? synchronize(stream, /*takes_time=*/!is_timed_) : catch_up(stream);
    if (auto* recording = Recording::current) {
      recording->begins(accesses());
    } else if (is_capturing() && capture_of(stream) != nullptr) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "A graph of the simulated accelerator cannot capture ", name_, ".");
    } else if (watched_) {
      notify([&](Observer& to) {
        if (to.wants_beginnings()) {
          to.kernel_begins(name_, stream, accesses());
        }
      });
    }
  }
  if (C10_UNLIKELY(is_profiling()) && touches_memory_ && Recording::current == nullptr) {
    profiled_since_ = stream_clock();
  }
  scope_.emplace(device_->index(), name_, allocations_);
  return device_->index();
}

at::Tensor Kernel::result(at::Tensor&& host) {
  at::Tensor made = adopt(std::move(host), device_->index());
  wrote(made);
  return made;
}

void Kernel::wrote(const at::Tensor& tensor) {
  if (watched_) {
    uses_.push_back({tensor, nullptr, 0, /*write=*/true});
  }
}

c10::SmallVector<Access, 8> Kernel::accesses() const {
  c10::SmallVector<Access, 8> accesses;
  for (const auto& use : uses_) {
    if (use.tensor.defined()) {
      if (const auto access = access_to(use.tensor, use.write)) {
        accesses.push_back(*access);
      }
    } else {
      accesses.push_back(
          {use.data,
           static_cast<size_t>(use.bytes),
           *device_,
           c10::ScalarType::Byte,
           {&use.bytes, 1},
           {&kNextByte, 1},
           use.write});
    }
  }
  return accesses;
}

// The device of a launched kernel is valid, so no check in the clock throws.
Kernel::~Kernel() { // NOLINT(bugprone-exception-escape)
  if (!scope_.has_value()) {
    return; // the launch was refused
  }
  scope_.reset();
  const auto stream = current_stream(device_->index());
  auto* recording = Recording::current;
  clock::Span span{profiled_since_, 0};
  if (is_timed_ && touches_memory_ && recording == nullptr) {
    span = clock::kernel(name_, stream, accesses(), host_reads_);
  }
  if (profiled_since_ != 0) {
    const int64_t end = span.end != 0 ? span.end : stream_clock();
    record_device_work({std::string(name_), device_->index(), stream.id(), span.start, end, current_correlation()});
  }
  if (!watched_ || !touches_memory_) {
    return;
  }
  if (recording != nullptr) {
    recording->used(name_, accesses());
  } else {
    notify([&](Observer& to) {
      to.kernel(name_, stream, accesses());
      if (host_reads_) {
        to.host_knows(stream);
      }
    });
  }
}

} // namespace torch_ext::sim
