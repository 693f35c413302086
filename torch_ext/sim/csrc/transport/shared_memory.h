// The transport between processes, or threads, of one machine: see Note [Memory of a rank] (layout.h), Note [States of
// a collective] (lane.h), Note [Who reduces] (movement.h), Note [Letters] (mailbox.h) and Note [Agreeing on a
// transport] (rendezvous.h).
//
// Ownership: a transfer keeps the group's memory mapped, so it may outlive the transport. No thread is started; work is
// done by whoever launches, waits or polls. Destroying it waits for nothing.
#pragma once

#include "group.h"
#include "lane.h"
#include "mailbox.h"
#include "transport.h"

namespace torch_ext::sim {

class SharedMemory final : public Transport {
 public:
  SharedMemory(
      std::vector<Member> members, int rank, std::vector<int64_t> global_ranks, FoldOrder order,
      std::chrono::milliseconds timeout, bool any_device);
  ~SharedMemory() override;

  TransferPtr start(Call call) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout() const override;
  void set_name(const std::string& name) override;
  const char* kind() const override { return "shared"; }
  void settle() override;
  void leave(bool broken) override;

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Mailbox> mailbox_;
  const bool any_device_; // whether several ranks may use one device
  pid_t owner_;           // a child that was forked since then does not speak for this rank
};

} // namespace torch_ext::sim
