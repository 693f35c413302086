// The entry for all code that computes on a device.
//
// Note [Kernels]
// Code that reads or writes device memory, whether a host kernel, generated or written by hand, declares a Kernel with
// its name, its reads and its writes. The Kernel
//
//   - checks that all tensors are on one device (Note [Strict devices] in checks.cpp);
//   - checks that they lie inside their storages (Note [Bounds] in checks.h);
//   - waits for what the current stream depends on (Note [What a stream waits for] in stream.h);
//   - lets host kernels allocate from the device's pool (Note [Results in the arena]);
//   - reports to observers (kernel_observer.h) and the profiler (profiler.h).
//
// An operator that is composed of other operators on device tensors is no kernel: those operators are. It checks its
// devices with `common_device`. Views, factories and queries of sizes touch no memory and need no Kernel.
//
//     Kernel kernel("aten::convolution");
//     kernel.reads(input).reads(weight).launch();
//     return kernel.result(at::convolution(on_host(input), on_host(weight), ...));
#pragma once

#include <c10/util/SmallVector.h>

#include "allocator.h"
#include "device.h"
#include "kernel_observer.h"
#include "std.h"

namespace torch_ext::sim {

using OptionalTensor = std::optional<at::Tensor>; // none may also be an undefined tensor

inline bool given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

class Kernel {
 public:
  // name: as the operator is called; must outlive the object.
  explicit Kernel(std::string_view name);
  ~Kernel();
  C10_DISABLE_COPY_AND_ASSIGN(Kernel);

  // Declares reads and writes, in any order. Ignores undefined tensors. Before `launch`, raises RuntimeError for a
  // tensor on another device than those before it, and AcceleratorError for one whose memory is gone.
  Kernel& reads(const at::Tensor& tensor) { return use(tensor, /*write=*/false); }
  Kernel& reads(const OptionalTensor& tensor) { return tensor.has_value() ? reads(*tensor) : *this; }
  Kernel& writes(const at::Tensor& tensor) { return use(tensor, /*write=*/true); }
  Kernel& writes(const OptionalTensor& tensor) { return tensor.has_value() ? writes(*tensor) : *this; }

  // Bytes without a tensor.
  Kernel& reads(const void* data, size_t bytes) { return use(data, bytes, /*write=*/false); }
  Kernel& writes(const void* data, size_t bytes) { return use(data, bytes, /*write=*/true); }

  // Names the device, which another check has found. Tensors on other devices may follow: a copy has two.
  Kernel& on(c10::DeviceIndex device) {
    device_ = c10::Device(kSim, device);
    is_settled_ = true;
    return *this;
  }

  // Declares that the host reads the result, and so knows that the stream's work up to here is over.
  Kernel& host_reads() {
    host_reads_ = true;
    return *this;
  }

  // For views and questions about sizes: waits for nothing and reports nothing.
  Kernel& touches_nothing() {
    touches_memory_ = false;
    return *this;
  }

  // Declares that the kernel's results exist already, so that its allocations are scratch, or that all of them count:
  // see Note [Scratch memory] in allocator.h. By default they may be results.
  Kernel& allocates(Allocations what) {
    allocations_ = what;
    return *this;
  }

  // Waits for the inputs, so that the kernel's work may begin. Returns the device.
  c10::DeviceIndex launch();

  // Whether an observer or a graph gets the reads and writes.
  bool is_watched() const { return watched_; }

  // After `launch`: relabels a result that the kernel has allocated as device memory.
  at::Tensor result(at::Tensor&& host);

  // After `launch`: declares a write that was not known before.
  void wrote(const at::Tensor& tensor);

 private:
  struct Use {
    at::Tensor tensor; // undefined: bytes
    const void* data;
    int64_t bytes;
    bool write;
  };

  Kernel& use(const at::Tensor& tensor, bool write);
  Kernel& use(const void* data, size_t bytes, bool write);
  c10::SmallVector<Access, 8> accesses() const;

  std::string_view name_;
  std::optional<c10::Device> device_;
  bool is_settled_ = false; // the device was named
  bool host_reads_ = false;
  bool touches_memory_ = true;
  const bool is_timed_; // in virtual time
  const bool watched_;
  Allocations allocations_ = Allocations::kMayBeResults;
  int64_t profiled_since_ = 0;       // on the clock of streams; 0: no profiler
  std::optional<KernelScope> scope_; // since its launch
  c10::SmallVector<Use, 6> uses_;    // of tensors, only while watched
};

// The memory that `tensor` covers; none if it has no elements.
std::optional<Access> access_to(const at::Tensor& tensor, bool write);

// The kernel of operators that have no other: the host's.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace torch_ext::sim
