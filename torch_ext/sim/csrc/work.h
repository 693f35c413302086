// Operations of the backend `simccl` that have been launched (Running), and their works.
//
// Note [Who finishes an operation]
// No background thread. Inputs are read at launch, so peers do not depend on this rank's waits. The thread that first
// needs the result does the rest of this rank's part: at a kernel or host read on a stream that waits for it, a wait
// that blocks the host, a poll, or a later operation of its group that depends on it. It calls the group's completion
// hook with no lock held; a hook's exception goes to the waiters, and the operation is over nevertheless.
//
// Note [What an operation holds]
// Its tensors, as NCCL stashes them: until `wait`, even if the operation is not over then. So a program frees the same
// memory at the same line, however late its peers are. The stream that waits may reuse the memory; on another stream
// that is a race, and the operation writes to the next owner's memory, as on a GPU, never to the host's. Likewise after
// `resize_(0)`. A work that dies without a `wait` frees the tensors too; their memory is handed out again when the
// operation is over, as NCCL's watchdog sees to it.
//
// Note [When a simccl work is done]
// As with NCCL. An operation with `async_op=False` is done when its call returns. An asynchronous one has read its
// inputs then, and belongs to the lane of its group. `wait` returns at once and makes the current stream wait for it
// (Note [What a stream waits for] in stream.h); it raises an error that is known by then, any other is raised where the
// result is due. The host blocks, and gets every error, in `wait` with a time limit, of a barrier, and where
// TORCH_EXT_SIM_BLOCKING_WAIT=1 or, for programs written for NCCL, TORCH_NCCL_BLOCKING_WAIT=1 is set when the group is
// made.
//
// A future is complete from the start, or has the error of an operation known to have failed. So callbacks run on the
// thread that adds them, for DDP's hooks in the same order on all ranks, each on a stream that waits for the operation.
//
// Note [Flight records]
// Torch's recorder accepts entries from torch's own backends only. It records nothing of `simccl` over shared memory,
// and gloo's own calls of `simccl` over gloo: an all-gather and an all-to-all for each call. work.cpp records the
// program's calls; _flight_record.py puts them in place of gloo's entries when the recorder is read.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "clock.h"
#include "profiler.h"
#include "std.h"
#include "stream.h"
#include "transport/transport.h"

namespace torch_ext::sim {

struct Shape {
  std::vector<int64_t> sizes;
  at::ScalarType type;
};

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& tensors);

// Begin and end of an operation, in nanoseconds since 1970. Any thread may call it.
class Progress {
 public:
  explicit Progress(const std::vector<std::shared_ptr<Transfer>>& transfers);
  void finish();
  int64_t begun() const { return begun_; }

  // The end; 0: not yet. Polls the transfers, because no thread may be waiting.
  int64_t finished();

  // Fails the transfers that are not over.
  void fail(const std::exception_ptr& why);

 private:
  int64_t begun_;
  std::atomic<int64_t> finished_{0};
  std::vector<std::weak_ptr<Transfer>> transfers_; // expired: over
};
using ProgressPtr = std::shared_ptr<Progress>;

struct RecordedOperation {
  std::string name; // such as "all_reduce", as NCCL's entries have it
  std::string group;
  std::string description; // of the group; empty or "undefined" without one
  uint64_t sequence;       // of the operation among the collectives, or the transfers, of its group, from 1
  std::vector<Shape> inputs;
  std::vector<Shape> outputs;
  ProgressPtr progress;
  int64_t peer = -1; // of a transfer between two ranks, global
};

// Keeps as many of the latest collectives, and of the latest transfers, as the recorder keeps entries. Safe to call
// from any thread.
void record_operation(RecordedOperation operation);

using CompletionHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

// An operation under way. Any thread may call it; call functions that block without the GIL.
class Running final : public Elsewhere {
 public:
  // name: for messages. held: device tensors; see Note [What an operation holds]. traced: its number in the trace of
  // virtual time.
  Running(
      c10d::OpType kind, const char* name, int rank, uint64_t sequence, std::vector<TransferPtr> transfers,
      std::vector<at::Tensor> held, int64_t traced = -1);

  // Call it before other threads know the operation. The hook is called once, on success or failure.
  void report_to(CompletionHook hook, ProgressPtr record, bool timed);

  c10d::OpType kind() const { return kind_; }
  int rank() const { return rank_; }
  uint64_t sequence() const { return sequence_; }
  int64_t begun() const { return started_; } // by stream_clock()

  bool advance() override;
  void finish() override { finish(kNoTimeout); }
  int64_t over_at() const override { return over_at_; }
  int64_t number() const override { return traced_; }
  bool failed() const override { return why() != nullptr; }
  Moment learned() const override { return is_over() ? learned_ : nullptr; }

  // Waits for the operation. Raises if it failed; fails it after `timeout`. kNoTimeout stands for the limit of its
  // launch.
  void finish(std::chrono::milliseconds timeout);

  // Fails the operation, unless it is over: waits for it raise RuntimeError.
  void abort();

  bool is_over() const { return over_at_ != 0; }

  // Milliseconds from launch to end. Raises RuntimeError unless the operation is over, and was timed.
  float duration() const;
  std::exception_ptr why() const;

  void let_go() { take_held(); }

  // Moves the tensors to the caller.
  std::vector<at::Tensor> take_held();

  // Marks that a stream waits for the operation, so that the host may treat it as done.
  void mark_waited_for() { is_waited_for_ = true; }
  bool is_waited_for() const { return is_waited_for_; }

  // The memory of the tensors that the operation holds.
  std::vector<const void*> memory() const;

  const std::vector<TransferPtr>& transfers() const { return transfers_; }

 private:
  void end(const std::exception_ptr& why);
  clock::Span span() const;
  void report_to_profiler() const;

  const c10d::OpType kind_;
  const char* name_;
  const int rank_;
  const uint64_t sequence_;
  const std::vector<TransferPtr> transfers_;
  const bool is_timed_by_model_ = is_virtual();
  const int64_t traced_;
  std::atomic<int64_t> started_{stream_clock()}; // in virtual time the launch, then the start
  const c10::DeviceIndex device_;                // -1 without tensors
  const int64_t launched_by_ = current_correlation();
  CompletionHook hook_;
  ProgressPtr record_;
  bool is_timed_ = false;

  Moment learned_; // before `over_at_`
  std::atomic<int64_t> over_at_{0};
  std::atomic<bool> is_waited_for_{false};
  mutable std::mutex mutex_; // guards what follows
  std::exception_ptr why_;
  std::vector<at::Tensor> held_;
};

using RunningPtr = std::shared_ptr<Running>;

// The operations of a group not known to be over: see Note [Who finishes an operation]. Any thread may call it.
class Underway {
 public:
  // Adds an operation, and forgets earlier ones that are over.
  void add(const RunningPtr& one);
  void forget();
  std::vector<RunningPtr> all() const;

 private:
  mutable std::mutex mutex_;
  std::vector<RunningPtr> running_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class SimWork : public c10d::Work {
 public:
  // outputs: the device tensors that hold the result. moment: its end, for the observer. blocks_host: for `wait`.
  // point: its end in a capture, which has not run it.
  SimWork(
      RunningPtr running, std::vector<at::Tensor> outputs, c10::DeviceIndex device, Moment moment, bool blocks_host,
      std::shared_ptr<CapturePoint> point = nullptr);
  ~SimWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return running_->why(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override;
  float getDuration() const override { return running_->duration(); }
  uint64_t getSequencenumber() const override { return running_->sequence(); }

  const RunningPtr& running() const { return running_; }
  const Moment& moment() const { return end_.moment; }
  const Event& end() const { return end_; }

 private:
  FuturePtr make_future();
  void host_learns();
  void tell_host() const;

  const RunningPtr running_;
  const std::vector<at::Tensor> outputs_;
  const c10::DeviceIndex device_;
  const Event end_;
  const bool blocks_host_;
  std::mutex mutex_;
  FuturePtr future_; // guarded by mutex_; made on first use
};

} // namespace torch_ext::sim
