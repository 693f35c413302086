#include "running.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "profiler.h"
#include "transport/transport.h"

namespace torch_ext::sim {

using SteadyClock = std::chrono::steady_clock;

Running::Running(
    c10d::OpType kind, const char* name, int rank, uint64_t sequence, std::vector<TransferPtr> transfers,
    std::vector<at::Tensor> held)
    : kind_(kind),
      name_(name),
      rank_(rank),
      sequence_(sequence),
      transfers_(std::move(transfers)),
      device_(held.empty() ? c10::DeviceIndex(-1) : held.front().device().index()),
      held_(std::move(held)) {
  for (const auto& tensor : held_) {
    pins_.add(tensor.storage().data());
  }
}

std::exception_ptr Running::why() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void Running::end(const std::exception_ptr& why) {
  const auto now = SteadyClock::now();
  std::vector<at::Tensor> dropped; // with no lock held: tensors may be known to Python
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_over()) {
      return;
    }
    why_ = why;
    over_at_ = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    pins_.clear();
    if (is_let_go_) {
      dropped.swap(held_);
    }
  }
  tell_profiler();
  if (record_ != nullptr) {
    record_->finish();
  }
  if (hook_) {
    try {
      hook_(std::make_shared<c10d::WorkInfo>(kind_, sequence_, started_, now, now - started_));
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      why_ = why_ ? why_ : std::current_exception();
    }
  }
}

void Running::tell_profiler() const {
  if (is_profiling() && device_ >= 0 && launched_by_ != 0) {
    const auto started = std::chrono::duration_cast<std::chrono::nanoseconds>(started_.time_since_epoch()).count();
    record_device_work({c10::str("simccl:", name_), device_, kLaneRow, started, over_at_, launched_by_});
  }
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
  end(why);
}

void Running::let_go() {
  std::vector<at::Tensor> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  is_let_go_ = true;
  if (is_over()) {
    dropped.swap(held_);
  }
}

std::vector<const void*> Running::memory() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const void*> found;
  found.reserve(held_.size());
  for (const auto& tensor : held_) {
    found.push_back(tensor.storage().data());
  }
  return found;
}

void settle(Running& one) noexcept {
  try {
    one.finish(kNoTimeout);
  } catch (...) {
    return; // whoever waits for it is told
  }
}

void Underway::add(const RunningPtr& one) {
  // They end in order, nearly: to ask the first is enough, and asking costs.
  std::vector<RunningPtr> over;
  while (true) {
    RunningPtr first;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!running_.empty()) {
        first = running_.front();
      }
      if (first == nullptr) {
        break;
      }
    }
    if (!first->advance()) {
      break;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase(running_, first);
    over.push_back(first);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(running_, [&](const RunningPtr& earlier) {
    if (earlier->is_over()) {
      over.push_back(earlier);
      return true;
    }
    return false;
  });
  running_.push_back(one);
}

std::vector<RunningPtr> Underway::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_;
}

} // namespace torch_ext::sim
