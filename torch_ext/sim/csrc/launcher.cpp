#include "launcher.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "flight_record.h"
#include "kernel.h"
#include "sim_work.h"
#include "stream.h"
#include "transport/transport.h"
#include "transport_view.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

struct Transports {
  std::mutex mutex;
  std::set<std::shared_ptr<Transport>> alive;
};

// Never freed: groups may outlive static objects.
Transports& transports() {
  static auto* made = new Transports();
  return *made;
}

// What profilers call an operation. Kept, because they refer to it after the operation.
const char* title_of(const char* name) {
  static auto* made = new std::map<std::string, std::string>();
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  return made->try_emplace(name, std::string("simccl:") + name).first->second.c_str();
}

} // namespace

Launcher::Launcher(std::shared_ptr<Transport> transport, int rank, int size)
    : c10d::Backend(rank, size), transport_(std::move(transport)) {
  std::lock_guard<std::mutex> lock(transports().mutex);
  transports().alive.insert(transport_);
}

Launcher::~Launcher() {
  WithoutGil without;
  transport_->leave(/*broken=*/false);
  {
    std::lock_guard<std::mutex> lock(transports().mutex);
    transports().alive.erase(transport_);
  }
  transport_.reset();
}

void settle_collectives() {
  WithoutGil without;
  std::vector<std::shared_ptr<Transport>> alive;
  {
    std::lock_guard<std::mutex> lock(transports().mutex);
    alive.assign(transports().alive.begin(), transports().alive.end());
  }
  for (const auto& transport : alive) {
    transport->settle();
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
  for (const auto& work : std::exchange(coalesced_, {})) {
    transfers.insert(transfers.end(), work->transfers().begin(), work->transfers().end());
    const auto result = work->result();
    outputs.insert(outputs.end(), result.begin(), result.end());
  }
  auto work = c10::make_intrusive<SimWork>(
      c10d::OpType::COALESCED, "coalesced", rank_, std::move(transfers), std::move(outputs), sequence_);
  keep_for_abort(work);
  return work;
}

void Launcher::waitForPendingWorks() {
  for (const auto& work : std::exchange(hooked_, {})) {
    work->wait();
  }
}

void Launcher::abort() {
  WithoutGil without;
  std::vector<c10::weak_intrusive_ptr<SimWork>> running;
  {
    std::lock_guard<std::mutex> lock(running_mutex_);
    aborted_ = true;
    running.swap(running_);
  }
  for (const auto& weak : running) {
    if (const auto work = weak.lock()) {
      work->abort();
    }
  }
  transport_->leave(/*broken=*/true);
}

Moment Launcher::tell_launch(const Operation& operation, c10::DeviceIndex device) const {
  Moment end;
  tell([&](Observer& to) {
    const auto stream = current_stream(device);
    std::vector<Access> accesses;
    const auto add = [&](const Tensors& views, bool write) {
      for (const auto& view : views) {
        if (auto access = access_to(view, write)) {
          access->device = stream.device(); // a transport's views are aliases
          accesses.push_back(*access);
        }
      }
    };
    int peer = -1;
    for (const auto& call : operation.calls) {
      const bool keeps_what_it_has = call.kind == c10d::OpType::BROADCAST && call.root == rank_;
      add(call.inputs, /*write=*/false);
      add(keeps_what_it_has ? Tensors() : call.outputs, /*write=*/true);
      peer = c10d::isP2POp(call.kind) ? call.root : -1;
    }
    end = to.launched({operation.name, getGroupUid(), sequence_, peer, operation.asynchronous, stream, accesses});
  });
  return end;
}

int Launcher::device_of(const Operation& operation) const {
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
  // A process that sees one device only cannot tell it from its peers' by a number.
  const bool has_tensors = !operation.inputs.empty() || !operation.outputs.empty();
  return has_tensors && device_count() > 1 ? device->index() : -1;
}

WorkPtr Launcher::launch(Operation operation) {
  TORCH_CHECK(
      !aborted_, "Cannot start ", operation.name, ": this process group of simccl was aborted. Make a new one.");
  const int device = device_of(operation);
  WithoutGil without;
  const bool is_collective = !c10d::isP2POp(operation.kind);
  const auto transfers_before = transport_->transfers_started();
  const auto shapes = [&](const Tensors& tensors) { return is_collective ? shapes_of(tensors) : std::vector<Shape>(); };
  std::vector<TransferPtr> transfers;
  for (auto& call : operation.calls) {
    call.device = device;
    transfers.push_back(transport_->start(call));
  }
  if (is_collective && !coalescing_) {
    ++sequence_;
  }
  tell_launch(operation, device < 0 ? current_device() : static_cast<c10::DeviceIndex>(device));
  auto record = std::make_shared<Progress>(transfers);
  auto work = c10::make_intrusive<SimWork>(
      operation.kind, operation.name, rank_, std::move(transfers), operation.outputs, sequence_);
  work->set_hook(onCompletionHook_);
  // As elsewhere, what a receive has for an input is what it fills.
  work->profile(title_of(operation.name), operation.inputs.empty() ? operation.outputs : operation.inputs);
  if (is_collective) {
    work->set_record(record);
    record_operation(
        {transport_->record_name(), transfers_before + 1, transport_->transfers_started(), operation.name,
         getGroupUid(), getGroupDesc(), sequence_, shapes(operation.inputs), shapes(operation.outputs),
         std::move(record)});
  }
  remember(work);
  if (!operation.asynchronous && !coalescing_) {
    work->wait();
  }
  return work;
}

void Launcher::remember(const c10::intrusive_ptr<SimWork>& work) {
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  if (onCompletionHook_) {
    std::erase_if(hooked_, [](const auto& earlier) { return earlier->is_over(); });
    hooked_.push_back(work);
  }
  keep_for_abort(work);
}

void Launcher::keep_for_abort(const c10::intrusive_ptr<SimWork>& work) {
  std::unique_lock<std::mutex> lock(running_mutex_);
  std::erase_if(running_, [](const auto& earlier) { return earlier.expired(); });
  running_.emplace_back(work);
  const bool too_late = aborted_;
  lock.unlock();
  if (too_late) {
    work->abort();
  }
}

} // namespace torch_ext::sim
