// Works of the backend `simccl`.
//
// Note [When a simccl work is done]
// As NCCL has it. An operation with `async_op=False` is done when its call returns, whoever called it. An asynchronous
// one has read its inputs when its call returns and belongs to the lane of its group from then on (running.h). `wait`
// returns at once and makes the current stream wait for it (Note [What a stream waits for] in stream.h); an error that
// is known by then is raised there, any other where the result is due. The host blocks, and is told of every error,
//
//   - in `wait` with a time limit, of a barrier, and where TORCH_EXT_SIM_BLOCKING_WAIT=1 or, for programs written for
//     NCCL, TORCH_NCCL_BLOCKING_WAIT=1 is set when the group is made;
//   - where it asks which rank a message came from.
//
// A future is complete when it is handed out, and whoever waits for it makes their stream wait. So callbacks run on the
// thread that adds them: the one that launches, for DDP's hooks, in the same order on all ranks. Torch runs each on a
// stream that waits for the operation. An operation that is known to have failed has a future that says so.
//
// Note [Aborting]
// `abort` fails a work that is not over with a RuntimeError, for whoever waits for it.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "running.h"
#include "stream.h"

namespace torch_ext::sim {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class SimWork : public c10d::Work {
 public:
  // outputs: the device tensors that hold the result. moment: its end, for whoever observes. blocks_host: `wait` does.
  SimWork(
      c10d::OpType kind, int rank, uint64_t sequence, RunningPtr running, std::vector<at::Tensor> outputs,
      c10::DeviceIndex device, Moment moment, bool blocks_host);
  ~SimWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return running_->why(); }
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  FuturePtr getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  const RunningPtr& running() const { return running_; }
  const Moment& moment() const { return end_.moment; }

  // Whoever waits will wait for another work, of which this one is a part.
  void become_part() { is_part_ = true; }

 private:
  bool gathers_alike();
  FuturePtr make_future();

  const RunningPtr running_;
  const std::vector<at::Tensor> outputs_;
  const c10::DeviceIndex device_;
  const Event end_;
  const bool blocks_host_;
  const uint64_t sequence_;
  bool is_part_ = false;
  std::mutex mutex_;
  FuturePtr future_; // guarded by mutex_; made when it is asked for
};

} // namespace torch_ext::sim
