#include "sim_work.h"

#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "without_gil.h"

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
    c10d::OpType kind, const char* name, int rank, std::vector<TransferPtr> transfers, std::vector<at::Tensor> outputs,
    uint64_t sequence)
    : c10d::Work(rank, kind),
      name_(name),
      transfers_(std::move(transfers)),
      outputs_(std::move(outputs)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()), devices_of(outputs_))),
      sequence_(sequence) {}

void SimWork::profile(const char* title, const std::vector<at::Tensor>& inputs) {
  auto recording = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!recording->isActive()) {
    return;
  }
  recording->_setAsync(); // it may end on another thread
  const std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
  recording->before(title, c10::ArrayRef<const c10::IValue>(arguments.data(), arguments.size()));
  recordFunctionEndCallback_ = [recording] { recording->end(); };
}

void SimWork::complete(const std::exception_ptr& error) {
  std::call_once(completed_once_, [&] {
    if (record_ != nullptr) {
      record_->finish();
    }
    if (recordFunctionEndCallback_) {
      std::exchange(recordFunctionEndCallback_, nullptr)();
    }
    auto failure = error;
    if (hook_) {
      const auto now = std::chrono::steady_clock::now();
      try {
        hook_(std::make_shared<c10d::WorkInfo>(opType_, sequence_, started_, now, now - started_));
      } catch (...) {
        failure = failure ? failure : std::current_exception();
      }
    }
    if (failure) {
      future_->setError(failure);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  });
}

void SimWork::drive(std::chrono::milliseconds timeout) {
  if (future_->completed()) {
    return;
  }
  WithoutGil without;
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
  complete(failure);
}

bool SimWork::wait(std::chrono::milliseconds timeout) {
  drive(timeout);
  WithoutGil without;
  future_->waitAndThrow(); // another thread may be completing it
  return true;
}

bool SimWork::isCompleted() {
  if (!future_->completed()) {
    WithoutGil without;
    bool over = true;
    for (const auto& transfer : transfers_) {
      over = transfer->advance() && over;
    }
    if (over) {
      drive(kNoTimeout);
    }
  }
  return future_->completed();
}

bool SimWork::isSuccess() const {
  return future_->completed() && !future_->hasError();
}

std::exception_ptr SimWork::exception() const {
  return future_->completed() && future_->hasError() ? future_->exception_ptr() : nullptr;
}

int SimWork::sourceRank() const {
  return transfers_.at(0)->source();
}

void SimWork::abort() {
  if (future_->completed()) {
    return;
  }
  const auto why =
      std::make_exception_ptr(std::runtime_error(c10::str("simccl on rank ", rank_, ": ", name_, " was aborted.")));
  for (const auto& transfer : transfers_) {
    transfer->abort(why);
  }
  complete(why);
}

void SimWork::release_resources() {
  transfers_.clear();
  outputs_.clear();
  hook_ = nullptr;
  future_.reset();
}

FuturePtr SimWork::getFuture() {
  drive(kNoTimeout);
  return future_;
}

} // namespace torch_ext::sim
