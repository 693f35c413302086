#include "launcher.h"

#include <Python.h>

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "flight_record.h"
#include "sim_work.h"
#include "transport_view.h"

namespace torch_ext::sim {

Launcher::Launcher(c10::intrusive_ptr<c10d::Backend> transport)
    : c10d::Backend(transport->getRank(), transport->getSize()), transport_(std::move(transport)) {
  transport_->setGroupDesc(next_transport_name());
}

Launcher::~Launcher() {
  if (aborted_) {
    // The transport's destructor waits for its collectives, which cannot be stopped and may have lost their peers.
    transport_.release();
  } else if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    // The transport's destructor joins its threads, which may be letting go of the last tensor of a work: that of a
    // tensor known to Python takes the GIL.
    PyThreadState* state = PyEval_SaveThread();
    transport_.reset();
    PyEval_RestoreThread(state);
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
  auto works = std::exchange(coalesced_, {});
  Tensors outputs;
  for (const auto& work : works) {
    const auto result = work->result();
    outputs.insert(outputs.end(), result.begin(), result.end());
  }
  // Not tracked, because there may be transfers between two ranks among them: see Note [When a simccl work is done].
  return c10::make_intrusive<SimWork>(
      c10d::OpType::COALESCED, "coalesced", rank_, std::move(works), std::move(outputs), nullptr, sequence_);
}

void Launcher::waitForPendingWorks() {
  for (const auto& work : std::exchange(hooked_, {})) {
    work->wait();
  }
}

void Launcher::abort() {
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
}

WorkPtr Launcher::launch(const Operation& operation) {
  TORCH_CHECK(
      !aborted_, "Cannot start ", operation.name, ": this process group of simccl was aborted. Make a new one.");
  const bool is_part = depth_ > 0;
  const bool is_collective = !c10d::isP2POp(operation.kind);
  const auto transfers_before = transport_->getSequenceNumberForGroup();
  auto started = start(operation);
  if (is_collective && !is_part && !coalescing_) {
    ++sequence_;
  }
  auto work = c10::make_intrusive<SimWork>(
      operation.kind, operation.name, rank_, std::move(started.works), operation.outputs, std::move(started.finish),
      sequence_);
  if (!is_part) {
    work->set_hook(onCompletionHook_);
  }
  if (is_collective && !is_part) {
    record_operation(
        {transport_->getGroupDesc(), transfers_before + 1, transport_->getSequenceNumberForGroup(), operation.name,
         getGroupUid(), getGroupDesc(), sequence_, shapes_of(operation.inputs), shapes_of(operation.outputs)});
  }
  if (is_collective) {
    work->track();
  }
  if (!is_part) {
    remember(work);
  }
  return work;
}

WorkPtr Launcher::launch_parts(
    c10d::OpType kind, const char* name, const Tensors& inputs, const Tensors& outputs, size_t count,
    std::function<WorkPtr(size_t)> part) {
  return launch(
      {kind, name, inputs, outputs, [count, part = std::move(part)] {
         Started parts;
         for (size_t i = 0; i < count; ++i) {
           parts.works.emplace_back(part(i));
         }
         return parts;
       }});
}

Started Launcher::start(const Operation& operation) {
  struct Depth {
    explicit Depth(int& value) : value_(++value) {}
    ~Depth() { --value_; }
    int& value_;
  } depth(depth_);
  return operation.start();
}

void Launcher::remember(const c10::intrusive_ptr<SimWork>& work) {
  if (coalescing_) {
    coalesced_.emplace_back(work);
  }
  if (onCompletionHook_) {
    std::erase_if(hooked_, [](const auto& earlier) { return earlier->is_over(); });
    hooked_.push_back(work);
  }
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
