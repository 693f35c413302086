// Transfers between two ranks over gloo.
//
// Note [Letters over gloo]
// gloo ends the process of a receiver that expects another size, and copies bytes whatever their type. So a sender puts
// an envelope before its data, and a receiver asks gloo for the data when it has read the envelope. Envelopes and data
// of a tag have gloo tags of their own, each in order: of receives that could take the same letter, the one that was
// started first reads its envelope and asks for its data first.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport.h"

namespace torch_ext::sim {

// gloo has no thread for a transfer: it completes when somebody waits, so one is started when somebody polls, and not
// before.
class GlooLetter final : public Transfer {
 public:
  // earlier: receives that were started before this one and may take the same letter. called: a rank's name, for
  // messages.
  GlooLetter(
      c10::intrusive_ptr<c10d::Backend> gloo, Call call, std::vector<std::shared_ptr<GlooLetter>> earlier,
      std::function<std::string(int)> called);
  ~GlooLetter() override;

  bool advance() override;
  void finish(std::chrono::milliseconds timeout) override;
  void abort(const std::exception_ptr& why) override;
  int source() const override { return source_; }

  bool competes_with(const Call& other) const;
  bool is_over();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;

  void wait_for_peer(std::chrono::milliseconds timeout);
  void open(std::chrono::milliseconds timeout);
  void wait_for(const Work& work, std::chrono::milliseconds timeout) const;
  void remember(Work work);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const Call call_; // holds the tensors
  const std::function<std::string(int)> called_;
  const at::Tensor envelope_;
  int source_ = -1;

  std::mutex opening_; // held by the one thread that waits for the envelope
  std::vector<std::shared_ptr<GlooLetter>> earlier_;
  bool opened_ = false;
  std::exception_ptr disagreement_;

  std::mutex waiting_; // held by the one thread that waits for the peer
  std::mutex mutex_;   // guards what follows
  std::vector<Work> works_;
  at::Tensor data_;
  bool over_ = false;
  std::exception_ptr why_;
  std::thread watcher_;
};

} // namespace torch_ext::sim
