// The transport between ranks that cannot share memory: a gloo backend of the same group.
//
// What gloo lacks is expressed by what it has: element types that it does not know travel as bytes, lists of unequal
// sizes as broadcasts, a reduce-scatter as an all-reduce. It moves bytes on its own threads, while inputs are read; the
// rest of a call runs on the thread that waits. Ranks that disagree are not told: see fingerprint.h for those that are.
//
// Note [Giving up]
// A transfer between two ranks can be aborted. A collective that gloo has begun cannot: gloo goes on with it until its
// time limit, on memory that its works keep alive, and nobody listens.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport.h"

namespace torch_ext::sim {

class Gloo final : public Transport {
 public:
  explicit Gloo(c10::intrusive_ptr<c10d::Backend> backend);
  ~Gloo() override;

  TransferPtr start(Call call) override;
  void set_timeout(std::chrono::milliseconds timeout) override { backend_->setTimeout(timeout); }
  void set_name(const std::string& name) override { backend_->setGroupUid(name); }
  const std::string& record_name() const override { return record_name_; }
  uint64_t transfers_started() const override { return backend_->getSequenceNumberForGroup(); }
  void settle() override;
  void leave(bool broken) override;

 private:
  struct Begun;
  Begun begin(Call& call);
  Begun begin_transfer(Call& call);
  Begun reduce(Call& call);
  Begun reduce_scatter(Call& call);
  Begun all_gather(Call& call);
  Begun exchange(Call& call);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string record_name_;
  std::vector<std::weak_ptr<Transfer>> started_;
  bool broken_ = false;
};

} // namespace torch_ext::sim
