// The transport between ranks that cannot share memory: a gloo backend of the same group.
//
// Every collective is one all-to-all of bytes: each rank gets the inputs that it needs, and writes its outputs like a
// rank that finds the inputs in shared memory. gloo moves bytes on its own threads; the last step of a call runs on the
// thread that waits.
//
// Note [States of a call over gloo]
//
//   queued ---> compared ---> carried ---> over       the last step has run
//      |            |            |
//      `------------`------------`-------> over       with an error: ranks disagree, gloo fails, time limit, abort
//
//   queued     behind earlier calls of its kind: collectives, or transfers to or from one peer, each in order
//   compared   all ranks have exchanged their calls, which agree; gloo itself would mix up calls that differ
//   carried    gloo has moved the bytes
//
// One thread for each kind of call takes them through the first two states, so peers do not depend on this rank's
// waits. It starts with the first call of its kind; gloo has threads anyway.
//
// Note [Giving up]
// A transfer between two ranks can be aborted. A collective that gloo has begun cannot: gloo continues it until its
// time limit, on memory that its works keep alive, and the result is ignored.
//
// Note [Letters over gloo]
// gloo ends the process of a receiver that expects another size, and copies bytes without regard to types. So a sender
// puts an envelope before its data, and a receiver requests the data after it has read the envelope. Envelopes and data
// use separate gloo tags, each in order.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../host_tensors.h"
#include "../std.h"
#include "fingerprint.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using GlooWork = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

std::runtime_error was_aborted(const Call& call) {
  return std::runtime_error(c10::str("simccl: ", call.name, " was aborted."));
}

// A call under way: see Note [States of a call over gloo]. It counts as over when it is carried.
class GlooCall : public Awaited {
 public:
  GlooCall(c10d::Backend& gloo, Call call, std::shared_ptr<const Group> group)
      : Awaited(std::move(group), call.what()), call(std::move(call)), gloo_(gloo) {}

  // Carries the call, on the thread of its Line.
  virtual void run() = 0;

  // Makes `run` raise, if it waits.
  virtual void interrupt() = 0;

  Call call; // its thread's until carried

 protected:
  c10d::Backend& gloo_; // for `run`. Not owned: the last owner of a call may be a thread of gloo's, which gloo joins
};

// Calls that run one after the other, on a thread of their own.
class Line {
 public:
  explicit Line(const Group& group) : group_(group) {}
  ~Line() {
    end(/*now=*/false);
    if (thread_.joinable()) {
      if (getpid() == group_.owner) {
        thread_.join();
      } else {
        thread_.detach(); // a forked child has no such thread
      }
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(Line);

  void add(std::shared_ptr<GlooCall> call) {
    std::lock_guard<std::mutex> lock(mutex_);
    queued_.push_back(std::move(call));
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
  }

  // Lets the thread end after the last call; now: interrupts the current call and drops what is queued.
  void end(bool now) {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    if (now) {
      for (const auto& call : std::exchange(queued_, {})) {
        call->abort(std::make_exception_ptr(was_aborted(call->call)));
      }
      if (current_ != nullptr) {
        current_->interrupt();
      }
    }
    changed_.notify_all();
  }

 private:
  std::shared_ptr<GlooCall> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    current_ = nullptr;
    changed_.wait(lock, [this] { return ending_ || !queued_.empty(); });
    if (!queued_.empty()) {
      current_ = queued_.front();
      queued_.pop_front();
    }
    return current_;
  }

  void work() {
    at::AutoDispatchBelowADInplaceOrView below; // see Stepped::finish
    while (const auto call = next()) {
      try {
        call->run();
        call->end();
      } catch (...) {
        call->abort(std::current_exception());
      }
    }
  }

  const Group& group_; // outlives the line
  std::mutex mutex_;   // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<GlooCall>> queued_;
  std::shared_ptr<GlooCall> current_;
  bool ending_ = false; // no more calls will be queued
  std::thread thread_;
};

// One rank's description of a collective: its counts (most for an all-to-all), and its fingerprint.
at::Tensor description_of(const Call& call, size_t size) {
  const Counts counts = counts_of(call);
  const Fingerprint print = fingerprint_of(call, counts);
  const size_t counts_bytes = 2 * size * sizeof(int64_t);
  at::Tensor bytes = at::zeros({static_cast<int64_t>(counts_bytes + sizeof print)}, at::kByte);
  auto* to = bytes.mutable_data_ptr<uint8_t>();
  copy_bytes(to, counts.data(), counts.size() * sizeof(int64_t));
  std::memcpy(to + counts_bytes, &print, sizeof print);
  return bytes;
}

Participant read_description(const at::Tensor& bytes, int64_t global_rank, size_t size) {
  const auto* counts = reinterpret_cast<const int64_t*>(bytes.const_data_ptr<uint8_t>());
  const auto* print = reinterpret_cast<const Fingerprint*>(counts + 2 * size);
  return {global_rank, print, {counts, print->count_size}};
}

// How many bytes of a peer's inputs this rank needs.
int64_t bytes_from(const Call& call, int peer) {
  if (call.outputs.empty() || (is_from_root(call) && peer != call.root)) {
    return 0;
  }
  if (call.reduction.has_value()) {
    return static_cast<int64_t>(call.reduction->source_bytes(call.outputs.front()));
  }
  return static_cast<int64_t>(call.outputs[is_from_root(call) ? 0 : static_cast<size_t>(peer)].nbytes());
}

class GlooCollective final : public GlooCall, public std::enable_shared_from_this<GlooCollective> {
 public:
  GlooCollective(c10d::Backend& gloo, Call call, std::shared_ptr<const Group> group, uint64_t number)
      : GlooCall(gloo, std::move(call), std::move(group)), number_(number) {}

  void run() override {
    compare();
    const Tensors sources = c10::fmap(call.inputs, [&](const at::Tensor& input) {
      return (call.reduction.has_value() ? call.reduction->source(input) : input).view(at::kByte);
    });
    const bool is_to_root = call.kind == OpType::REDUCE || call.kind == OpType::GATHER;
    Tensors parts{at::empty({0}, at::kByte)};
    std::vector<int64_t> sent, received; // in bytes
    int64_t sum = 0;
    for (int peer = 0; peer < group_->size(); ++peer) {
      sent.push_back(0);
      if (!sources.empty() && (!is_to_root || peer == call.root)) {
        parts.push_back(sources.size() == 1 ? sources.front() : sources[static_cast<size_t>(peer)]);
        sent.back() = parts.back().numel();
      }
      received.push_back(bytes_from(call, peer));
      begins_.push_back(sum);
      sum += received.back();
    }
    at::Tensor from = at::cat(parts);
    received_ = at::empty({sum}, at::kByte);
    c10d::AllToAllOptions options;
    options.timeout = call.timeout;
    wait_for(gloo_.alltoall_base(received_, from, received, sent, options));
  }

  // The last step.
  void write() {
    write_outputs(call, *group_, {}, number_, [&](int peer, size_t /*index*/, uint64_t /*bytes*/) {
      return static_cast<const std::byte*>(received_.const_data_ptr()) + begins_[static_cast<size_t>(peer)];
    });
    call.inputs.clear(); // the operation may live on
    call.outputs.clear();
  }

  void interrupt() override {
    std::lock_guard<std::mutex> lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
  }

 private:
  // Waits for gloo and raises its failure, even if no local thread waits for the collective any more, because peers do.
  // Raises at once if the group is abandoned.
  void wait_for(const GlooWork& work) {
    const auto future = work->getFuture();
    future->addCallback(
        [self = shared_from_this()](c10::ivalue::Future& /*done*/) { // gloo's thread may outlive the wait
          std::lock_guard<std::mutex> lock(self->mutex_);
          self->changed_.notify_all();
        },
        /*uses_future=*/false);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return abandoned_ || future->completed(); }); // gloo has its own time limit
    if (!future->completed()) {
      throw was_aborted(call);
    }
    if (future->hasError()) {
      std::rethrow_exception(future->exception_ptr());
    }
  }

  // Raises the difference between the ranks' calls, if any.
  void compare() {
    const size_t size = group_->global_ranks.size();
    Tensors inputs{description_of(call, size)};
    TensorLists outputs(1);
    std::generate_n(std::back_inserter(outputs.front()), size, [&] { return at::empty_like(inputs.front()); });
    c10d::AllgatherOptions options;
    options.timeout = call.timeout;
    try {
      wait_for(gloo_.allgather(outputs, inputs, options));
    } catch (const std::exception& error) {
      const auto own = read_description(inputs.front(), -1, size);
      std::rethrow_exception(group_->failure(c10::str("in ", phrase(own), ", gloo says: ", error.what())));
    }
    std::vector<Participant> ranks;
    ranks.reserve(size);
    for (size_t peer = 0; peer < size; ++peer) {
      ranks.push_back(read_description(outputs.front()[peer], group_->global_ranks[peer], size));
    }
    for (const auto& peer : ranks) {
      if (auto message = difference(ranks[static_cast<size_t>(group_->rank)], peer); !message.empty()) {
        std::lock_guard<std::mutex> lock(group_->mutex);
        std::rethrow_exception(group_->disagreement(number_, message));
      }
    }
    if (auto message = disagreement_of_all(ranks); !message.empty()) {
      std::rethrow_exception(group_->failure(message));
    }
  }

  const uint64_t number_;
  at::Tensor received_;         // bytes, rank by rank
  std::vector<int64_t> begins_; // of each rank's bytes
  bool abandoned_ = false;      // guarded by mutex_
};

constexpr int kEnvelopes = 0, kData = 1; // tags of gloo

// A transfer between two ranks: see Note [Letters over gloo].
class GlooLetter final : public GlooCall {
 public:
  using GlooCall::GlooCall;

  void abort(const std::exception_ptr& why) override {
    end(why);
    interrupt();
  }

  void run() override {
    Tensors envelope{at::zeros({sizeof(Envelope)}, at::kByte)};
    auto& sent = *reinterpret_cast<Envelope*>(envelope.front().mutable_data_ptr<uint8_t>());
    if (call.kind == OpType::RECV) {
      wait_for({gloo_.recv(envelope, call.root, kEnvelopes)});
      receive(sent);
    } else {
      Tensors data{call.inputs.front().view(at::kByte)};
      sent = envelope_of(call);
      wait_for({gloo_.send(envelope, call.root, kEnvelopes), gloo_.send(data, call.root, kData)});
    }
    call.inputs.clear(); // the operation may live on
    call.outputs.clear();
  }

  void interrupt() override {
    std::unique_lock<std::mutex> lock(mutex_);
    interrupted_ = true;
    const auto works = works_;
    lock.unlock();
    for (const auto& work : works) {
      work->abort();
    }
  }

 private:
  void wait_for(const std::vector<GlooWork>& works) {
    std::unique_lock<std::mutex> lock(mutex_);
    works_ = works;
    const bool interrupted = interrupted_;
    lock.unlock();
    for (const auto& work : works) {
      if (interrupted) {
        work->abort();
      }
      if (!work->wait(kNoTimeout)) {
        throw was_aborted(call);
      }
    }
  }

  // Receives the data; then raises the difference between the ranks, if any.
  void receive(const Envelope& sent) {
    const auto size = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(sent.type)));
    // Receive even data that does not fit: the next letter comes after it.
    Tensors data{
        fits(sent, call) ? call.outputs.front().view(at::kByte) : at::empty({sent.elements * size}, at::kByte)};
    wait_for({gloo_.recv(data, call.root, kData)});
    if (const auto why = fault_of(*group_, sent, call)) {
      std::rethrow_exception(why);
    }
  }

  std::vector<GlooWork> works_; // guarded by mutex_: those of the current wait
  bool interrupted_ = false;    // likewise
};

class Gloo final : public Transport {
 public:
  Gloo(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Group> group)
      : Transport(std::move(group)), backend_(std::move(backend)), collectives_(*group_) {
    backend_->setGroupDesc(kTransportDescription);
  }

  ~Gloo() override {
    for (auto& [peer, letters] : letters_) {
      letters.end(/*now=*/true);
    }
    if (broken_) {
      // gloo's destructor waits for its collectives, which cannot be stopped and may have lost their peers.
      c10::intrusive_ptr<c10d::Backend>(backend_).release();
    }
  }

  const char* kind() const override { return "gloo"; }
  void set_timeout(std::chrono::milliseconds timeout) override {
    Transport::set_timeout(timeout);
    backend_->setTimeout(timeout);
  }
  void set_name(const std::string& name) override {
    Transport::set_name(name);
    backend_->setGroupUid(name);
  }
  void leave(bool broken) override {
    if (broken) {
      broken_ = true;
      collectives_.end(/*now=*/true);
    }
  }

 private:
  TransferPtr begin(Call call) override {
    at::AutoDispatchBelowADInplaceOrView below; // see Stepped::finish
    // gloo's threads and ours read the inputs later, when the program may have freed them.
    call.inputs = c10::fmap(call.inputs, [](const at::Tensor& input) { return input.clone(); });
    if (!c10d::isP2POp(call.kind)) {
      auto made = std::make_shared<GlooCollective>(*backend_, std::move(call), group_, ++collectives_begun_);
      collectives_.add(made);
      return std::make_shared<Stepped>(made, [made] { made->write(); });
    }
    auto& letters = letters_.try_emplace({call.kind, call.root}, *group_).first->second;
    auto made = std::make_shared<GlooLetter>(*backend_, std::move(call), group_);
    letters.add(made);
    return made;
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  uint64_t collectives_begun_ = 0;
  std::atomic<bool> broken_{false};
  Line collectives_;
  std::map<std::pair<OpType, int>, Line> letters_; // by kind and peer
};

} // namespace

std::shared_ptr<Transport> make_gloo_transport(
    c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Group> group) {
  return std::make_shared<Gloo>(std::move(backend), std::move(group));
}

} // namespace torch_ext::sim
