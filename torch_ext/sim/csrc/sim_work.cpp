#include "sim_work.h"

#include "device.h"
#include "running.h"
#include "stream.h"
#include <ATen/core/jit_type.h>
#include <ATen/ops/stack.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_observer.h"
#include "without_gil.h"

namespace torch_ext::sim {

SimWork::SimWork(
    c10d::OpType kind, int rank, uint64_t sequence, RunningPtr running, std::vector<at::Tensor> outputs,
    c10::DeviceIndex device, Moment moment, bool blocks_host)
    : c10d::Work(rank, kind),
      running_(std::move(running)),
      outputs_(std::move(outputs)),
      device_(device),
      end_{0, {running_}, std::move(moment)},
      blocks_host_(blocks_host),
      sequence_(sequence) {}

SimWork::~SimWork() {
  if (!running_->is_waited_for() && !is_part_) {
    tell(end_.moment, [this](Observer& to) {
      for (const void* data : running_->memory()) {
        to.kept_until(data, end_.moment);
      }
    });
  }
  running_->let_go();
}

bool SimWork::wait(std::chrono::milliseconds timeout) {
  {
    WithoutGil without;
    if (blocks_host_ || timeout != kNoTimeout) {
      running_->finish(timeout);
      tell(end_.moment, [this](Observer& to) { to.host_knows(end_.moment); });
    } else if (running_->advance()) {
      running_->finish(kNoTimeout); // raises where it has failed
    }
  }
  running_->mark_waited_for();
  sim::wait(current_stream(device_), end_);
  running_->let_go();
  return true;
}

bool SimWork::isCompleted() {
  if (running_->is_over()) {
    return true;
  }
  WithoutGil without;
  const bool over = running_->advance();
  if (over) {
    tell(end_.moment, [this](Observer& to) { to.host_knows(end_.moment); });
  }
  return over;
}

bool SimWork::isSuccess() const {
  return running_->is_over() && !running_->failed();
}

int SimWork::sourceRank() const {
  WithoutGil without;
  running_->finish(kNoTimeout);
  return running_->transfers().at(0)->source();
}

void SimWork::abort() {
  WithoutGil without;
  running_->abort();
}

FuturePtr SimWork::getFuture() {
  WithoutGil without;
  // Before the lock, because it may call the completion hook.
  if (outputs_.empty()) {
    settle(*running_); // without a tensor there is no stream that could wait for it
  } else {
    running_->advance();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_ == nullptr) {
    future_ = make_future();
  }
  return future_;
}

// Whether hooks expect one tensor with a row for each rank, as NCCL's futures hold it.
bool SimWork::gathers_alike() {
  return retrieveOpType() == c10d::OpType::ALLGATHER &&
      std::all_of(outputs_.begin(), outputs_.end(), [this](const auto& tensor) {
           return tensor.sizes() == outputs_.front().sizes();
         });
}

FuturePtr SimWork::make_future() {
  std::vector<c10::Device> devices;
  if (!outputs_.empty()) {
    devices.emplace_back(kSim, device_);
  }
  auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  if (const auto why = running_->why()) {
    made->setError(why);
  } else if (gathers_alike()) {
    const c10::StreamGuard guard(next_stream(device_, /*high_priority=*/false));
    sim::wait(current_stream(device_), end_);
    made->markCompleted(c10::IValue(std::vector<at::Tensor>{at::stack(outputs_)}));
  } else {
    const AtEnd at_end(device_, end_);
    made->markCompleted(c10::IValue(outputs_));
  }
  return made;
}

} // namespace torch_ext::sim
