#include "shared_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fingerprint.h"
#include "fold.h"
#include "futex.h"
#include "group.h"
#include "lane.h"
#include "layout.h"
#include "mailbox.h"
#include "rendezvous.h"
#include "transport.h"

namespace torch_ext::sim {

SharedMemory::SharedMemory(
    std::vector<Member> members, int rank, std::vector<int64_t> global_ranks, FoldOrder order,
    std::chrono::milliseconds timeout, bool any_device)
    : group_(std::make_shared<Group>(std::move(members), rank, std::move(global_ranks), order, timeout)),
      lane_(std::make_shared<Lane>(group_)),
      mailbox_(std::make_shared<Mailbox>(group_)),
      any_device_(any_device),
      owner_(getpid()) {}

SharedMemory::~SharedMemory() {
  leave(/*broken=*/false);
}

TransferPtr SharedMemory::start(Call call) {
  call.site = site_of_call();
  if (any_device_) {
    call.device = -1;
  }
  at::AutoDispatchBelowADInplaceOrView below; // see Pending::advance
  switch (call.kind) {
    case c10d::OpType::SEND:
      return mailbox_->send(std::move(call));
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      return mailbox_->receive(std::move(call));
    default:
      return lane_->start(std::move(call));
  }
}

void SharedMemory::set_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  group_->timeout = timeout;
}

std::chrono::milliseconds SharedMemory::timeout() const {
  std::lock_guard<std::mutex> lock(group_->mutex);
  return group_->timeout;
}

void SharedMemory::set_name(const std::string& name) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  group_->name = name;
}

void SharedMemory::settle() {
  if (const auto last = lane_->last_pending()) {
    try {
      last->finish(kNoTimeout);
    } catch (const c10::Error&) {
      // Whoever waits for that one is told what became of it.
    }
  }
}

void SharedMemory::leave(bool broken) {
  auto& header = group_->header(group_->rank);
  const auto state = static_cast<GroupState>(header.state.load());
  if (getpid() != owner_ || state == GroupState::kLeft || state == GroupState::kAborted) {
    return;
  }
  header.state.store(
      static_cast<uint32_t>(broken ? GroupState::kAborted : GroupState::kLeft), std::memory_order_release);
  // Whoever waits for this rank sleeps on one of these.
  ring(group_->header(0).complete);
  for (int peer = 0; peer < group_->size(); ++peer) {
    ring(group_->header(peer).doorbell);
  }
}

} // namespace torch_ext::sim
