// Transfers between two ranks over gloo.
//
// Note [Letters over gloo]
// gloo ends the process of a receiver that expects another size, and copies bytes whatever their type. So a sender puts
// an envelope before its data, and a receiver asks gloo for the data when it has read the envelope. Envelopes and data
// of a tag have gloo tags of their own, each in order: of receives that could take the same letter, the one that was
// started first reads its envelope and asks for its data first.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport.h"

namespace torch_ext::sim {

// Has a thread of its own from its start to its end: gloo has none for a transfer, and a peer's send ends only when the
// receiver has asked for the data.
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

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;

  void run();
  void wait_for_earlier();
  // Reads the envelope and asks for the data; raises what the ranks disagree in once it has come.
  void receive();
  void wait_for(const Work& work) const;
  void remember(const Work& work);
  void end(const std::exception_ptr& why);
  bool is_over();

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const Call call_; // holds the tensors
  const std::function<std::string(int)> called_;
  const at::Tensor envelope_;
  std::vector<std::shared_ptr<GlooLetter>> earlier_; // the thread's

  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  std::vector<Work> works_; // the envelope's first
  bool asked_ = false;      // a receive has asked for its data
  bool over_ = false;
  std::exception_ptr why_;
  std::atomic<int> source_{-1};
  std::thread thread_;
};

} // namespace torch_ext::sim
