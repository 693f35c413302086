// An operation of the backend `simccl` that has been launched: what works, streams and events wait for.
//
// Note [Who finishes an operation]
// No thread does. Inputs were read at launch, so peers depend on nobody's waiting; this rank's part of the rest is done
// by the thread that first needs it: at a kernel or a host read on a stream that waits for it, at a wait that blocks
// the host, at a poll, at a later operation of its group that depends on it. Ending it calls the group's completion
// hook, on that thread and with no lock held. A hook that raises has its exception told to whoever waits; the operation
// is over all the same.
//
// Note [What an operation holds]
// Its tensors, as NCCL stashes them: until somebody has waited for it or nobody can, and at least until it is over.
// A program may free their storages all the same (`resize_(0)`); what the operation writes then lands in memory that is
// the next owner's, as on a GPU, and never in the host's.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "block_pool.h"
#include "flight_record.h"
#include "profiler.h"
#include "stream.h"
#include "transport/transport.h"

namespace torch_ext::sim {

using CompletionHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

// Any thread; what blocks, without the GIL.
class Running final : public Elsewhere {
 public:
  // name: for messages. held: device tensors.
  Running(
      c10d::OpType kind, const char* name, int rank, uint64_t sequence, std::vector<TransferPtr> transfers,
      std::vector<at::Tensor> held);

  // Before anybody else knows it. The hook is called once, whether it succeeded or not.
  void set_hook(CompletionHook hook) { hook_ = std::move(hook); }
  void set_record(ProgressPtr record) { record_ = std::move(record); }

  bool advance() override;
  void finish() override { finish(kNoTimeout); }
  int64_t over_at() const override { return over_at_; }
  bool failed() const override { return why() != nullptr; }

  // Raises where it failed, or is not over within the time limit, after which it has failed. kNoTimeout stands for the
  // limit that it was launched with.
  void finish(std::chrono::milliseconds timeout);

  // Fails it with a RuntimeError, unless it is over.
  void abort();

  bool is_over() const { return over_at_ != 0; }
  std::exception_ptr why() const;

  // Somebody has waited for it, or nobody can any more.
  void let_go();

  // Whether a stream waits for it, so that the host may take it for done.
  void mark_waited_for() { is_waited_for_ = true; }
  bool is_waited_for() const { return is_waited_for_; }

  // Where the tensors lie that it holds.
  std::vector<const void*> memory() const;

  const std::vector<TransferPtr>& transfers() const { return transfers_; }

 private:
  void end(const std::exception_ptr& why);
  void tell_profiler() const;

  const c10d::OpType kind_;
  const char* name_;
  const int rank_;
  const uint64_t sequence_;
  const std::vector<TransferPtr> transfers_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  const c10::DeviceIndex device_; // -1 without tensors
  const int64_t launched_by_ = current_correlation();
  CompletionHook hook_;
  ProgressPtr record_;

  std::atomic<int64_t> over_at_{0};
  std::atomic<bool> is_waited_for_{false};
  mutable std::mutex mutex_; // guards what follows
  std::exception_ptr why_;
  std::vector<at::Tensor> held_;
  PinnedBlocks pins_; // a storage that is held may still be resized
  bool is_let_go_ = false;
};

using RunningPtr = std::shared_ptr<Running>;

// Waits for `one`, and raises nothing: whoever waits for it is told what became of it.
void settle(Running& one) noexcept;

// The operations of a group that are not over, as far as is known: see Note [Who finishes an operation]. Any thread.
class Underway {
 public:
  // Forgets those before it that are over.
  void add(const RunningPtr& one);
  std::vector<RunningPtr> all() const;

 private:
  mutable std::mutex mutex_;
  std::vector<RunningPtr> running_;
};

} // namespace torch_ext::sim
