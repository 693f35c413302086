// How operations of the backend `simccl` start, and what is kept of them while they run.
//
// Note [Where operations start]
// Every operation, be it a collective or a transfer between two ranks, is described by an Operation and handed to
// `Launcher::launch` before anything of it has moved. What is to come between a program and its communication has its
// place there: a fault plan that delays, drops or breaks an operation, a check of what it reads and writes against what
// streams do. An operation that consists of several has a Call for each.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernel_observer.h"
#include "running.h"
#include "sim_work.h"
#include "transport/transport.h"

namespace torch_ext::sim {

struct Operation {
  c10d::OpType kind;
  const char* name; // as flight records have it
  Tensors inputs;   // device tensors
  Tensors outputs;  // device tensors, which the work hands out
  bool asynchronous;
  std::vector<Call> calls;
};

// How many operations with device tensors, be they empty, this process has started, in all groups. Any thread.
uint64_t operations_launched_on_devices() noexcept;

// A backend without its operations. One thread at a time drives it; `abort` may be called from any.
class Launcher : public c10d::Backend {
 public:
  Launcher(std::shared_ptr<Transport> transport, int rank, int size);
  ~Launcher() override;

  // The group's collectives, so that its ranks agree on the number.
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
  // Waits for what streams wait for, as NCCL does when it finalizes a communicator: peers may not have sent it yet.
  void shutdown() override;
  c10d::ErrorType getError() override { return aborted_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS; }

 protected:
  WorkPtr launch(Operation operation);

  std::shared_ptr<Transport> transport_;

 private:
  // Refuses tensors on several devices, or on one that is not the group's. Returns the device's index.
  std::optional<c10::DeviceIndex> device_of(const Operation& operation) const;
  std::vector<Access> accesses_of(const Operation& operation, c10::Device device) const;
  void tell_beginning(const Operation& operation, c10::DeviceIndex device) const;
  Moment tell_launch(const Operation& operation, c10::DeviceIndex device) const;
  void keep_for_abort(const RunningPtr& running);

  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<SimWork>> coalesced_;
  std::shared_ptr<Underway> underway_ = std::make_shared<Underway>();
  const bool blocking_wait_;
  std::atomic<bool> aborted_{false};
};

// Waits until the operations that this process has started are over, on every group.
void settle_collectives();

} // namespace torch_ext::sim
