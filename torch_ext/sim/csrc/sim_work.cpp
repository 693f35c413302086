#include "sim_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
    c10d::OpType kind, const char* name, int rank, std::vector<WorkPtr> transport, std::vector<at::Tensor> outputs,
    std::function<void()> finish, uint64_t sequence)
    : c10d::Work(rank, kind),
      name_(name),
      transport_(std::move(transport)),
      outputs_(std::move(outputs)),
      finish_(std::move(finish)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()), devices_of(outputs_))),
      sequence_(sequence) {}

std::exception_ptr SimWork::error(const std::string& what) const {
  return std::make_exception_ptr(std::runtime_error(c10::str("simccl on rank ", rank_, ": ", name_, " ", what)));
}

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
    over_.set_value();
  });
}

void SimWork::finish_transport(std::chrono::milliseconds timeout) {
  try {
    for (const auto& work : transport_) {
      if (!work->wait(timeout)) {
        complete(error("was aborted."));
        return;
      }
    }
    complete(nullptr);
  } catch (...) {
    complete(std::current_exception());
  }
}

bool SimWork::wait(std::chrono::milliseconds timeout) {
  if (!tracked_) {
    std::unique_lock<std::mutex> lock(transport_mutex_);
    if (!watched_ && !future_->completed()) {
      finish_transport(timeout);
    }
  }
  if (timeout != kNoTimeout && is_over_.wait_for(timeout) == std::future_status::timeout) {
    complete(
        error(c10::str("timed out: it was not over ", timeout.count(), " ms after somebody began to wait for it.")));
  }
  future_->waitAndThrow();
  return true;
}

void SimWork::watch() {
  std::unique_lock<std::mutex> lock(transport_mutex_, std::try_to_lock);
  if (tracked_ || !lock.owns_lock() || watched_ || future_->completed()) {
    return; // whoever holds the lock completes the future
  }
  watched_ = true;
  auto self = c10::intrusive_ptr<SimWork>::reclaim_copy(this);
  std::thread([self] { self->finish_transport(kNoTimeout); }).detach();
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
  if (future_->completed()) {
    return;
  }
  complete(error("was aborted."));
  for (const auto& work : transport_) {
    try {
      work->abort();
    } catch (const c10::Error&) {
      // The transport's collectives cannot be aborted: see Note [Aborting].
    }
  }
}

void SimWork::release_resources() {
  transport_.clear();
  outputs_.clear();
  finish_ = nullptr;
  hook_ = nullptr;
  future_.reset();
}

FuturePtr SimWork::getFuture() {
  watch();
  return future_;
}

} // namespace torch_ext::sim
