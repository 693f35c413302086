// Graphs: work that is captured once, and replayed at the same addresses.
//
// Note [Captures]
// While a stream is in a capture, its kernels and collectives become steps of a graph. Sizes and addresses of results
// are known only once a kernel has run, so a capture runs kernels, and undoes them at its end: memory from before the
// capture gets its bytes back, the graph's is filled with 0xff (NaN), since a GPU's would hold garbage. Writes to
// symmetric memory, which peers use meanwhile, go to a private copy of it. Collectives and signals do not run. So a
// program sees what CUDA shows: no work is done before the first replay.
//
// A step has the memory of its arguments by address, without owning it (`Kept`). A replay runs the kernels again, with
// temporary memory of the host, and copies each new result to where the result of the capture was.
//
// Note [Streams of a capture]
// A capture has the stream on which it began, and every stream that has waited for an event of it. A replay puts the
// first on the stream that is current then, and each of the others on a branch, a stream that no program has. Events
// become steps as well, so the race check sees the order within the graph, and no more.
//
// Note [Calls that a capture forbids]
// Host waits and queries that meet a capture raise and invalidate it, with CUDA's words and numbers: on its streams
// always, elsewhere as its mode says (cudaStreamCaptureMode). Memory comes from the capture's pool, whose blocks stay
// its own until its last graph is gone (block_pool.h).
#pragma once

#include <ATen/core/GraphImplInterface.h>

#include "blocks.h"
#include "generator.h"
#include "kernel_observer.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {

namespace symmetric {
class Memory;
} // namespace symmetric

// The bytes and the shape that a step uses, for the observer.
struct KeptAccess {
  explicit KeptAccess(const Access& access)
      : access(access), sizes(access.sizes.vec()), strides(access.strides.vec()) {}
  Access get() const {
    Access made = access;
    made.sizes = sizes;
    made.strides = strides;
    return made;
  }

  Access access;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

using Slots = std::vector<Event>; // the events of one replay

struct GraphStep {
  std::string name;
  c10::Stream stream;
  std::function<void(Slots&)> run;
  bool is_kernel = false; // the replay reports its accesses; other steps report themselves
  std::vector<KeptAccess> accesses{};
  CallStack stack{}; // of the capture
};

// How much of the work on each stream, and on the lane of each collective, is over.
using StepCounts = std::map<int64_t, size_t>;

// A moment of a capture that streams may wait for.
struct CapturePoint {
  std::weak_ptr<class Capture> capture;
  size_t slot;
  StepCounts over;
};

// Any thread may call it.
class Capture final : public std::enable_shared_from_this<Capture> {
 public:
  Capture(c10::Stream origin, MempoolId mempool, at::GraphCaptureMode mode);

  MempoolId mempool() const { return mempool_; }
  c10::Stream origin() const { return origin_; }
  uint64_t serial() const { return serial_; }

  void add(GraphStep step);
  std::shared_ptr<CapturePoint> record(c10::Stream stream);
  void wait(c10::Stream stream, const CapturePoint& point);
  // Adds an operation of a process group; `run` returns its end. asynchronous: whether it has a lane of its own.
  std::shared_ptr<CapturePoint> launch(
      std::string name, c10::Stream stream, bool asynchronous, std::function<Event()> run);

  // Keeps the bytes that a kernel is about to write, unless they are the graph's; isolates symmetric memory.
  void save(const Access& write);
  bool owns(const void* data) const;

  // Lets random kernels draw from `generator`; `check` raises for the states of others.
  void add_generator(const at::Generator& generator);
  void check_generator(const GeneratorState& state);

  // Whether the mode forbids the calling thread what could disturb the capture.
  bool forbids_unsafe_calls() const;
  void invalidate() { is_valid_ = false; }

  // Takes the capture's streams out of it and undoes the work. Returns the steps; raises in CUDA's words for a capture
  // that is invalid or has work that the origin has not waited for.
  std::vector<GraphStep> end(size_t& slots);

 private:
  void check_valid() const;
  StepCounts& counts_of(c10::Stream stream);

  const c10::Stream origin_;
  const MempoolId mempool_;
  const at::GraphCaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const uint64_t serial_;
  std::atomic<bool> is_valid_{true};
  std::mutex mutex_; // guards what follows
  std::vector<GraphStep> steps_;
  size_t slots_ = 0;
  StepCounts begun_;
  std::map<int64_t, StepCounts> over_; // by stream
  std::vector<std::pair<char*, std::string>> saved_;
  std::map<const void*, size_t> saved_at_;
  std::set<std::shared_ptr<symmetric::Memory>> isolated_;
  std::vector<std::pair<GeneratorState, uint64_t>> generators_; // and their offsets at the beginning
};
using CapturePtr = std::shared_ptr<Capture>;

extern std::atomic<int> captures_underway;
inline bool is_capturing() noexcept {
  return C10_UNLIKELY(captures_underway.load(std::memory_order_relaxed) > 0);
}

// The capture that `stream` is in, if any.
CapturePtr capture_of(c10::Stream stream);

// The capture in which `stream` waits for `event`; null if neither is in one. Raises AcceleratorError for two captures,
// and for an event and a stream of which only the stream is in one.
CapturePtr capture_to_wait_in(c10::Stream stream, const Event& event);

// Raise AcceleratorError where a host wait or query meets a capture. See Note [Calls that a capture forbids].
void check_host_wait(c10::Stream stream);
void check_host_wait(c10::DeviceIndex device);
void check_host_wait(const Event& event);

// True in a replay: temporary memory is the host's.
extern constinit thread_local bool is_replaying;

// Copies of tensors that own no device memory. Tensors that share a storage still do.
class Kept {
 public:
  at::Tensor operator()(const at::Tensor& tensor);

 private:
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_; // real and unowned
};

// The run, in a capture, of the kernels that make one step. Kernels that they call belong to it.
struct Recording {
  Capture& capture;
  GraphStep step; // without a name as long as it has touched no memory

  static constinit inline thread_local Recording* current = nullptr;

  void begins(c10::ArrayRef<Access> accesses);
  void used(std::string_view name, c10::ArrayRef<Access> accesses);
};

using Stack = torch::jit::Stack;

// Calls `run` with `arguments`, puts its results on `stack`, and makes the call a step of `capture`.
void record_kernels(
    const CapturePtr& capture, c10::Stream stream, Stack arguments, Stack* results,
    const std::function<void(Stack*)>& run);

// Calls `run`, which computes on memory of `device` and replaces the last `count` values of `stack` by its results. If
// the current stream is in a capture, the call becomes a step of it.
template <typename Run>
void run_kernels(c10::DeviceIndex device, size_t count, Stack* stack, const Run& run) {
  const auto current = current_stream(device);
  const auto capture = is_capturing() && Recording::current == nullptr ? capture_of(current) : CapturePtr();
  if (capture == nullptr) {
    run(stack);
  } else {
    record_kernels(capture, current, torch::jit::pop(*stack, count), stack, run);
  }
}

// Calls a function with the arguments of an operator on top of the stack, and replaces them by its results.
template <auto function>
void call_boxed(const c10::OperatorHandle& op, Stack* stack) {
  using Kernel = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(function)>, function>;
  static const auto kernel = c10::KernelFunction::makeFromUnboxedFunction(Kernel());
  kernel.callBoxed(op, c10::DispatchKeySet(), stack);
}

// An operator's kernel for the dispatcher: `function`, whose first argument is a tensor, within `run_kernels`.
template <auto function>
void captured(const c10::OperatorHandle& op, Stack* stack) {
  const auto run = [op](Stack* values) { call_boxed<function>(op, values); };
  const size_t count = op.schema().arguments().size();
  const auto& first = torch::jit::peek(*stack, 0, count).toTensor();
  if (first.defined()) {
    run_kernels(first.device().index(), count, stack, run);
  } else {
    run(stack); // an undefined gradient
  }
}

} // namespace torch_ext::sim
