// How operations of the backend `simccl` start, and what is kept of them while they run.
//
// Note [Where operations start]
// Every operation, be it a collective or a transfer between two ranks, is described by an Operation and handed to
// `Launcher::launch` before anything of it has moved. What is to come between a program and its communication has its
// place there: a fault plan that delays, drops or breaks an operation, a check of what it reads and writes against what
// streams do, a queue that starts it later. An operation that consists of others launches its parts from its `start`.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "sim_work.h"
#include "transport_view.h"

namespace torch_ext::sim {

// The transfers of an operation that has started, and the step that runs once when all of them have succeeded.
struct Started {
  std::vector<WorkPtr> works;
  std::function<void()> finish = nullptr;
};

struct Operation {
  c10d::OpType kind;
  const char* name; // as flight records have it
  Tensors inputs;   // device tensors
  Tensors outputs;  // device tensors, which the work hands out
  std::function<Started()> start;
};

// A backend without its operations. One thread at a time drives it; `abort` may be called from any.
class Launcher : public c10d::Backend {
 public:
  explicit Launcher(c10::intrusive_ptr<c10d::Backend> transport);
  ~Launcher() override;

  // The group's collectives, so that its ranks agree on the number: the transport counts what it carries, transfers
  // between two ranks and the parts of a collective among it.
  void setSequenceNumberForGroup() override { sequence_ = 0; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = std::move(hook);
  }
  void waitForPendingWorks() override;

  // Fails every work that is not over with a RuntimeError for whoever waits for it, and every operation from now on.
  void abort() override;

 protected:
  WorkPtr launch(const Operation& operation);

  // Launches an operation that consists of `count` others; `part` launches each.
  WorkPtr launch_parts(
      c10d::OpType kind, const char* name, const Tensors& inputs, const Tensors& outputs, size_t count,
      std::function<WorkPtr(size_t)> part);

  c10::intrusive_ptr<c10d::Backend> transport_;

 private:
  Started start(const Operation& operation);
  void remember(const c10::intrusive_ptr<SimWork>& work);

  uint64_t sequence_ = 0;
  int depth_ = 0; // how many operations are just being started; more than one: a part
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  std::vector<c10::intrusive_ptr<SimWork>> hooked_; // with a hook only, which hears of works that nobody holds on to
  std::mutex running_mutex_;
  std::vector<c10::weak_intrusive_ptr<SimWork>> running_; // guarded by running_mutex_
  std::atomic<bool> aborted_{false};
};

} // namespace torch_ext::sim
