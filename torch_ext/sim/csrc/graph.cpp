#include "graph.h"

#include <torch/csrc/utils/pybind.h>

#include "alias.h"
#include "allocator.h"
#include "bindings.h"
#include "block_pool.h"
#include "blocks.h"
#include "checks.h"
#include "clock.h"
#include "device.h"
#include "generator.h"
#include "kernel_observer.h"
#include "mem_pool.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"
#include "symmetric_memory.h"

namespace torch_ext::sim {

std::atomic<int> captures_underway{0};
constinit thread_local bool is_replaying = false;

namespace {

constexpr int kGarbage = 0xff; // NaN, or -1 in integers
constexpr int64_t kStreamKeys = kStreamCount + 1;

// An error of CUDA's runtime (cudaError_t).
struct CudaError {
  int code;
  const char* name;
  const char* words;
};

constexpr CudaError kUnsupported{
    900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"};
constexpr CudaError kInvalidated{
    901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"};
constexpr CudaError kMerge{
    902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"};
constexpr CudaError kUnjoined{904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"};
constexpr CudaError kIsolation{
    905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"};
constexpr CudaError kCapturedEvent{
    907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"};

[[noreturn]] void refuse(const CudaError& error) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error.code,
      c10::str(
          kSimTitle, " error: ", error.words, "\nSearch for `", error.name,
          "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."));
}

[[noreturn]] void refuse_and_invalidate(Capture& capture) {
  capture.invalidate();
  refuse(kUnsupported);
}

int64_t key_of(c10::Stream stream) {
  return stream.device_index() * kStreamKeys + stream.id();
}

struct Captures {
  std::mutex mutex;
  std::map<int64_t, CapturePtr> by_stream;

  // The captures that `matches` holds for; each once.
  template <typename Matches>
  std::vector<CapturePtr> find(Matches matches) {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<CapturePtr> found;
    for (const auto& [key, capture] : by_stream) {
      if (matches(key, *capture)) {
        found.push_back(capture);
      }
    }
    return found;
  }
};

Captures& captures = *new Captures(); // never freed: threads may outlive static objects

std::atomic<uint64_t> next_serial{1};

void merge(StepCounts& counts, const StepCounts& others) {
  for (const auto& [key, count] : others) {
    counts[key] = std::max(counts[key], count);
  }
}

void check_unsafe_call() {
  const auto found = captures.find([](int64_t, const Capture& capture) { return capture.forbids_unsafe_calls(); });
  if (!found.empty()) {
    std::ranges::for_each(found, [](const CapturePtr& capture) { capture->invalidate(); });
    refuse(kUnsupported);
  }
}

} // namespace

CapturePtr capture_of(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(captures.mutex);
  const auto found = captures.by_stream.find(key_of(stream));
  return found == captures.by_stream.end() ? nullptr : found->second;
}

CapturePtr capture_to_wait_in(c10::Stream stream, const Event& event) {
  const auto own = capture_of(stream);
  const auto other = event.point == nullptr ? nullptr : event.point->capture.lock();
  const bool is_underway = other != nullptr && capture_of(other->origin()) == other;
  if (event.point != nullptr && !is_underway) {
    refuse(kCapturedEvent);
  }
  if (own != nullptr && own != other) {
    own->invalidate();
    refuse(other == nullptr ? kIsolation : kMerge);
  }
  return other;
}

void check_host_wait(c10::Stream stream) {
  if (is_capturing()) {
    if (const auto capture = capture_of(stream)) {
      refuse_and_invalidate(*capture);
    }
    check_unsafe_call();
  }
}

void check_host_wait(c10::DeviceIndex device) {
  if (is_capturing()) {
    const auto found = captures.find([&](int64_t key, const Capture&) { return key / kStreamKeys == device; });
    if (!found.empty()) {
      refuse_and_invalidate(*found.front());
    }
    check_unsafe_call();
  }
}

void check_host_wait(const Event& event) {
  if (event.point != nullptr) {
    if (const auto capture = event.point->capture.lock()) {
      capture->invalidate();
    }
    refuse(kCapturedEvent);
  }
  if (is_capturing()) {
    check_unsafe_call();
  }
}

Capture::Capture(c10::Stream origin, MempoolId mempool, at::GraphCaptureMode mode)
    : origin_(origin), mempool_(mempool), mode_(mode), serial_(next_serial++) {}

void Capture::check_valid() const {
  if (!is_valid_) {
    refuse(kInvalidated);
  }
}

StepCounts& Capture::counts_of(c10::Stream stream) {
  return over_[key_of(stream)];
}

void Capture::add(GraphStep step) {
  check_valid();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto key = key_of(step.stream);
  counts_of(step.stream)[key] = ++begun_[key];
  steps_.push_back(std::move(step));
}

std::shared_ptr<CapturePoint> Capture::record(c10::Stream stream) {
  check_valid();
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t slot = slots_++;
  steps_.push_back(
      {"record", stream, [slot](Slots& slots) { slots[slot] = sim::record(current_stream(current_device())); }});
  return std::make_shared<CapturePoint>(CapturePoint{weak_from_this(), slot, counts_of(stream)});
}

void Capture::wait(c10::Stream stream, const CapturePoint& point) {
  check_valid();
  {
    std::lock_guard<std::mutex> lock(captures.mutex);
    captures.by_stream.try_emplace(key_of(stream), shared_from_this());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  merge(counts_of(stream), point.over);
  steps_.push_back(
      {"wait", stream,
       [slot = point.slot](Slots& slots) { sim::wait(current_stream(current_device()), slots[slot]); }});
}

std::shared_ptr<CapturePoint> Capture::launch(
    std::string name, c10::Stream stream, bool asynchronous, std::function<Event()> run) {
  check_valid();
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t slot = slots_++;
  const int64_t lane = asynchronous ? -static_cast<int64_t>(slot) - 1 : key_of(stream);
  auto over = counts_of(stream);
  over[lane] = ++begun_[lane];
  if (!asynchronous) {
    counts_of(stream) = over;
  }
  steps_.push_back({std::move(name), stream, [slot, run = std::move(run)](Slots& slots) { slots[slot] = run(); }});
  return std::make_shared<CapturePoint>(CapturePoint{weak_from_this(), slot, std::move(over)});
}

bool Capture::owns(const void* data) const {
  const Block* block = block_at(data);
  return block != nullptr && block->capture == serial_;
}

void Capture::save(const Access& write) {
  if (owns(write.data)) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto memory = symmetric::memory_at(write.data)) {
    if (isolated_.insert(memory).second) {
      memory->isolate();
    }
    return;
  }
  size_t& known = saved_at_[write.data];
  if (known < write.bytes) {
    known = write.bytes;
    auto* start = static_cast<char*>(const_cast<void*>(write.data));
    saved_.emplace_back(start, std::string(start, write.bytes));
  }
}

void Capture::add_generator(const at::Generator& generator) {
  const auto& state = static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->state();
  std::lock_guard<std::mutex> lock(mutex_);
  generators_.emplace_back(state, state->offset);
}

void Capture::check_generator(const GeneratorState& state) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      std::ranges::any_of(generators_, [&](const auto& each) { return each.first == state; }),
      "Attempt to increase offset for a ", kSimTitle, " generator not in capture mode.");
}

bool Capture::forbids_unsafe_calls() const {
  switch (mode_) {
    case at::GraphCaptureMode::Relaxed:
      return false;
    case at::GraphCaptureMode::ThreadLocal:
      return thread_ == std::this_thread::get_id();
    default:
      return true;
  }
}

std::vector<GraphStep> Capture::end(size_t& slots) {
  {
    std::lock_guard<std::mutex> lock(captures.mutex);
    std::erase_if(captures.by_stream, [this](const auto& each) { return each.second.get() == this; });
    --captures_underway;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [start, bytes] : std::ranges::reverse_view(saved_)) {
    std::memcpy(start, bytes.data(), bytes.size());
  }
  for (const auto& memory : std::exchange(isolated_, {})) {
    memory->rejoin();
  }
  for (const auto& [state, offset] : generators_) {
    state->offset = offset;
  }
  pool_of(origin_.device_index()).fill_blocks_of(serial_, kGarbage);
  check_valid();
  for (const auto& [key, count] : begun_) {
    if (counts_of(origin_)[key] < count) {
      refuse(kUnjoined);
    }
  }
  slots = slots_;
  return std::move(steps_);
}

at::Tensor Kept::operator()(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return tensor;
  }
  if (tensor.device().type() != kSim) {
    return tensor.dim() == 0 ? tensor.clone() : tensor; // a number is passed by value
  }
  const auto& storage = tensor.storage();
  auto known = std::ranges::find_if(storages_, [&](const auto& each) { return each.first.is_alias_of(storage); });
  if (known == storages_.end()) {
    known = storages_.emplace(storages_.end(), storage, unowned_storage(storage));
  }
  return view_of(known->second, tensor);
}

void Recording::begins(c10::ArrayRef<Access> accesses) {
  for (const auto& access : accesses) {
    if (access.write) {
      capture.save(access);
    }
  }
}

void Recording::used(std::string_view name, c10::ArrayRef<Access> accesses) {
  if (step.name.empty()) {
    step.name = name;
  }
  for (const auto& access : accesses) {
    step.accesses.emplace_back(access);
  }
}

namespace {

Stack kept_by(Kept& keep, Stack values) {
  for (auto& value : values) {
    replace_tensors(value, keep);
  }
  return values;
}

// Copies what a replay computed to where the capture had its result.
void store(const c10::IValue& again, const c10::IValue& first) {
  std::vector<at::Tensor> results;
  for_each_tensor(again, [&](const at::Tensor& tensor) { results.push_back(tensor); });
  auto result = results.begin();
  for_each_tensor(first, [&](const at::Tensor& place) {
    const auto& made = *result++;
    if (place.defined() && place.numel() > 0 && place.const_data_ptr() != made.const_data_ptr()) {
      on_host(place).copy_(on_host(made));
    }
  });
}

} // namespace

void record_kernels(
    const CapturePtr& capture, c10::Stream stream, Stack arguments, Stack* results,
    const std::function<void(Stack*)>& run) {
  Recording recording{*capture, {"", stream, nullptr, /*is_kernel=*/true, {}, current_call_stack()}};
  Kept keep;
  const Stack kept = kept_by(keep, arguments);
  {
    const auto ended = c10::make_scope_exit([] { Recording::current = nullptr; });
    Recording::current = &recording;
    run(&arguments);
  }
  if (!recording.step.name.empty()) {
    recording.step.run = [run, kept, first = kept_by(keep, arguments)](Slots&) {
      Stack values = kept;
      run(&values);
      for (size_t i = 0; i < first.size(); ++i) {
        store(values[i], first[i]);
      }
    };
    capture->add(std::move(recording.step));
  }
  std::ranges::move(arguments, std::back_inserter(*results));
}

namespace {

// Runs a step on `stream`.
void run_step(const GraphStep& step, Slots& slots, c10::Stream stream) {
  const c10::StreamGuard guard(stream);
  const CallStackOf stack(step.stack);
  if (!step.is_kernel) {
    step.run(slots);
    return;
  }
  catch_up(stream); // what the stream waits for is still observed
  const auto accesses = c10::fmap(step.accesses, [](const KeptAccess& each) { return each.get(); });
  notify([&](Observer& to) {
    if (to.wants_beginnings()) {
      to.kernel_begins(step.name, stream, accesses);
    }
  });
  {
    const auto observed = c10::make_scope_exit([was = std::exchange(is_unobserved, true)] { is_unobserved = was; });
    step.run(slots);
  }
  if (is_virtual() && !is_unobserved) {
    clock::kernel(step.name, stream, accesses, /*host_reads=*/false, /*is_launched=*/false);
  }
  notify([&](Observer& to) { to.kernel(step.name, stream, accesses); });
}

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs& options = {}) : keeps_graph_(options.keep_graph) {}
  ~Graph() override { reset(); }
  C10_DISABLE_COPY_AND_ASSIGN(Graph);

  void capture_begin(MempoolId pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(
        !is_instantiated_,
        "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
    device_ = checked_index(-1);
    const auto stream = current_stream(device_);
    TORCH_CHECK(
        stream.id() != 0, kSimTitle,
        " graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on "
        "the default stream.)");
    if (const auto other = capture_of(stream)) {
      refuse_and_invalidate(*other);
    }
    mempool_ = pool == MempoolId{} ? new_mempool(/*by_user=*/false) : pool;
    capture_ = std::make_shared<Capture>(stream, mempool_, mode);
    capture_->add_generator(default_generator(device_));
    pool_of(device_).begin_capture(mempool_);
    std::lock_guard<std::mutex> lock(captures.mutex);
    captures.by_stream[key_of(stream)] = capture_;
    ++captures_underway;
  }

  void capture_end() override {
    TORCH_CHECK(capture_ != nullptr, "capture_end() called before capture_begin().");
    TORCH_CHECK(
        current_stream(checked_index(-1)) == capture_->origin(), "Capture must end on the same stream it began on.");
    end_capture();
    if (steps_.empty()) {
      TORCH_WARN(
          "The ", kSimTitle,
          " Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream.");
    }
    is_instantiated_ = !keeps_graph_;
  }

  void instantiate() override {
    TORCH_CHECK(is_captured_, "capture_end() must have been called before calling instantiate");
    TORCH_CHECK(
        !is_instantiated_ || keeps_graph_,
        "instantiate() is intended to be called by the user only when keep_graph=true");
    is_instantiated_ = true;
  }

  void replay() override {
    TORCH_CHECK(is_captured_, "Called CUDAGraph::replay without a preceding successful capture.");
    is_instantiated_ = true;
    const auto stream = current_stream(device_);
    if (const auto capture = is_capturing() ? capture_of(stream) : nullptr) {
      refuse_and_invalidate(*capture);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto ended = c10::make_scope_exit([] { is_replaying = false; });
    is_replaying = true;
    Slots slots(slots_);
    std::map<int64_t, c10::Stream> streams{{key_of(*origin_), stream}};
    for (const auto& step : steps_) {
      const auto branch = static_cast<c10::StreamId>(streams.size() - 1) % kStreamsPerClass;
      const auto [found, is_new] =
          streams.try_emplace(key_of(step.stream), stream_of(step.stream.device_index(), kFirstBranch + branch));
      run_step(step, slots, found->second);
    }
  }

  void reset() override {
    if (capture_ != nullptr) {
      try {
        end_capture();
      } catch (const c10::Error&) { // NOLINT: the graph is dropped, whatever is wrong with it
      }
    }
    if (std::exchange(is_captured_, false)) {
      steps_.clear();
      pool_of(device_).drop_graph(mempool_);
    }
    is_instantiated_ = false;
  }

  MempoolId pool() const override {
    TORCH_CHECK(is_captured_, "Called CUDAGraph::pool() without a preceding successful capture.");
    return mempool_;
  }

  void enable_debug_mode() override { is_debugged_ = true; }

  // Writes a line for each step.
  void debug_dump(const std::string& path) override {
    if (!is_debugged_ && !keeps_graph_) {
      TORCH_WARN(kSimTitle, " Graphs debug not enabled, set with [graph].enable_debug_mode()");
      return;
    }
    std::ofstream file(path);
    file << "digraph steps {\n";
    for (size_t i = 0; i < steps_.size(); ++i) {
      file << "  " << i << " [label=\"" << steps_[i].name << " on stream " << steps_[i].stream.id() << "\"]\n";
    }
    file << "}\n";
  }

 private:
  // Ends the capture that is under way. Raises as Capture::end does; then there is no graph.
  void end_capture() {
    const auto capture = std::exchange(capture_, nullptr);
    const auto ended = c10::make_scope_exit([this] {
      pool_of(device_).end_capture(mempool_);
      if (!is_captured_) {
        pool_of(device_).drop_graph(mempool_);
      }
    });
    origin_ = capture->origin();
    steps_ = capture->end(slots_);
    is_captured_ = true;
  }

  const bool keeps_graph_;
  bool is_debugged_ = false;
  bool is_captured_ = false;
  bool is_instantiated_ = false;
  c10::DeviceIndex device_ = 0;
  MempoolId mempool_{};
  CapturePtr capture_;
  std::optional<c10::Stream> origin_;
  std::vector<GraphStep> steps_;
  size_t slots_ = 0;
};

} // namespace

void bind_graphs(pybind11::module_& m) {
  m.def("graph_pool_handle", [] { return new_mempool(/*by_user=*/true); });
  m.def(
      "is_current_stream_capturing",
      [] { return is_capturing() && capture_of(current_stream(current_device())) != nullptr; },
      "Whether the current stream is in the capture of a graph.");
  m.def("capture_generator", [](const at::Generator& generator) {
    capture_of(current_stream(current_device()))->add_generator(generator);
  });
}

} // namespace torch_ext::sim

namespace at {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    GraphImplRegistry, torch_ext::sim::kIsCuda ? "CUDA" : "SIM", c10::REGISTRY_PREFERRED, torch_ext::sim::Graph);
} // namespace at
