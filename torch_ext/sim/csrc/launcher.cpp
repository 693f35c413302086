#include "launcher.h"

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device.h"
#include "flight_record.h"
#include "kernel.h"
#include "kernel_observer.h"
#include "running.h"
#include "sim_work.h"
#include "stream.h"
#include "transport/transport.h"
#include "transport_view.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

std::atomic<uint64_t> operations_on_devices{0};

struct Groups {
  std::mutex mutex;
  std::set<std::shared_ptr<Underway>> alive;
};

// Never freed: groups may outlive static objects.
Groups& groups() {
  static auto* made = new Groups();
  return *made;
}

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

// What profilers call an operation. Kept, because they refer to it after the operation.
const char* title_of(const char* name) {
  static auto* made = new std::map<std::string, std::string>();
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  return made->try_emplace(name, std::string("simccl:") + name).first->second.c_str();
}

// Tells profilers, if there are any, of a launch that lasts as long as the object, as NCCL does.
class Told {
 public:
  explicit Told(const Operation& operation) : event_(at::RecordScope::USER_SCOPE) {
    if (!event_.isActive()) {
      return;
    }
    event_._setAsync(); // what is launched goes on
    const auto& shown = operation.inputs.empty() ? operation.outputs : operation.inputs;
    arguments_.assign(shown.begin(), shown.end());
    event_.before(title_of(operation.name), c10::ArrayRef<const c10::IValue>(arguments_.data(), arguments_.size()));
  }

 private:
  std::vector<c10::IValue> arguments_; // outlives the event
  at::RecordFunction event_;
};

} // namespace

Launcher::Launcher(std::shared_ptr<Transport> transport, int rank, int size)
    : c10d::Backend(rank, size),
      transport_(std::move(transport)),
      blocking_wait_(is_set("TORCH_EXT_SIM_BLOCKING_WAIT") || is_set("TORCH_NCCL_BLOCKING_WAIT")) {
  std::lock_guard<std::mutex> lock(groups().mutex);
  groups().alive.insert(underway_);
}

Launcher::~Launcher() {
  WithoutGil without;
  transport_->leave(/*broken=*/false);
  {
    std::lock_guard<std::mutex> lock(groups().mutex);
    groups().alive.erase(underway_);
  }
  underway_.reset();
  transport_.reset();
}

void settle_collectives() {
  WithoutGil without;
  std::vector<std::shared_ptr<Underway>> alive;
  {
    std::lock_guard<std::mutex> lock(groups().mutex);
    alive.assign(groups().alive.begin(), groups().alive.end());
  }
  for (const auto& group : alive) {
    for (const auto& running : group->all()) {
      settle(*running);
    }
  }
}

void Launcher::startCoalescing() {
  TORCH_CHECK(!coalescing_, "startCoalescing was called twice without endCoalescing in between.");
  coalescing_ = true;
  ++sequence_;
}

WorkPtr Launcher::endCoalescing() {
  TORCH_CHECK(coalescing_, "endCoalescing was called without startCoalescing.");
  coalescing_ = false;
  std::vector<TransferPtr> transfers;
  Tensors outputs;
  std::vector<Moment> moments;
  c10::DeviceIndex device = current_device();
  for (const auto& work : std::exchange(coalesced_, {})) {
    work->become_part();
    const auto& parts = work->running()->transfers();
    transfers.insert(transfers.end(), parts.begin(), parts.end());
    const auto result = work->result();
    outputs.insert(outputs.end(), result.begin(), result.end());
    device = outputs.empty() ? device : outputs.front().device().index();
    if (work->moment() != nullptr) {
      moments.push_back(work->moment());
    }
  }
  Moment end;
  if (!moments.empty()) {
    tell([&](Observer& to) { end = to.joined(moments); });
  }
  constexpr const char* kName = "coalesced";
  auto running =
      std::make_shared<Running>(c10d::OpType::COALESCED, kName, rank_, sequence_, std::move(transfers), outputs);
  keep_for_abort(running);
  return c10::make_intrusive<SimWork>(
      c10d::OpType::COALESCED, rank_, sequence_, std::move(running), std::move(outputs), device, std::move(end),
      blocking_wait_);
}

void Launcher::waitForPendingWorks() {
  WithoutGil without;
  for (const auto& running : underway_->all()) {
    running->finish();
  }
}

void Launcher::shutdown() {
  WithoutGil without;
  for (const auto& running : underway_->all()) {
    if (running->is_waited_for()) {
      settle(*running);
    }
  }
  transport_->leave(/*broken=*/false);
}

void Launcher::abort() {
  WithoutGil without;
  aborted_ = true;
  for (const auto& running : underway_->all()) {
    running->abort();
  }
  transport_->leave(/*broken=*/true);
}

std::vector<Access> Launcher::accesses_of(const Operation& operation, c10::Device device) const {
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

void Launcher::tell_beginning(const Operation& operation, c10::DeviceIndex device) const {
  tell([&](Observer& to) {
    if (to.wants_beginnings()) {
      const auto stream = current_stream(device);
      to.launch_begins(stream, accesses_of(operation, stream.device()));
    }
  });
}

Moment Launcher::tell_launch(const Operation& operation, c10::DeviceIndex device) const {
  Moment end;
  tell([&](Observer& to) {
    const auto stream = current_stream(device);
    int peer = -1;
    for (const auto& call : operation.calls) {
      peer = c10d::isP2POp(call.kind) ? call.root : -1;
    }
    end = to.launched(
        {operation.name, getGroupUid(), sequence_, peer, operation.asynchronous, stream,
         accesses_of(operation, stream.device())});
  });
  return end;
}

std::optional<c10::DeviceIndex> Launcher::device_of(const Operation& operation) const {
  std::optional<c10::Device> device = getBoundDeviceId();
  const bool is_bound = device.has_value();
  for (const auto* tensors : {&operation.inputs, &operation.outputs}) {
    for (const auto& tensor : *tensors) {
      if (!device.has_value()) {
        device = tensor.device();
      }
      TORCH_CHECK_VALUE(
          tensor.device() == *device, operation.name, " got a tensor on ", tensor.device(),
          is_bound ? ", but its group is bound to " : " and one on ", *device,
          is_bound ? "." : "; all tensors of a call must be on one device.");
    }
  }
  const bool has_tensors = !operation.inputs.empty() || !operation.outputs.empty();
  return has_tensors ? std::make_optional(device->index()) : std::nullopt;
}

uint64_t operations_launched_on_devices() noexcept {
  return operations_on_devices;
}

WorkPtr Launcher::launch(Operation operation) {
  TORCH_CHECK(
      !aborted_, "Cannot start ", operation.name, ": this process group of simccl was aborted. Make a new one.");
  const auto named = device_of(operation);
  const auto device = named.value_or(current_device());
  catch_up(current_stream(device)); // what it reads is there
  tell_beginning(operation, device);
  WithoutGil without;
  const bool is_collective = !c10d::isP2POp(operation.kind);
  const auto shapes = [&](const Tensors& tensors) { return is_collective ? shapes_of(tensors) : std::vector<Shape>(); };
  const Told told(operation);
  std::vector<TransferPtr> transfers;
  for (auto& call : operation.calls) {
    // A process that has one device only cannot tell it from its peers' by a number.
    call.device = named.has_value() && device_count_of_all() > 1 ? index_among_all(device) : -1;
    transfers.push_back(transport_->start(call));
  }
  if (named.has_value()) {
    ++operations_on_devices;
  }
  if (is_collective && !coalescing_) {
    ++sequence_;
  }
  auto record = is_collective ? std::make_shared<Progress>(transfers) : nullptr;
  Tensors held = operation.inputs;
  held.insert(held.end(), operation.outputs.begin(), operation.outputs.end());
  auto running = std::make_shared<Running>(
      operation.kind, operation.name, rank_, sequence_, std::move(transfers), std::move(held));
  running->set_hook(onCompletionHook_);
  running->set_record(record);
  if (is_collective) {
    record_operation(
        {operation.name, getGroupUid(), getGroupDesc(), sequence_, shapes(operation.inputs), shapes(operation.outputs),
         std::move(record)});
  }
  const bool blocks_host = blocking_wait_ || operation.kind == c10d::OpType::BARRIER;
  auto work = c10::make_intrusive<SimWork>(
      operation.kind, rank_, sequence_, running, operation.outputs, device, tell_launch(operation, device),
      blocks_host);
  keep_for_abort(running);
  if (coalescing_) {
    coalesced_.push_back(work);
  } else if (!operation.asynchronous) {
    running->let_go();
    running->finish();
  }
  return work;
}

void Launcher::keep_for_abort(const RunningPtr& running) {
  underway_->add(running);
  if (aborted_) {
    running->abort();
  }
}

} // namespace torch_ext::sim
