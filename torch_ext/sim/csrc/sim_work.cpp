#include "sim_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <set>
#include <thread>

namespace torch_ext::sim {
namespace {

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::set<c10::DeviceIndex> seen;
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && seen.insert(tensor.device().index()).second) {
      devices.push_back(tensor.device());
    }
  }
  return devices;
}

} // namespace

SimWork::SimWork(
    c10d::OpType kind, int rank, std::vector<WorkPtr> transport, std::vector<at::Tensor> outputs,
    std::function<void()> finish, uint64_t sequence)
    : c10d::Work(rank, kind),
      transport_(std::move(transport)),
      outputs_(std::move(outputs)),
      finish_(std::move(finish)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_of(outputs_))),
      sequence_(sequence) {}

void SimWork::track() {
  tracked_ = true;
  if (transport_.empty()) {
    complete(nullptr);
    return;
  }
  auto left = std::make_shared<std::atomic<size_t>>(transport_.size());
  auto self = c10::intrusive_ptr<SimWork>::reclaim_copy(this);
  for (const auto& work : transport_) {
    work->getFuture()->addCallback(
        [self, left](c10::ivalue::Future& done) {
          if (done.hasError()) {
            self->complete(done.exception_ptr());
          } else if (--*left == 0) {
            self->complete(nullptr);
          }
        },
        /*uses_future=*/false);
  }
}

void SimWork::complete(const std::exception_ptr& error) {
  std::call_once(completed_once_, [&] {
    auto failure = error;
    if (!failure && finish_) {
      try {
        // Aliases made in inference mode may not be written by a thread that is not in it, unless below autograd.
        at::AutoDispatchBelowADInplaceOrView below;
        finish_();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    finish_ = nullptr;
    if (hook_) {
      const auto now = std::chrono::steady_clock::now();
      hook_(std::make_shared<c10d::WorkInfo>(opType_, sequence_, started_, now, now - started_));
    }
    if (failure) {
      future_->setError(failure);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  });
}

bool SimWork::wait_for_transport(std::chrono::milliseconds timeout) {
  bool done = true;
  try {
    for (const auto& work : transport_) {
      done = work->wait(timeout) && done;
    }
  } catch (...) {
    complete(std::current_exception());
    throw;
  }
  return done;
}

bool SimWork::wait(std::chrono::milliseconds timeout) {
  bool done = true;
  if (tracked_) {
    done = wait_for_transport(timeout);
  } else {
    std::unique_lock<std::mutex> lock(transport_mutex_);
    if (!watched_ && !future_->completed()) {
      done = wait_for_transport(timeout);
      complete(nullptr);
    }
  }
  future_->waitAndThrow();
  return done;
}

void SimWork::watch() {
  std::unique_lock<std::mutex> lock(transport_mutex_, std::try_to_lock);
  if (tracked_ || !lock.owns_lock() || watched_ || future_->completed()) {
    return; // whoever holds the lock completes the future
  }
  watched_ = true;
  auto self = c10::intrusive_ptr<SimWork>::reclaim_copy(this);
  std::thread([self] {
    try {
      self->wait_for_transport(kNoTimeout);
      self->complete(nullptr);
    } catch (...) {
      self->complete(std::current_exception());
    }
  }).detach();
}

bool SimWork::isCompleted() {
  watch();
  return future_->completed();
}

bool SimWork::isSuccess() const {
  return future_->completed() && !future_->hasError();
}

std::exception_ptr SimWork::exception() const {
  return future_->completed() && future_->hasError() ? future_->exception_ptr() : nullptr;
}

int SimWork::sourceRank() const {
  return transport_.at(0)->sourceRank();
}

void SimWork::abort() {
  for (const auto& work : transport_) {
    work->abort();
  }
}

FuturePtr SimWork::getFuture() {
  watch();
  return future_;
}

} // namespace torch_ext::sim
