// Works of the backend `simccl`.
//
// Note [When a simccl work is done]
// The transport (gloo) moves the bytes on its own threads. A collective's work completes on such a thread, after the
// work's `finish` step has run there (dividing for AVG, copying out of a staging buffer). Point-to-point transfers have
// no thread of gloo's: they complete when somebody waits, so a watcher thread is started when the future or the state
// of one is asked for, and not before. `wait` blocks the calling thread, which for a device that runs eagerly is the
// same as blocking its current stream.
//
// Note [Aborting]
// `abort` fails a work that is not over with a RuntimeError, for whoever waits for it and for its future. A transfer
// between two ranks is really given up. A collective that the transport has begun cannot be: the transport goes on
// with it until its time limit, on memory that its works keep alive, and nobody listens.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

namespace torch_ext::sim {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class SimWork : public c10d::Work {
 public:
  // name: for messages. outputs: the device tensors that hold the result. finish: runs once, when every transport work
  // has succeeded.
  SimWork(
      c10d::OpType kind, const char* name, int rank, std::vector<WorkPtr> transport, std::vector<at::Tensor> outputs,
      std::function<void()> finish, uint64_t sequence);
  ~SimWork() override = default;

  // Calls `done` once, when the work has completed, whether it succeeded or not. Set before `track`.
  void set_hook(std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook) { hook_ = std::move(hook); }

  // Completes the future from the transport's own futures. For collectives, called once.
  void track();

  // Whether it has completed, as far as is known without asking the transport.
  bool is_over() const { return future_->completed(); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  FuturePtr getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  // A weak pointer, such as the launcher's, keeps the object: what it holds is let go of with the last owner.
  void release_resources() override;

 private:
  // Of an untracked work: waits for the transport and completes. Raises nothing; the future tells.
  void finish_transport(std::chrono::milliseconds timeout);
  void watch();
  void complete(const std::exception_ptr& error);
  std::exception_ptr error(const std::string& what) const;

  const char* name_;
  std::vector<WorkPtr> transport_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> finish_;
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook_;
  FuturePtr future_;
  uint64_t sequence_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  bool tracked_ = false;       // the transport's futures complete this work
  bool watched_ = false;       // a watcher thread does
  std::mutex transport_mutex_; // held by the one thread that waits for an untracked transport
  std::once_flag completed_once_;
  std::promise<void> over_; // the future has no wait with a time limit
  std::shared_future<void> is_over_ = over_.get_future().share();
};

} // namespace torch_ext::sim
