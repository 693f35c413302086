// The transport of a dry run (Note [Dry runs] in dry.h): no other rank exists. Peers start each collective when this
// rank does, and send what it receives at that moment.
#include "../dry.h"

#include "../clock.h"
#include "../std.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

class Over final : public Transfer {
 public:
  explicit Over(clock::Span span) : span_(span) {}

  bool advance() override { return true; }
  void finish(std::chrono::milliseconds /*timeout*/) override {}
  void abort(const std::exception_ptr& /*why*/) override {}
  clock::Span span() const override { return span_; }

 private:
  const clock::Span span_;
};

class DryTransport final : public Transport {
 public:
  using Transport::Transport;

  const char* kind() const override { return "dry"; }
  void leave(bool /*broken*/) override {}

 protected:
  TransferPtr begin(Call call) override {
    clock::Span span;
    if (call.timing.ready >= 0) {
      const bool is_transfer = c10d::isP2POp(call.kind);
      int64_t& free = free_[{is_transfer ? call.kind : c10d::OpType::BARRIER, is_transfer ? call.root : -1}];
      span.start = std::max(clock::epoch() + call.timing.ready, free);
      span.end = free = span.start + call.timing.lasts;
    }
    return std::make_shared<Over>(span);
  }

 private:
  std::map<std::pair<c10d::OpType, int>, int64_t> free_; // by lane: the end of the last call
};

} // namespace

std::shared_ptr<Transport> make_dry_transport(std::shared_ptr<Group> group) {
  return std::make_shared<DryTransport>(std::move(group));
}

} // namespace torch_ext::sim
