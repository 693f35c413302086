// Works of the backend `simccl`.
//
// Note [When a simccl work is done]
// An operation with `async_op=False` is done when its call returns, whoever called it. An asynchronous one has read its
// inputs when its call returns; this rank's part of the rest is done by the thread that waits for it, polls it, asks
// for its future, synchronizes the device, or waits for a later operation of its group. Peers depend on none of these.
//
// `wait` blocks the calling thread, which for a device that runs kernels at once is the same as blocking its current
// stream. A future is complete when it is handed out, so that callbacks run on the thread that adds them: the one that
// launches, for DDP's hooks, in the same order on all ranks. An operation that failed has a future that says so.
//
// Note [Aborting]
// `abort` fails a work that is not over with a RuntimeError, for whoever waits for it and for its future.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "flight_record.h"
#include "transport/transport.h"

namespace torch_ext::sim {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class SimWork : public c10d::Work {
 public:
  // name: for messages. outputs: the device tensors that hold the result.
  SimWork(
      c10d::OpType kind, const char* name, int rank, std::vector<TransferPtr> transfers,
      std::vector<at::Tensor> outputs, uint64_t sequence);
  ~SimWork() override = default;

  // Calls `done` once, when the work has completed, whether it succeeded or not.
  void set_hook(std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook) { hook_ = std::move(hook); }

  // Tells profilers, if there are any, that it runs from now until it is over. title: outlives the work.
  void profile(const char* title, const std::vector<at::Tensor>& inputs);

  // Where to write down that it is over.
  void set_record(ProgressPtr record) { record_ = std::move(record); }

  // Whether it has completed, as far as is known without looking.
  bool is_over() const { return future_->completed(); }

  // Waits and does this rank's part. Raises nothing; the future tells.
  void drive(std::chrono::milliseconds timeout);

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

  const std::vector<TransferPtr>& transfers() const { return transfers_; }

 private:
  void complete(const std::exception_ptr& error);

  const char* name_;
  std::vector<TransferPtr> transfers_;
  std::vector<at::Tensor> outputs_;
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook_;
  ProgressPtr record_;
  FuturePtr future_;
  uint64_t sequence_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::once_flag completed_once_;
};

} // namespace torch_ext::sim
