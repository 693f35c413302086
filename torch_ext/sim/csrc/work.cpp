#include "work.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "allocator.h"
#include "bindings.h"
#include "clock.h"
#include "device.h"
#include "graph.h"
#include "kernel_observer.h"
#include "profiler.h"
#include "std.h"
#include "stream.h"
#include "transport/transport.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

struct Record {
  std::mutex mutex;
  std::deque<RecordedOperation> collectives, transfers;
};

Record& flight_record = *new Record(); // never freed: groups may outlive static objects

// Reads the size as torch's recorder does.
size_t capacity() {
  constexpr int kDefault = 2000;
  static const int entries = c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, kDefault);
  return static_cast<size_t>(std::max(entries, 0));
}

std::exception_ptr backend_error(const std::string& why) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why));
}

// For _flight_record.py.
pybind11::dict as_dict(const RecordedOperation& operation) {
  using namespace pybind11::literals;
  const auto sizes = [](const Shape& shape) { return shape.sizes; };
  const auto type = [](const Shape& shape) { return std::string(c10::toString(shape.type)); };
  return pybind11::dict(
      "name"_a = operation.name, "group"_a = operation.group, "description"_a = operation.description,
      "sequence"_a = operation.sequence, "input_sizes"_a = c10::fmap(operation.inputs, sizes),
      "input_dtypes"_a = c10::fmap(operation.inputs, type), "output_sizes"_a = c10::fmap(operation.outputs, sizes),
      "output_dtypes"_a = c10::fmap(operation.outputs, type), "begun_ns"_a = operation.progress->begun(),
      "finished_ns"_a = operation.progress->finished(), "peer"_a = operation.peer);
}

} // namespace

Progress::Progress(const std::vector<std::shared_ptr<Transfer>>& transfers)
    : begun_(c10::getTime()), transfers_(transfers.begin(), transfers.end()) {}

void Progress::finish() {
  int64_t never = 0;
  finished_.compare_exchange_strong(never, c10::getTime());
}

int64_t Progress::finished() {
  const auto is_over = [](const std::weak_ptr<Transfer>& weak) {
    const auto transfer = weak.lock();
    return transfer == nullptr || transfer->advance();
  };
  if (finished_ == 0 && std::all_of(transfers_.begin(), transfers_.end(), is_over)) {
    finish();
  }
  return finished_;
}

void Progress::fail(const std::exception_ptr& why) {
  for (const auto& weak : transfers_) {
    if (const auto transfer = weak.lock()) {
      transfer->abort(why);
    }
  }
}

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, [](const at::Tensor& tensor) { return Shape{tensor.sizes().vec(), tensor.scalar_type()}; });
}

void record_operation(RecordedOperation operation) {
  std::lock_guard<std::mutex> lock(flight_record.mutex);
  auto& operations = operation.peer >= 0 ? flight_record.transfers : flight_record.collectives;
  operations.push_back(std::move(operation));
  while (operations.size() > capacity()) {
    operations.pop_front();
  }
}

void bind_flight_record(pybind11::module_& m) {
  const auto read = [](std::deque<RecordedOperation> Record::* kind) {
    return [kind] {
      std::deque<RecordedOperation> operations;
      {
        WithoutGil without;
        {
          std::lock_guard<std::mutex> lock(flight_record.mutex);
          operations = flight_record.*kind;
        }
        for (const auto& operation : operations) {
          operation.progress->finished();
        }
      }
      pybind11::list dicts;
      for (const auto& operation : operations) {
        dicts.append(as_dict(operation));
      }
      return dicts;
    };
  };
  m.def("recorded_operations", read(&Record::collectives));
  m.def("recorded_transfers", read(&Record::transfers));
  m.def("fail_operation", [](const std::string& group, uint64_t sequence, bool is_transfer, const std::string& why) {
    WithoutGil without;
    ProgressPtr found;
    {
      std::lock_guard<std::mutex> lock(flight_record.mutex);
      for (const auto& operation : is_transfer ? flight_record.transfers : flight_record.collectives) {
        found = operation.group == group && operation.sequence == sequence ? operation.progress : found;
      }
    }
    if (found != nullptr) {
      found->fail(backend_error(why));
    }
  });
}

Running::Running(
    c10d::OpType kind, const char* name, int rank, uint64_t sequence, std::vector<TransferPtr> transfers,
    std::vector<at::Tensor> held, int64_t traced)
    : kind_(kind),
      name_(name),
      rank_(rank),
      sequence_(sequence),
      transfers_(std::move(transfers)),
      traced_(traced),
      device_(held.empty() ? c10::DeviceIndex(-1) : held.front().device().index()),
      held_(std::move(held)) {}

void Running::report_to(CompletionHook hook, ProgressPtr record, bool timed) {
  hook_ = std::move(hook);
  record_ = std::move(record);
  is_timed_ = timed;
}

std::exception_ptr Running::why() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

// The time of all transfers, which run one after another or side by side. A failed one lasts no time.
clock::Span Running::span() const {
  clock::Span all{std::numeric_limits<int64_t>::max(), started_};
  for (const auto& transfer : transfers_) {
    const auto one = transfer->span();
    if (one.start != 0) {
      all = {std::min(all.start, one.start), std::max(all.end, one.end), one.last};
    }
  }
  all.start = std::min(all.start, all.end);
  return all;
}

void Running::end(const std::exception_ptr& why) {
  std::vector<std::string> stamps;
  for (const auto& transfer : transfers_) {
    std::ranges::move(transfer->stamps(), std::back_inserter(stamps));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_over()) {
      return;
    }
    why_ = why;
    if (!stamps.empty()) {
      notify([&](Observer& to) { learned_ = to.learned(stamps); });
    }
    if (is_timed_by_model_) {
      const auto times = span();
      started_ = times.start;
      clock::trace(traced_, times);
      over_at_ = times.end;
    } else {
      over_at_ = stream_clock();
    }
  }
  report_to_profiler();
  if (record_ != nullptr) {
    record_->finish();
  }
  if (hook_) {
    using TimePoint = std::chrono::steady_clock::time_point;
    const std::chrono::nanoseconds began(started_.load()), ended(over_at_.load());
    try {
      hook_(std::make_shared<c10d::WorkInfo>(kind_, sequence_, TimePoint(began), TimePoint(ended), ended - began));
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      why_ = why_ ? why_ : std::current_exception();
    }
  }
}

void Running::report_to_profiler() const {
  if (is_profiling() && device_ >= 0 && launched_by_ != 0) {
    record_device_work({c10::str(kSimBackend, ":", name_), device_, kLaneRow, started_, over_at_, launched_by_});
  }
}

float Running::duration() const {
  TORCH_CHECK(is_timed_, "getDuration only works if timing was enabled");
  TORCH_CHECK(is_over(), "Both events must be completed before calculating elapsed time.");
  return static_cast<float>(over_at_ - started_) / 1e6F;
}

void Running::finish(std::chrono::milliseconds timeout) {
  if (!is_over()) {
    std::exception_ptr failure;
    for (const auto& transfer : transfers_) {
      try {
        if (failure) {
          transfer->abort(failure);
        } else {
          transfer->finish(timeout);
        }
      } catch (...) {
        failure = std::current_exception();
      }
    }
    end(failure);
  }
  if (const auto why = this->why()) {
    std::rethrow_exception(why);
  }
}

bool Running::advance() {
  if (is_over()) {
    return true;
  }
  bool over = true;
  for (const auto& transfer : transfers_) {
    over = transfer->advance() && over;
  }
  if (over) {
    settle(*this);
  }
  return over;
}

void Running::abort() {
  if (is_over()) {
    return;
  }
  const auto why =
      std::make_exception_ptr(std::runtime_error(c10::str("simccl on rank ", rank_, ": ", name_, " was aborted.")));
  for (const auto& transfer : transfers_) {
    transfer->abort(why);
  }
  if (!advance()) { // else with the error of a transfer that has failed before
    end(why);
  }
}

std::vector<at::Tensor> Running::take_held() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(held_, {});
}

std::vector<const void*> Running::memory() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return c10::fmap(held_, [](const at::Tensor& tensor) { return tensor.storage().data(); });
}

void Underway::add(const RunningPtr& one) {
  std::vector<RunningPtr> over = all(); // dropped without the lock: tensors may be known to Python
  // Operations end nearly in order: stop at the first that is not over, because each poll costs.
  for (size_t i = 0; i < over.size() && over[i]->advance(); ++i) {
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(running_, [](const RunningPtr& earlier) {
    return earlier->is_over() && !(clock::has_limits() && earlier->failed()); // else check_limits would not see it
  });
  running_.push_back(one);
}

void Underway::forget() {
  std::vector<RunningPtr> dropped; // without the lock, as above
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(running_);
}

std::vector<RunningPtr> Underway::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_;
}

SimWork::SimWork(
    RunningPtr running, std::vector<at::Tensor> outputs, c10::DeviceIndex device, Moment moment, bool blocks_host,
    std::shared_ptr<CapturePoint> point)
    : c10d::Work(running->rank(), running->kind()),
      running_(std::move(running)),
      outputs_(std::move(outputs)),
      device_(device),
      end_{0, {running_}, std::move(moment), device, std::move(point)},
      blocks_host_(blocks_host) {
  // NCCL's stream has waited for the current one when the end of the operation is recorded on it.
  trace([&](const auto& to) {
    to.trace_gpu_event_creation(kSim, address_of(this));
    to.trace_gpu_event_record(kSim, address_of(this), address_of(handle_of(current_stream(device_))));
  });
}

SimWork::~SimWork() {
  trace([&](const auto& to) { to.trace_gpu_event_deletion(kSim, address_of(this)); });
  for (const void* data : running_->memory()) { // none after a wait, or if it is a part of another
    notify(end_.moment, [&](Observer& to) { to.kept_until(data, end_.moment); });
    keep_until_over(data, running_);
  }
  running_->let_go();
}

bool SimWork::wait(std::chrono::milliseconds timeout) {
  if (blocks_host_ && is_capturing()) {
    check_host_wait(current_stream(device_));
  }
  {
    WithoutGil without;
    if (blocks_host_ || timeout != kNoTimeout) {
      running_->finish(timeout);
      host_learns();
      if (running_->kind() == c10d::OpType::BARRIER) {
        sim::synchronize(current_stream(device_)); // NCCL's is a kernel behind those of the stream
      }
    } else if (running_->advance()) {
      running_->finish(kNoTimeout); // raises if the operation has failed
    }
  }
  running_->mark_waited_for();
  sim::wait(current_stream(device_), end_);
  for (const auto& output : outputs_) {
    if (output.device().index() != device_) { // of an all-gather
      sim::wait(current_stream(output.device().index()), end_);
    }
  }
  trace([&](const auto& to) {
    to.trace_gpu_event_wait(kSim, address_of(this), address_of(handle_of(current_stream(device_))));
  });
  running_->let_go();
  c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(this));
  return true;
}

bool SimWork::isCompleted() {
  if (is_virtual()) {
    return is_done(end_);
  }
  if (running_->is_over()) {
    return true;
  }
  WithoutGil without;
  const bool over = running_->advance();
  if (over) {
    tell_host();
  }
  return over;
}

// The host has waited for the operation.
void SimWork::host_learns() {
  if (is_virtual()) {
    sleep_until({running_->over_at(), running_->number()});
  }
  tell_host();
}

void SimWork::tell_host() const {
  for (const auto& moment : {end_.moment, running_->learned()}) {
    notify(moment, [&](Observer& to) { to.host_knows(moment); });
  }
}

bool SimWork::isSuccess() const {
  TORCH_CHECK_NOT_IMPLEMENTED(!kIsCuda, "WorkNCCL::isSuccess() is deprecated");
  return running_->is_over() && !running_->failed();
}

void SimWork::abort() {
  WithoutGil without;
  running_->abort();
}

FuturePtr SimWork::getFuture() {
  WithoutGil without;
  // Do this before locking, because it may call the completion hook.
  if (outputs_.empty()) {
    settle(*running_); // without a tensor there is no stream that could wait for it
    host_learns();
  } else {
    running_->advance();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_ == nullptr) {
    future_ = make_future();
  }
  return future_;
}

// Complete when it is made, since no thread would complete it: the host waits here.
FuturePtr SimWork::getFutureResult() {
  WithoutGil without;
  settle(*running_);
  host_learns();
  auto made = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  const auto result = running_->failed() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
  made->markCompleted(c10::IValue(static_cast<int64_t>(result)));
  return made;
}

FuturePtr SimWork::make_future() {
  std::vector<c10::Device> devices;
  if (!outputs_.empty()) {
    devices.emplace_back(kSim, device_);
  }
  auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  const auto is_like_first = [this](const at::Tensor& tensor) { return tensor.sizes() == outputs_.front().sizes(); };
  if (const auto why = running_->why()) {
    made->setError(why);
  } else if (retrieveOpType() == c10d::OpType::ALLGATHER && std::ranges::all_of(outputs_, is_like_first)) {
    // Hooks expect one tensor with a row for each rank, as NCCL's futures hold it.
    const c10::StreamGuard guard(next_stream(device_, /*priority=*/0));
    sim::wait(current_stream(device_), end_);
    made->markCompleted(c10::IValue(std::vector<at::Tensor>{at::stack(outputs_)}));
  } else {
    const AtEnd at_end(device_, end_);
    made->markCompleted(c10::IValue(outputs_));
  }
  return made;
}

} // namespace torch_ext::sim
