// The process group backend `simccl`: collectives on device tensors.
//
// Note [Where operations start]
// Every operation checks its tensors and describes itself by one or more Calls (transport/transport.h) on aliases of
// their memory. `Launcher::launch` gets the operation before any data moves, and passes the calls to a transport. Code
// between a program and its communication, such as the race check, belongs there.
#include <ATen/record_function.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "clock.h"
#include "device.h"
#include "dry.h"
#include "graph.h"
#include "host_tensors.h"
#include "kernel.h"
#include "kernel_observer.h"
#include "memory_history.h"
#include "std.h"
#include "stream.h"
#include "traffic.h"
#include "transport/transport.h"
#include "without_gil.h"
#include "work.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

struct Operation {
  c10d::OpType kind;
  const char* name; // for flight records
  Tensors inputs;   // device tensors
  Tensors outputs;  // device tensors, the work's result
  bool asynchronous;
  std::vector<Call> calls;
};

// Number of operations with device tensors, even empty ones, that this process has started, in all groups.
std::atomic<uint64_t> operations_on_devices{0};

struct Groups {
  std::mutex mutex;
  std::set<std::shared_ptr<Underway>> alive;
};

Groups& groups = *new Groups(); // never freed: groups may outlive static objects

// Whether "nccl" is what torch calls "nccl2": captures barriers, and gathers lists onto several devices.
#ifdef C10D_BACKEND_HAS_HOOKS
constexpr bool kIsNccl2 = true;
#else
constexpr bool kIsNccl2 = false;
#endif

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

// The operations that this process has started and that are not known to be over, on every group.
std::vector<RunningPtr> all_underway() {
  std::vector<std::shared_ptr<Underway>> alive;
  {
    std::lock_guard<std::mutex> lock(groups.mutex);
    alive.assign(groups.alive.begin(), groups.alive.end());
  }
  std::vector<RunningPtr> all;
  for (const auto& group : alive) {
    std::ranges::move(group->all(), std::back_inserter(all));
  }
  return all;
}

void settle_collectives() {
  WithoutGil without;
  for (const auto& running : all_underway()) {
    settle(*running);
  }
}

// For the end of a stretch of virtual time, when devices are idle: raises the error of the first operation that failed,
// waited for or not, if works have limits.
void check_limits() {
  WithoutGil without;
  for (const auto& running : all_underway()) {
    const bool is_limited = clock::has_limits() && running->begun() >= clock::epoch(); // else it is of earlier times
    if (const auto why = running->why(); why != nullptr && is_limited) {
      std::rethrow_exception(why);
    }
  }
}

// Reports a launch that lasts as long as the object to profilers, as NCCL does.
class ProfilerEvent {
 public:
  explicit ProfilerEvent(const Operation& operation) : event_(at::RecordScope::USER_SCOPE) {
    if (!event_.isActive()) {
      return;
    }
    event_._setAsync(); // the launched operation outlives the event
    const auto& shown = operation.inputs.empty() ? operation.outputs : operation.inputs;
    arguments_.assign(shown.begin(), shown.end());
    const auto* name = lasting_name(c10::str(kSimBackend, ":", operation.name)); // profilers use it later
    event_.before(name->c_str(), c10::ArrayRef<const c10::IValue>(arguments_.data(), arguments_.size()));
  }

 private:
  std::vector<c10::IValue> arguments_; // outlives the event
  at::RecordFunction event_;
};

// The name of an operation without its variants: `all_gather` also for `_all_gather_base`.
std::string trace_name(const Operation& operation) {
  static const std::map<OpType, const char*> names{
      {OpType::ALLREDUCE, "all_reduce"},
      {OpType::ALLGATHER, "all_gather"},
      {OpType::REDUCE_SCATTER, "reduce_scatter"},
      {OpType::ALLTOALL, "all_to_all"},
      {OpType::GATHER, "gather"}}; // _trace.py has all names
  const auto known = operation.calls.empty() ? names.end() : names.find(operation.calls.front().kind);
  return known == names.end() ? operation.name : known->second;
}

// A backend without its operations. One thread at a time drives it; `abort` may be called from any.
class Launcher : public c10d::Backend {
 public:
  Launcher(std::shared_ptr<Transport> transport, int rank, int size)
      : c10d::Backend(rank, size),
        transport_(std::move(transport)),
        blocking_wait_(is_set("TORCH_EXT_SIM_BLOCKING_WAIT") || is_set("TORCH_NCCL_BLOCKING_WAIT")) {
    std::lock_guard<std::mutex> lock(groups.mutex);
    groups.alive.insert(underway_);
  }
  ~Launcher() override {
    WithoutGil without;
    end_watch();
    if (transport_ != nullptr) {
      transport_->leave(/*broken=*/false);
    }
    {
      std::lock_guard<std::mutex> lock(groups.mutex);
      groups.alive.erase(underway_);
    }
    underway_.reset();
    transport_.reset();
  }

  void enableCollectivesTiming() override { is_timed_ = true; }

  // Counts collectives only, so that the group's ranks agree on the number.
  void setSequenceNumberForGroup() override { sequence_ = 0; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "startCoalescing was called twice without endCoalescing in between.");
    coalescing_ = true;
    ++sequence_;
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "endCoalescing was called without startCoalescing.");
    coalescing_ = false;
    if (!captured_.empty()) {
      auto parts = std::exchange(captured_, {});
      return capture(std::move(parts), c10d::OpType::COALESCED, "coalesced", /*asynchronous=*/true);
    }
    std::vector<TransferPtr> transfers;
    Tensors held;
    std::vector<Moment> moments;
    c10::DeviceIndex device = current_device();
    const int64_t traced = coalesced_.empty() ? -1 : coalesced_.front()->running()->number();
    for (const auto& work : std::exchange(coalesced_, {})) {
      const auto& parts = work->running()->transfers();
      transfers.insert(transfers.end(), parts.begin(), parts.end());
      const auto part = work->running()->take_held();
      held.insert(held.end(), part.begin(), part.end());
      device = part.empty() ? device : part.front().device().index();
      if (work->moment() != nullptr) {
        moments.push_back(work->moment());
      }
    }
    Moment end;
    if (!moments.empty()) {
      notify([&](Observer& to) { end = to.joined(moments); });
    }
    const auto running =
        running_of(c10d::OpType::COALESCED, "coalesced", std::move(transfers), std::move(held), traced);
    keep_for_abort(running);
    // Without outputs, as NCCL's, which would keep them after `wait`.
    return c10::make_intrusive<SimWork>(running, /*outputs=*/Tensors(), device, std::move(end), blocking_wait_);
  }

  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = std::move(hook);
  }
  void waitForPendingWorks() override {
    WithoutGil without;
    for (const auto& running : underway_->all()) {
      running->finish();
    }
  }

  // Fails every pending work, and every later operation: their waits raise RuntimeError. A group that can be
  // reconfigured goes on after that.
  void abort() override { abort_for(c10d::ErrorType::COMM_ERROR); }
  // Waits for operations that streams wait for, as NCCL does to finalize a communicator: their data may still come.
  void shutdown() override {
    WithoutGil without;
    shut_down_ = true;
    for (const auto& running : underway_->all()) {
      if (running->is_waited_for()) {
        settle(*running);
      }
    }
    if (transport_ != nullptr) {
      transport_->leave(/*broken=*/false);
    }
  }
  c10d::ErrorType getError() override { return error_; }

#ifdef C10D_BACKEND_HAS_HOOKS
  // Other groups report a failure where the program waits, and leave their record to _flight_record.py, in place of a
  // hook of torch's.
  bool supportsAbortHooks() const override { return supportsReconfigure(); }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    WithoutGil without;
    std::lock_guard<std::mutex> lock(watch_mutex_);
    hooks_[id] = std::move(hook);
    if (!watch_.joinable()) {
      watch_ = std::thread([this] { watch(); });
    }
  }
  void unregisterAbortHook(int64_t id) override {
    WithoutGil without;
    std::lock_guard<std::mutex> lock(watch_mutex_);
    hooks_.erase(id);
  }
#endif

 protected:
  // The time limit of operations that name none.
  virtual std::chrono::milliseconds limit() const = 0;

  // Ends what is under way, so that the other ranks notice, and lets go of the transport with its memory.
  void leave() {
    const auto is_over = [](const RunningPtr& running) { return running->is_over(); };
    fail_all(/*broken=*/!std::ranges::all_of(underway_->all(), is_over));
    transport_.reset();
  }
  void begin_anew(std::shared_ptr<Transport> transport) {
    std::lock_guard<std::mutex> lock(
        turn_mutex_); // else the watch would take an earlier failure for one of the new group
    underway_->forget();
    transport_ = std::move(transport);
    error_ = c10d::ErrorType::SUCCESS;
    sequence_ = 0;
    coalescing_ = false;
    coalesced_.clear();
  }

  WorkPtr launch(Operation operation) {
    const auto error = error_.load();
    TORCH_CHECK_WITH(
        DistBackendError, error == c10d::ErrorType::SUCCESS && !shut_down_, "Cannot start ", operation.name,
        ": this process group of simccl ",
        shut_down_ ? "was destroyed"
            : error == c10d::ErrorType::TIMEOUT
            ? "was aborted when an operation timed out"
            : "was aborted",
        ". Make a new one.");
    TORCH_CHECK_WITH(
        DistBackendError, transport_ != nullptr, "Cannot start ", operation.name,
        ": this process group of simccl has no members before its first reconfigure().");
    const auto named = device_of(operation);
    const auto device = named.value_or(current_device());
    if (is_capturing() && capture_of(current_stream(device)) != nullptr) {
      const auto kind = operation.kind;
      const char* name = operation.name;
      const bool asynchronous = operation.asynchronous;
      captured_.push_back(std::move(operation));
      if (!coalescing_) {
        return capture(std::exchange(captured_, {}), kind, name, asynchronous);
      }
      return c10::make_intrusive<SimWork>(
          running_of(kind, name), Tensors(), device, /*moment=*/nullptr, /*blocks_host=*/false);
    }
    catch_up(current_stream(device)); // the inputs must be complete
    report_beginning(operation, device);
    const int64_t traced = is_virtual() ? time(operation, current_stream(device)) : -1;
    WithoutGil without;
    const bool is_collective = !c10d::isP2POp(operation.kind);
    const ProfilerEvent event(operation);
    std::vector<TransferPtr> transfers;
    std::string stamp;
    const auto end = report_launch(operation, device, is_collective && !coalescing_, stamp);
    for (auto& call : operation.calls) {
      call.stamp = stamp;
      // With one device per process, all ranks use number 0: do not compare it.
      call.device = named.has_value() && device_count_of_all() > 1 ? index_among_all(device) : -1;
      call.batched = coalescing_;
      transfers.push_back(start(call));
    }
    if (named.has_value()) {
      ++operations_on_devices;
    }
    if (is_collective && !coalescing_) {
      ++sequence_;
    }
    auto record = std::make_shared<Progress>(transfers);
    const int root = operation.calls.empty() ? -1 : operation.calls.front().root;
    if (is_collective || root >= 0) {
      record_operation(
          {operation.name, getGroupUid(), getGroupDesc(), is_collective ? sequence_ : ++transfers_,
           shapes_of(operation.inputs), shapes_of(operation.outputs), record,
           is_collective ? -1 : transport_->group().global_ranks[static_cast<size_t>(root)]});
    }
    Tensors held = operation.inputs;
    held.insert(held.end(), operation.outputs.begin(), operation.outputs.end());
    const auto running = running_of(operation.kind, operation.name, std::move(transfers), std::move(held), traced);
    running->report_to(onCompletionHook_, std::move(record), is_timed_);
    auto work = c10::make_intrusive<SimWork>(running, operation.outputs, device, end, blocks_host(operation.kind));
    keep_for_abort(running);
    if (coalescing_) {
      coalesced_.push_back(work);
    } else if (!operation.asynchronous) {
      running->let_go();
      running->finish();
      const auto learned = running->learned();
      notify(learned, [&](Observer& to) { to.stream_waits(current_stream(device), learned); });
      if (is_virtual()) {
        extend(current_stream(device), {running->over_at(), running->number()});
      }
    }
    return work;
  }

  // The work of something that is over.
  WorkPtr done(const char* name) const {
    return c10::make_intrusive<SimWork>(
        running_of(c10d::OpType::UNKNOWN, name), Tensors(), current_device(), /*moment=*/nullptr, /*blocks_host=*/true);
  }

  std::shared_ptr<Transport> transport_;

 private:
  // Makes `operations` a step of the current stream's capture (Note [Captures] in graph.h): one launch, or a coalesced
  // one. Later kernels of the capture, which run, find zeros where results are due.
  WorkPtr capture(std::vector<Operation> operations, c10d::OpType kind, const char* name, bool asynchronous) {
    Tensors outputs;
    Kept keep;
    const auto device = device_of(operations.front()).value_or(current_device());
    const auto stream = current_stream(device);
    const auto target = capture_of(stream);
    for (auto& operation : operations) {
      outputs.insert(outputs.end(), operation.outputs.begin(), operation.outputs.end());
      const auto accesses = accesses_of(operation, stream.device());
      for (const auto& access : accesses) {
        const auto reads = [&](const Access& other) { return !other.write && other.data == access.data; };
        if (access.write && target->owns(access.data) && std::ranges::none_of(accesses, reads)) {
          std::memset(const_cast<void*>(access.data), 0, access.bytes);
        }
      }
      for (auto* tensors : {&operation.inputs, &operation.outputs}) {
        std::ranges::transform(*tensors, tensors->begin(), [&](const at::Tensor& tensor) { return keep(tensor); });
      }
    }
    const auto group = c10::weak_intrusive_ptr<Launcher>(c10::intrusive_ptr<Launcher>::reclaim_copy(this));
    const auto run = [group, operations, is_alone = kind != c10d::OpType::COALESCED, name] {
      const auto self = group.lock();
      TORCH_CHECK(self, "A graph has the operation ", name, " of a process group that is destroyed.");
      if (!is_alone) {
        self->startCoalescing();
      }
      WorkPtr work;
      for (const auto& operation : operations) {
        work = self->launch(operation);
      }
      work = is_alone ? work : self->endCoalescing();
      const auto& made = static_cast<const SimWork&>(*work);
      made.running()->let_go();
      return made.end();
    };
    auto point = target->launch(name, stream, asynchronous, run);
    if (!coalescing_ && !c10d::isP2POp(kind)) {
      ++sequence_;
    }
    return c10::make_intrusive<SimWork>(
        running_of(kind, name, {}, outputs), outputs, device, /*moment=*/nullptr, blocks_host(kind) && !kIsNccl2,
        std::move(point));
  }

  RunningPtr running_of(
      c10d::OpType kind, const char* name, std::vector<TransferPtr> transfers = {}, Tensors held = {},
      int64_t traced = -1) const {
    return std::make_shared<Running>(kind, name, rank_, sequence_, std::move(transfers), std::move(held), traced);
  }
  // In virtual time: launches the operation on `stream`, and tells its calls when they are ready and how long they
  // last. Returns its number in the trace; the parts of a coalesced operation share one.
  int64_t time(Operation& operation, c10::Stream stream) {
    const bool is_part = coalescing_ && !coalesced_.empty();
    const Stamp ready = clock::launch(stream, /*is_launched=*/!is_part);
    uint64_t bytes = 0;
    for (auto& call : operation.calls) {
      const auto traffic = traffic_of(call, transport_->group());
      call.timing = {ready.at - clock::epoch(), clock::duration(traffic), host_stamp().at - clock::epoch()};
      bytes += traffic.sent;
    }
    if (is_part) {
      const auto number = coalesced_.front()->running()->number();
      clock::add_sent(number, bytes);
      return number;
    }
    const bool is_transfer = c10d::isP2POp(operation.kind);
    clock::Work work{is_transfer ? "transfer" : "collective", trace_name(operation)};
    work.device = stream.device_index();
    work.stream = operation.asynchronous ? -1 : stream.id();
    work.group = getGroupUid();
    work.peer = is_transfer ? operation.calls.front().root : -1;
    work.bytes = bytes;
    work.ready = ready.at;
    work.after = ready.by;
    return clock::trace(std::move(work));
  }
  bool blocks_host(c10d::OpType kind) const { return blocking_wait_ || kind == c10d::OpType::BARRIER; }

  // Passes a call to the transport. Strided tensors of a list are copied: the inputs now, the outputs at the end.
  TransferPtr start(Call call) {
    if (is_dry()) {
      return transport_->start(std::move(call));
    }
    at::AutoDispatchBelowADInplaceOrView below; // see Stepped::finish
    for (auto& input : call.inputs) {
      input = input.is_contiguous() ? input : input.contiguous().view({-1}); // `reshape` may make a view
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    for (auto& output : call.outputs) {
      if (!output.is_contiguous()) {
        const at::Tensor whole = at::empty(output.sizes(), output.options());
        copies.emplace_back(std::exchange(output, whole.view({-1})), whole);
      }
    }
    auto started = transport_->start(std::move(call));
    if (copies.empty()) {
      return started;
    }
    return std::make_shared<Stepped>(std::move(started), [copies = std::move(copies)] {
      for (const auto& [to, from] : copies) {
        to.copy_(from);
      }
    });
  }
  // Refuses tensors on several devices, or on one that is not the group's. Returns the device's index.
  std::optional<c10::DeviceIndex> device_of(const Operation& operation) const {
    std::optional<c10::Device> device = getBoundDeviceId();
    const bool is_bound = device.has_value();
    const bool spreads = kIsNccl2 && operation.kind == OpType::ALLGATHER;
    for (const auto* tensors : {&operation.inputs, &operation.outputs}) {
      if (spreads && tensors == &operation.outputs) {
        continue;
      }
      for (const auto& tensor : *tensors) {
        if (!device.has_value()) {
          device = tensor.device();
        }
        TORCH_CHECK_VALUE(
            tensor.device() == *device, operation.name, " got a tensor on ", tensor.device(),
            is_bound ? ", but its group is bound to " : " and one on ", *device,
            is_bound ? "." : "; all tensors of a call must be on the same device.");
      }
    }
    const bool has_tensors = !operation.inputs.empty() || !operation.outputs.empty();
    return has_tensors ? std::make_optional(device->index()) : std::nullopt;
  }
  std::vector<Access> accesses_of(const Operation& operation, c10::Device device) const {
    std::vector<Access> accesses;
    const auto add = [&](const Tensors& views, bool write) {
      for (const auto& view : views) {
        if (auto access = access_to(view, write)) {
          access->device = device; // a transport's views are aliases
          accesses.push_back(*access);
        }
      }
    };
    for (const auto& call : operation.calls) {
      const bool keeps_what_it_has = call.kind == c10d::OpType::BROADCAST && call.root == rank_;
      add(call.inputs, /*write=*/false);
      add(keeps_what_it_has ? Tensors() : call.outputs, /*write=*/true);
    }
    return accesses;
  }
  void report_beginning(const Operation& operation, c10::DeviceIndex device) const {
    notify([&](Observer& to) {
      if (to.wants_beginnings()) {
        const auto stream = current_stream(device);
        to.launch_begins(stream, accesses_of(operation, stream.device()));
      }
    });
  }
  // counts: whether the operation is the next of the group's collectives. stamp: goes with its data.
  Moment report_launch(const Operation& operation, c10::DeviceIndex device, bool counts, std::string& stamp) const {
    Moment end;
    notify([&](Observer& to) {
      const auto stream = current_stream(device);
      int peer = -1;
      for (const auto& call : operation.calls) {
        peer = c10d::isP2POp(call.kind) ? call.root : -1;
      }
      end = to.launched(
          {operation.name, getGroupUid(), sequence_ + (counts ? 1 : 0), peer, operation.asynchronous, stream,
           accesses_of(operation, stream.device()), &stamp});
    });
    return end;
  }
  void fail_all(bool broken = true) {
    for (const auto& running : underway_->all()) {
      running->abort();
    }
    if (transport_ != nullptr) {
      transport_->leave(broken);
    }
  }
  void abort_for(c10d::ErrorType why) {
    WithoutGil without;
    auto none = c10d::ErrorType::SUCCESS;
    error_.compare_exchange_strong(none, why);
    std::map<int64_t, std::function<void()>> hooks;
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      hooks = hooks_;
    }
    for (const auto& [id, hook] : hooks) {
      hook();
    }
    fail_all();
  }
  // Aborts the group when an operation has failed or is past its limit, although no thread waits for it. Runs in a
  // thread of its own, from the first abort hook on.
  void watch() {
    std::unique_lock<std::mutex> lock(watch_mutex_);
    while (!watch_changed_.wait_for(lock, kWatchPause, [this] { return watch_ends_; })) {
      lock.unlock();
      std::unique_lock<std::mutex> turn(turn_mutex_);
      const int64_t oldest = stream_clock() - std::chrono::nanoseconds(limit()).count();
      for (const auto& running : underway_->all()) {
        const bool is_over = running->advance();
        if (error_ == c10d::ErrorType::SUCCESS && (is_over ? running->failed() : running->begun() < oldest)) {
          abort_for(is_over ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::TIMEOUT);
        }
      }
      turn.unlock();
      lock.lock();
    }
  }
  void end_watch() {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      watch_ends_ = true;
    }
    watch_changed_.notify_all();
    if (watch_.joinable()) {
      getpid() == owner_ ? watch_.join() : watch_.detach(); // a fork has no such thread
    }
  }
  void keep_for_abort(const RunningPtr& running) {
    underway_->add(running);
    if (error_ != c10d::ErrorType::SUCCESS) {
      running->abort();
    }
  }

  uint64_t sequence_ = 0;
  uint64_t transfers_ = 0; // that this rank has started
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<SimWork>> coalesced_;
  std::vector<Operation> captured_; // since startCoalescing, or one
  std::shared_ptr<Underway> underway_ = std::make_shared<Underway>();
  const bool blocking_wait_;
  std::atomic<bool> is_timed_{is_set("TORCH_NCCL_ENABLE_TIMING")};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::atomic<bool> shut_down_{false};

  static constexpr auto kWatchPause = std::chrono::milliseconds(100);
  const int owner_ = getpid();
  std::mutex turn_mutex_;  // held while the watch looks, and while the group begins anew
  std::mutex watch_mutex_; // guards what follows
  std::condition_variable watch_changed_;
  std::map<int64_t, std::function<void()>> hooks_; // by the number that the program gives
  bool watch_ends_ = false;
  std::thread watch_;
};

Tensors flatten(const TensorLists& lists) {
  Tensors flat;
  for (const auto& list : lists) {
    flat.insert(flat.end(), list.begin(), list.end());
  }
  return flat;
}

const at::Tensor& single(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "simccl expects one tensor for ", what, ", but got ", tensors.size(), ".");
  return tensors.front();
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "Expected as many outputs as inputs, but got ", outputs.size(), " and ",
      inputs.size(), ".");
}

class SimCCL final : public Launcher {
 public:
  // Torch copies the options for each group that is split off.
  struct SimOptions final : c10d::Backend::Options {
    explicit SimOptions(std::chrono::milliseconds timeout, bool any_device)
        : c10d::Backend::Options(kSimBackend, timeout), any_device(any_device) {}
    const bool any_device;
  };

  // store: shared by the group's ranks. any_device: whether several ranks may use one device. Blocks until all ranks
  // have joined; not if the group is `reconfigurable`, which has members from its first `reconfigure` on.
  SimCCL(
      c10::intrusive_ptr<c10d::Store> store, int rank, const std::vector<int64_t>& global_ranks,
      std::chrono::milliseconds timeout, bool any_device, bool reconfigurable = false)
      : Launcher(
            reconfigurable ? nullptr : make_transport(store, rank, global_ranks, timeout, any_device), rank,
            static_cast<int>(global_ranks.size())),
        handle_(
            reconfigurable
                ? c10::str(
                      global_ranks.at(static_cast<size_t>(rank)), ":", getpid(), ":",
                      std::chrono::steady_clock::now().time_since_epoch().count())
                : ""),
        store_(std::move(store)),
        options_(c10::make_intrusive<SimOptions>(timeout, any_device)) {
    options_->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
    init();
  }

  const std::string getBackendName() const override { return kSimBackend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  std::string gone(int peer, const Arrived& arrived) const {
    return transport_ != nullptr ? transport_->gone(peer, arrived) : "";
  }
  std::string transport_kind() const { return transport_ != nullptr ? transport_->kind() : "none"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    limit_ = timeout;
    if (transport_ != nullptr) {
      transport_->set_timeout(timeout);
    }
  }
  void setGroupUid(const std::string& name) override {
    c10d::Backend::setGroupUid(name);
    if (transport_ != nullptr) {
      transport_->set_name(name);
    }
  }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return at::empty({size}, options.has_device() ? options : options.device(c10::Device(kSim, current_device())));
  }

  // Torch calls it on every rank of this group, with the ranks of one part: the caller's, or the first if it has none.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    // The prefix of torch's store contains the number of this rank's groups, which may differ between ranks. The number
    // of splits of one group is the same on all of its ranks.
    return part("split", splits_++, ranks, options);
  }

  // As ncclCommShrink: every rank that stays calls it, with the same list. Without kShrinkAborts, operations that are
  // under way go on. The group itself stays as it is, or aborted, until the program destroys it.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& excluded, int flags, const c10::intrusive_ptr<Options>& options) override {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (std::ranges::find(excluded, rank) == excluded.end()) {
        ranks.push_back(rank);
      }
    }
    TORCH_CHECK_VALUE(
        std::ranges::find(ranks, rank_) != ranks.end(), "shrink: rank ", rank_, " is among the excluded ranks ",
        c10::Join(", ", excluded), ". Only the ranks that stay call it.");
    for (const auto rank : excluded) {
      checked_root(rank);
    }
    if ((flags & kShrinkAborts) != 0) {
      abort();
    }
    return part("shrink", shrinks_++, ranks, options);
  }

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return !handle_.empty(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    check_reconfigurable();
    return handle_;
  }
  // Members are processes that share the store of the group. Blocks until all of them are there.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override {
    check_reconfigurable();
    std::vector<std::string> members;
    std::visit([&](const auto& handles) { members.assign(handles.begin(), handles.end()); }, options.handles);
    if (!std::holds_alternative<std::vector<std::string>>(options.handles)) {
      std::ranges::sort(members, std::less<>(), rank_of);
    }
    const auto place = std::ranges::find(members, handle_);
    TORCH_CHECK_VALUE(
        place != members.end(), "reconfigure: the handles ", c10::Join(", ", members), " lack this rank's, ", handle_,
        ". Only members call it.");
    TORCH_CHECK(
        uuids_.insert(options.uuid).second, "reconfigure: this rank has already used the uuid ", options.uuid,
        ". Each reconfiguration needs a new one.");
    WithoutGil without;
    leave();
    const auto ranks = c10::fmap(members, rank_of);
    // Other members may use the same uuid at the same time.
    const auto prefix = c10::str("reconfigure/", options.uuid, "/", std::hash<std::string>()(c10::Join(" ", members)));
    const int rank = static_cast<int>(place - members.begin());
    auto made = make_transport(
        c10::make_intrusive<c10d::PrefixStore>(prefix, store_), rank, ranks,
        options.timeout.value_or(options_->timeout), options_->any_device);
    made->set_timeout(options_->timeout);
    made->set_name(getGroupUid());
    begin_anew(std::move(made));
    rank_ = rank;
    size_ = static_cast<int>(members.size());
    options_->global_ranks_in_group.assign(ranks.begin(), ranks.end());
    return done("reconfigure");
  }
#endif

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check_order(tensors);
    Call call{OpType::BROADCAST, "broadcast"};
    call.outputs = {transport_view(single(tensors, "broadcast"), call.name)};
    call.root = checked_root(options.rootRank, "Broadcast");
    if (call.root == rank_) {
      call.inputs = call.outputs;
    }
    return launch_one(std::move(call), tensors, tensors, options);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_order(tensors);
    return launch_one(all_reduce_of(single(tensors, "all_reduce"), "all_reduce", options), tensors, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    constexpr const char* kName = "allreduce_coalesced";
    auto calls = c10::fmap(tensors, [&](const at::Tensor& each) { return all_reduce_of(each, kName, options); });
    return launch_all(OpType::ALLREDUCE_COALESCED, std::move(calls), kName, tensors, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_order(tensors);
    Call call{OpType::REDUCE, "reduce", {transport_view(single(tensors, "reduce"), "reduce")}};
    call.root = checked_root(options.rootRank, "Reduce");
    if (call.root == rank_) {
      call.outputs = call.inputs;
    }
    call.reduction = reduction_of(options.reduceOp, tensors.front());
    return launch_one(std::move(call), tensors, tensors, options);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == 1, "simccl expects one list of outputs, but got ", outputs.size(), ".");
    check_order(inputs);
    return launch_one(
        all_gather_of(outputs.front(), single(inputs, "all_gather"), "all_gather"), inputs, outputs.front(), options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    check_order({input, output});
    return launch_one(
        whole_gather_of(output, input, "_all_gather_base"), {input}, {output}, options, OpType::_ALLGATHER_BASE);
  }

  // outputs[r][i] receives inputs[i] of rank r.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    constexpr const char* kName = "all_gather_coalesced";
    auto calls = calls_of(inputs.size(), [&](size_t i) {
      Tensors column;
      for (const auto& of_rank : outputs) {
        column.push_back(of_rank.at(i));
      }
      return all_gather_of(column, inputs[i], kName);
    });
    return launch_all(OpType::ALLGATHER_COALESCED, std::move(calls), kName, inputs, flatten(outputs), options);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    constexpr const char* kName = "all_gather_into_tensor_coalesced";
    check_pairs(outputs, inputs);
    auto calls = calls_of(inputs.size(), [&](size_t i) { return whole_gather_of(outputs[i], inputs[i], kName); });
    return launch_all(OpType::COALESCED, std::move(calls), kName, inputs, outputs, options);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check_order(inputs);
    Call call{OpType::GATHER, "gather", {transport_view(single(inputs, "gather"), "gather")}};
    call.root = checked_root(options.rootRank);
    check_list(outputs, call.root, "gather", "output", inputs.front());
    call.outputs = transport_view(flatten(outputs), call.name);
    return launch_one(std::move(call), inputs, outputs.empty() ? inputs : flatten(outputs), options);
  }

  // Torch 2.15 calls this function, and older releases do not declare it.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
    constexpr const char* kName = "gather_single";
    const int root = checked_root(options.rootRank);
    Call call = root == rank_ ? whole_gather_of(output, input, kName) : Call{OpType::GATHER, kName};
    call.kind = OpType::GATHER;
    call.inputs = {transport_view(input, kName)};
    call.root = root;
    const Tensors outputs = root == rank_ ? Tensors{output} : Tensors{input};
    return launch_one(std::move(call), {input}, outputs, options);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    Call call{OpType::SCATTER, "scatter"};
    call.outputs = {transport_view(single(outputs, "scatter"), call.name)};
    call.root = checked_root(options.rootRank);
    check_list(inputs, call.root, "scatter", "input", outputs.front());
    call.inputs = transport_view(flatten(inputs), call.name);
    return launch_one(std::move(call), flatten(inputs), outputs, options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto& output = single(outputs, "reduce_scatter");
    check_order(outputs);
    TORCH_CHECK_VALUE(
        inputs.size() == 1 && inputs.front().size() == static_cast<size_t>(size_),
        "simccl expects one list with a tensor for each of the ", size_, " ranks.");
    const Tensors& parts = inputs.front();
    check_types(parts, output);
    TORCH_CHECK_VALUE(
        parts[rank_].numel() == output.numel(), "The output has ", output.numel(),
        " elements, but this rank's input has ", parts[rank_].numel(), ".");
    constexpr const char* kName = "reduce_scatter";
    Call call{OpType::REDUCE_SCATTER, kName, transport_list(parts, kName), transport_list(outputs, kName)};
    call.reduction = reduction_of(options.reduceOp, output);
    return launch_one(std::move(call), parts, outputs, options);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch_one(whole_scatter_of(output, input, "_reduce_scatter_base", options), {input}, {output}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    constexpr const char* kName = "reduce_scatter_tensor_coalesced";
    check_pairs(outputs, inputs);
    auto calls = calls_of(inputs.size(), [&](size_t i) {
      return whole_scatter_of(outputs[i], inputs[i], kName, options);
    });
    return launch_all(OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(calls), kName, inputs, outputs, options);
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check_types({input}, output);
    return launch_one(
        {OpType::ALLTOALL, "all_to_all", transport_rows(input, input_splits, size_),
         transport_rows(output, output_splits, size_)},
        {input}, {output}, options, OpType::ALLTOALL_BASE);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto group = static_cast<size_t>(size_);
    TORCH_CHECK_VALUE(
        outputs.size() == group && inputs.size() == group, "all_to_all expects a tensor for each of the ", size_,
        " ranks, but got ", outputs.size(), " outputs and ", inputs.size(), " inputs.");
    check_types(inputs, outputs.front());
    check_types(outputs, outputs.front());
    check_order(inputs);
    check_order(outputs);
    return launch_one(
        {OpType::ALLTOALL, "all_to_all", transport_view(inputs, "all_to_all"), transport_view(outputs, "all_to_all")},
        inputs, outputs, options);
  }

  // NCCL has no tags, and no receive from any rank.
  WorkPtr send(Tensors& tensors, int destination, int /*tag*/) override {
    Call call{OpType::SEND, "send", {transport_view(single(tensors, "send"), "send")}};
    return launch_transfer(std::move(call), tensors, tensors, checked_root(destination));
  }
  WorkPtr recv(Tensors& tensors, int source, int /*tag*/) override {
    Call call{OpType::RECV, "recv", {}, {transport_view(single(tensors, "recv"), "recv")}};
    return launch_transfer(std::move(call), {}, tensors, checked_root(source));
  }

  WorkPtr recvAnysource(Tensors& /*tensors*/, int /*tag*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "ProcessGroupNCCL does not support recvAnysource");
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return launch_one({OpType::BARRIER, "barrier"}, {}, {}, options);
  }

 private:
  static constexpr int kShrinkAborts = 1; // torch.distributed's SHRINK_ABORT

  std::chrono::milliseconds limit() const override { return limit_; }

  // The backend of some of this group's ranks, for those among them. number: equal on all of them.
  c10::intrusive_ptr<c10d::Backend> part(
      const char* how, int number, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& options) {
    const auto prefix = c10::str(how, "/", number, "/", c10::Join("_", ranks), "/");
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      return nullptr;
    }
    const auto timeout = options != nullptr ? options->timeout : options_->timeout;
    const auto global_ranks = c10::fmap(ranks, [this](int member) {
      return static_cast<int64_t>(options_->global_ranks_in_group[static_cast<size_t>(member)]);
    });
    return c10::make_intrusive<SimCCL>(
        c10::make_intrusive<c10d::PrefixStore>(prefix, store_), static_cast<int>(place - ranks.begin()), global_ranks,
        timeout, options_->any_device);
  }

  void check_reconfigurable() const {
    TORCH_CHECK(
        !handle_.empty(),
        "This process group of simccl cannot be reconfigured: make it with "
        "init_process_group(..., enable_reconfigure=True).");
  }
  static int64_t rank_of(const std::string& handle) { return std::strtoll(handle.c_str(), nullptr, 10); }

  template <typename Options>
  WorkPtr launch_all(
      OpType kind, std::vector<Call> calls, const char* name, const Tensors& inputs, const Tensors& outputs,
      const Options& options) {
    for (auto& call : calls) {
      call.timeout = options.timeout;
    }
    return launch({kind, name, inputs, outputs, options.asyncOp, std::move(calls)});
  }

  template <typename Options>
  WorkPtr launch_one(
      Call call, const Tensors& inputs, const Tensors& outputs, const Options& options,
      std::optional<OpType> kind = std::nullopt) {
    const char* name = call.name;
    const OpType known_as = kind.value_or(call.kind);
    return launch_all(known_as, {std::move(call)}, name, inputs, outputs, options);
  }

  // Makes one call for each index below `count` by `make`.
  template <typename Make>
  static std::vector<Call> calls_of(size_t count, Make make) {
    std::vector<Call> calls;
    calls.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      calls.push_back(make(i));
    }
    return calls;
  }

  WorkPtr launch_transfer(Call call, const Tensors& inputs, const Tensors& outputs, int peer) {
    const auto& tensor = outputs.front();
    if (!tensor.is_contiguous(tensor.suggest_memory_format())) {
      TORCH_WARN_ONCE(
          "Detected non-contiguous tensor in P2P operations. It is user responsibility to guarantee that source and "
          "destination tensors have the same contiguity format.");
    }
    call.root = peer;
    const OpType kind = call.kind;
    const char* name = call.name;
    return launch({kind, name, inputs, outputs, /*asynchronous=*/true, {std::move(call)}});
  }

  // of_nccl: its name of the operation, if the library itself and not ProcessGroupNCCL checks the rank.
  int checked_root(int64_t rank, const char* of_nccl = nullptr) const {
    const bool is_rank = rank >= 0 && rank < size_;
    TORCH_CHECK_WITH(
        DistBackendError, is_rank || of_nccl == nullptr || options_->any_device, "NCCL error: invalid argument: ",
        of_nccl, " : invalid root ", rank, " (root should be in the 0..", size_, " range)");
    TORCH_CHECK_VALUE(is_rank, "Invalid rank ", rank, ": expected one of the ", size_, " ranks of the group.");
    return static_cast<int>(rank);
  }

  Reduction reduction_of(const c10d::ReduceOp& wanted, const at::Tensor& tensor) const {
    if (!options_->any_device) { // else it serves a group of gloo
      check_known_to_nccl(wanted, tensor.scalar_type());
    }
    return {wanted, tensor.scalar_type(), size_};
  }

  Call all_reduce_of(const at::Tensor& tensor, const char* name, const c10d::AllreduceOptions& options) const {
    const Tensors view{transport_view(tensor, name)};
    return {OpType::ALLREDUCE, name, view, view, /*root=*/-1, reduction_of(options.reduceOp, tensor)};
  }

  Call all_gather_of(const Tensors& outputs, const at::Tensor& input, const char* name) const {
    TORCH_CHECK_VALUE(
        outputs.size() == static_cast<size_t>(size_), "all_gather expects an output for each of the ", size_,
        " ranks, but got ", outputs.size(), ".");
    check_types(outputs, input);
    TORCH_CHECK_VALUE(
        outputs[rank_].numel() == input.numel(), "The input has ", input.numel(),
        " elements, but the output for this rank has ", outputs[rank_].numel(), ".");
    return {OpType::ALLGATHER, name, transport_list({input}, name), transport_list(outputs, name)};
  }

  Call whole_gather_of(const at::Tensor& output, const at::Tensor& input, const char* name) const {
    TORCH_CHECK_TYPE(
        output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor, but got ",
        output.scalar_type(), " and ", input.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_,
        "output tensor size must be equal to world_size times input tensor size: got ", output.numel(), ", expected ",
        input.numel() * size_, ".");
    return {OpType::ALLGATHER, name, {transport_view(input, name)}, transport_parts(output, size_, name)};
  }

  Call whole_scatter_of(
      const at::Tensor& output, const at::Tensor& input, const char* name,
      const c10d::ReduceScatterOptions& options) const {
    TORCH_CHECK_TYPE(
        input.scalar_type() == output.scalar_type(),
        "input tensor must be the same type as the output tensor, but got ", input.scalar_type(), " and ",
        output.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        input.numel() == output.numel() * size_,
        "input tensor must be the same size as output size times world size: got ", input.numel(), ", expected ",
        output.numel() * size_, ".");
    return {
        OpType::REDUCE_SCATTER,
        name,
        transport_parts(input, size_, name),
        {transport_view(output, name)},
        /*root=*/-1,
        reduction_of(options.reduceOp, output)};
  }

  // gloo takes any order of dimensions, as does NCCL where nothing checks it.
  void check_order(const Tensors& tensors) const {
    if (!options_->any_device) {
      check_contiguous(tensors);
    }
  }

  static void check_types(const Tensors& tensors, const at::Tensor& like) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(
          tensor.scalar_type() == like.scalar_type(), "Tensors of one call must have one type, but got ",
          tensor.scalar_type(), " and ", like.scalar_type(), ".");
    }
  }

  // Checks the list that only the root of a gather or scatter has: a tensor for each rank, alike in type and size.
  void check_list(
      const TensorLists& lists, int root, const char* name, const char* what, const at::Tensor& like) const {
    const bool is_root = root == rank_;
    const size_t expected = is_root ? static_cast<size_t>(size_) : 0;
    const size_t given = lists.empty() ? 0 : lists.front().size();
    TORCH_CHECK_VALUE(
        lists.size() <= 1 && given == expected, name, " expects ", expected, " ", what, " tensors on rank ", rank_,
        is_root ? ", the root," : ", which is not the root,", " but got ", given, ".");
    for (size_t i = 0; i < given; ++i) {
      const auto& tensor = lists.front()[i];
      TORCH_CHECK(
          tensor.numel() == like.numel(), name, ": invalid tensor size at index ", i, " (expected (",
          c10::Join(", ", like.sizes()), "), got (", c10::Join(", ", tensor.sizes()), "))");
    }
    if (given > 0) {
      check_types(lists.front(), like);
    }
  }

  const std::string handle_; // "RANK:PID:TIME"; empty if the group cannot be reconfigured
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<SimOptions> options_;
  std::atomic<std::chrono::milliseconds> limit_{options_->timeout};
  std::set<int64_t> uuids_;
  int splits_ = 0;
  int shrinks_ = 0;
};

} // namespace

std::string gone_from(const c10d::Backend& backend, int peer, const Arrived& arrived) {
  const auto* own = dynamic_cast<const SimCCL*>(&backend);
  return own != nullptr ? own->gone(peer, arrived) : "";
}

void bind_simccl(pybind11::module_& m) {
  namespace py = pybind11;
  settle_others = settle_collectives;
  m.def("check_clock_limits", &check_limits);
  m.def("operations_launched_on_devices", [] { return operations_on_devices.load(); });
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>> backend(m, "ProcessGroupSimCCL");
  py::class_<SimCCL::SimOptions, c10d::Backend::Options, c10::intrusive_ptr<SimCCL::SimOptions>>(backend, "Options")
      .def("__deepcopy__", [](const SimCCL::SimOptions& self, const py::dict& /*memo*/) {
        return c10::make_intrusive<SimCCL::SimOptions>(self);
      });
  backend
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, const std::vector<int64_t>& global_ranks,
                      std::chrono::milliseconds timeout, bool any_device, bool reconfigurable) {
            return c10::make_intrusive<SimCCL>(
                std::move(store), rank, global_ranks, timeout, any_device, reconfigurable);
          }),
          py::arg("store"), py::arg("rank"), py::arg("global_ranks"), py::arg("timeout"), py::arg("any_device") = false,
          py::arg("reconfigurable") = false, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &SimCCL::getBackendOptions)
      .def_property_readonly("transport", &SimCCL::transport_kind)
      .def("get_error", &SimCCL::getError)
      .def("_set_default_timeout", &SimCCL::setTimeout)
      // With some backends, ranks outside a new group must take part in a split; with ours they need not.
      .def("perform_nocolor_split", [](SimCCL& /*self*/, const c10::Device& /*device*/) {});
}

} // namespace torch_ext::sim
