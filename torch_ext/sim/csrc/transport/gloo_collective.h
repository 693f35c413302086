// Collectives under way over gloo.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gloo_calls.h"
#include "transport.h"

namespace torch_ext::sim {

using GlooWork = c10::intrusive_ptr<c10d::Work>;

// See Note [States of a collective over gloo]. Any thread.
class GlooCollective final : public Transfer, public std::enable_shared_from_this<GlooCollective> {
 public:
  GlooCollective(Call call, std::string who) : call(std::move(call)), who_(std::move(who)) {}

  bool advance() override;
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override;
  int source() const override { return -1; }

  // The worker's. Waits for works of gloo's and raises what the first that failed says. That nobody waits for the
  // collective any more changes nothing, because peers do. Raises at once if the group is abandoned.
  void wait_for(const std::vector<GlooWork>& works);
  // All of gloo's works are over; the last step is left to whoever waits.
  void carried(std::function<void()> then);
  void abandon();

  Call call; // the worker's until carried; what it holds stays until the last step

 private:
  bool is_carried() const { return over_ || why_ || carried_; }
  void end();

  const std::string who_;
  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  std::function<void()> then_;
  bool carried_ = false;
  bool abandoned_ = false;
  bool over_ = false;
  std::exception_ptr why_;
};

} // namespace torch_ext::sim
