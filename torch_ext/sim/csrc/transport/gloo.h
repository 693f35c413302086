// The transport between ranks that cannot share memory: a gloo backend of the same group.
//
// gloo_calls.h says how gloo carries a collective, gloo_letter.h how a transfer between two ranks. It moves bytes on
// its own threads, while inputs are read; the last step of a call runs on the thread that waits.
//
// Note [States of a collective over gloo]
//
//   queued ---> compared ---> carried ---> over       the last step has run
//      |            |            |
//      `------------`------------`-------> over       with an error: ranks disagree, gloo fails, time limit, abort
//
//   queued     behind earlier collectives of the group, which end first
//   compared   all ranks have said what they called, and it agrees; gloo itself would mix up what does not
//   carried    gloo has moved the bytes
//
// One thread for each transport takes collectives through the first two states, so peers depend on nobody's wait. It
// starts with the first collective, and gloo has threads of its own anyway.
//
// Note [Giving up]
// A transfer between two ranks can be aborted. A collective that gloo has begun cannot: gloo goes on with it until its
// time limit, on memory that its works keep alive, and nobody listens.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "gloo_collective.h"
#include "gloo_letter.h"
#include "transport.h"

namespace torch_ext::sim {

class Gloo final : public Transport {
 public:
  // any_device: whether several ranks may use one device, as with gloo on CUDA.
  Gloo(
      c10::intrusive_ptr<c10d::Backend> backend, std::vector<int64_t> global_ranks, std::chrono::milliseconds timeout,
      bool any_device);
  ~Gloo() override;

  TransferPtr start(Call call) override;
  const char* kind() const override { return "gloo"; }
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout() const override { return timeout_; }
  void set_name(const std::string& name) override;
  void settle() override;
  void leave(bool broken) override;

 private:
  TransferPtr start_letter(Call call);
  void work();
  std::shared_ptr<GlooCollective> next();
  // Raises what the ranks disagree in.
  void compare(GlooCollective& collective, uint64_t number);
  std::string called(size_t rank) const { return c10::str("rank ", global_ranks_[rank]); }
  std::string self() const { return called(static_cast<size_t>(backend_->getRank())); }

  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::vector<int64_t> global_ranks_;
  const bool any_device_;
  const pid_t owner_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  std::string name_;
  std::deque<std::shared_ptr<GlooCollective>> queued_;
  std::shared_ptr<GlooCollective> last_;
  std::shared_ptr<GlooCollective> current_; // the worker's
  std::deque<std::weak_ptr<GlooLetter>> receiving_;
  bool ending_ = false; // nothing more will be queued
  bool broken_ = false;
  std::thread worker_;
};

} // namespace torch_ext::sim
