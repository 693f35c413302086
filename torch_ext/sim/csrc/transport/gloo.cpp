// The transport between ranks that cannot share memory: a gloo backend of the same group.
//
// Element types that gloo lacks travel as bytes, lists of unequal sizes as broadcasts, a reduce-scatter as an
// all-reduce. gloo moves bytes on its own threads; the last step of a call runs on the thread that waits.
//
// Note [States of a collective over gloo]
//
//   queued ---> compared ---> carried ---> over       the last step has run
//      |            |            |
//      `------------`------------`-------> over       with an error: ranks disagree, gloo fails, time limit, abort
//
//   queued     behind earlier collectives of the group, which end first
//   compared   all ranks have exchanged their calls, which agree; gloo itself would mix up calls that differ
//   carried    gloo has moved the bytes
//
// One thread for each transport takes collectives through the first two states, so peers do not depend on this rank's
// waits. It starts with the first collective; gloo has threads anyway.
//
// Note [Giving up]
// A transfer between two ranks can be aborted. A collective that gloo has begun cannot: gloo continues it until its
// time limit, on memory that its works keep alive, and the result is ignored.
//
// Note [Letters over gloo]
// gloo ends the process of a receiver that expects another size, and copies bytes without regard to types. So a sender
// puts an envelope before its data, and a receiver requests the data after it has read the envelope. Envelopes and data
// use separate gloo tags, each in order: of receives from one sender, the one that was started first reads its envelope
// and requests its data first.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/functional.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unistd.h>

#include "../host_tensors.h"
#include "../std.h"
#include "fingerprint.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using GlooWork = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

// gloo's works of a collective, and the step that runs once when all of them have succeeded.
struct GlooWorks {
  std::vector<GlooWork> works;
  std::function<void()> then = nullptr;
};

// Returns `host`, as bytes if gloo does not know its type. For operations that only copy.
at::Tensor known(const at::Tensor& host) {
  switch (host.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return host;
    default:
      return host.view(at::kByte);
  }
}

Tensors known(const Tensors& hosts) {
  return c10::fmap(hosts, [](const at::Tensor& host) { return known(host); });
}

template <typename Options>
Options with_timeout(const Call& call) {
  Options options;
  options.timeout = call.timeout;
  return options;
}

template <typename Options>
Options with_root(const Call& call, int64_t root) {
  auto options = with_timeout<Options>(call);
  options.rootRank = root;
  return options;
}

c10d::AllreduceOptions all_reduce_options(const Call& call) {
  auto options = with_timeout<c10d::AllreduceOptions>(call);
  options.reduceOp = call.reduction->transport_op();
  return options;
}

// Whether no rank has any elements, which gloo refuses to reduce. One rank cannot know that of an all-to-all.
bool is_empty(const Call& call) {
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  return call.kind != OpType::ALLTOALL && std::all_of(call.inputs.begin(), call.inputs.end(), is_empty) &&
      std::all_of(call.outputs.begin(), call.outputs.end(), is_empty);
}

// The list of a gather or a scatter, which only the root has.
TensorLists list_of(const Tensors& hosts) {
  return hosts.empty() ? TensorLists() : TensorLists{known(hosts)};
}

// gloo uses the buffers of all ranks for partial results: a call's inputs are copies.
GlooWorks reduce(c10d::Backend& gloo, const Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor to = call.outputs.empty() ? at::Tensor() : call.outputs.front();
  const at::Tensor buffer = reduction.source(call.inputs.front());
  Tensors buffers{buffer};
  const auto then = [reduction, buffer, to] {
    if (to.defined()) {
      reduction.finish(buffer, to);
    }
  };
  if (call.kind == OpType::REDUCE) {
    auto options = with_root<c10d::ReduceOptions>(call, call.root);
    options.reduceOp = reduction.transport_op();
    return {{gloo.reduce(buffers, options)}, then};
  }
  return {{gloo.allreduce(buffers, all_reduce_options(call))}, then};
}

GlooWorks reduce_scatter(c10d::Backend& gloo, const Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor buffer = reduction.source_copy(at::cat(call.inputs));
  Tensors buffers{buffer};
  const auto sizes = numels(call.inputs);
  const auto rank = gloo.getRank();
  const auto before = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
  const at::Tensor own = buffer.narrow(0, before, sizes[static_cast<size_t>(rank)]);
  return {{gloo.allreduce(buffers, all_reduce_options(call))}, [reduction, own, to = call.outputs.front()] {
            reduction.finish(own, to);
          }};
}

GlooWorks all_gather(c10d::Backend& gloo, const Call& call) {
  const auto& input = call.inputs.front();
  const bool equal = std::all_of(call.outputs.begin(), call.outputs.end(), [&](const auto& output) {
    return output.numel() == input.numel();
  });
  if (equal) {
    TensorLists outputs{known(call.outputs)};
    Tensors inputs = known(call.inputs);
    return {{gloo.allgather(outputs, inputs, with_timeout<c10d::AllgatherOptions>(call))}};
  }
  GlooWorks parts;
  for (size_t root = 0; root < call.outputs.size(); ++root) {
    Tensors one{known(call.outputs[root])};
    if (root == static_cast<size_t>(gloo.getRank())) {
      one.front().copy_(known(input));
    }
    parts.works.push_back(gloo.broadcast(one, with_root<c10d::BroadcastOptions>(call, static_cast<int64_t>(root))));
  }
  return parts;
}

// gloo takes one tensor for each side, split by numbers of elements.
GlooWorks exchange(c10d::Backend& gloo, const Call& call) {
  const Tensors from = known(call.inputs), to = known(call.outputs);
  auto to_sizes = numels(to), from_sizes = numels(from);
  at::Tensor flat_from = at::cat(from);
  at::Tensor flat_to = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t{0})}, flat_from.options());
  auto work = gloo.alltoall_base(flat_to, flat_from, to_sizes, from_sizes, with_timeout<c10d::AllToAllOptions>(call));
  return {{std::move(work)}, [flat_to, to] {
            const auto parts = flat_to.split_with_sizes(numels(to));
            for (size_t i = 0; i < parts.size(); ++i) {
              to[i].copy_(parts[i]);
            }
          }};
}

// Begins a collective, and does not wait. A barrier has nothing to begin: the comparison of calls synchronizes the
// ranks.
GlooWorks begin_on_gloo(c10d::Backend& gloo, Call& call) {
  if (is_empty(call)) {
    return {};
  }
  switch (call.kind) {
    case OpType::BROADCAST: {
      Tensors tensors{known(call.inputs.empty() ? call.outputs.front() : call.inputs.front())};
      return {{gloo.broadcast(tensors, with_root<c10d::BroadcastOptions>(call, call.root))}};
    }
    case OpType::ALLREDUCE:
    case OpType::REDUCE:
      return reduce(gloo, call);
    case OpType::REDUCE_SCATTER:
      return reduce_scatter(gloo, call);
    case OpType::ALLGATHER:
      return all_gather(gloo, call);
    case OpType::GATHER: {
      auto outputs = list_of(call.outputs);
      Tensors inputs = known(call.inputs);
      return {{gloo.gather(outputs, inputs, with_root<c10d::GatherOptions>(call, call.root))}};
    }
    case OpType::SCATTER: {
      auto inputs = list_of(call.inputs);
      Tensors outputs = known(call.outputs);
      return {{gloo.scatter(outputs, inputs, with_root<c10d::ScatterOptions>(call, call.root))}};
    }
    case OpType::ALLTOALL:
      return exchange(gloo, call);
    case OpType::BARRIER:
      return {};
    default:
      TORCH_INTERNAL_ASSERT(false, call.name, " is no collective of a transport's");
  }
}

std::runtime_error was_aborted(const Call& call) {
  return std::runtime_error(c10::str("simccl: ", call.name, " was aborted."));
}

// A collective under way: see Note [States of a collective over gloo]. It counts as over when it is carried; the last
// step is left to the first that waits.
class GlooCollective final : public Awaited, public std::enable_shared_from_this<GlooCollective> {
 public:
  GlooCollective(Call call, std::shared_ptr<const Group> group)
      : Awaited(std::move(group), call.what()), call(std::move(call)) {}

  void finish(std::chrono::milliseconds timeout) override {
    Awaited::finish(timeout);
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto then = std::exchange(then_, nullptr)) {
      try {
        // A thread outside of inference mode may write views made in it only below autograd.
        at::AutoDispatchBelowADInplaceOrView below;
        then();
      } catch (...) {
        why_ = std::current_exception();
      }
    }
    if (why_) {
      std::rethrow_exception(why_);
    }
    call.inputs.clear(); // the operation may live on
    call.outputs.clear();
  }

  // For the worker. Waits for gloo's works and raises the first failure, even if no local thread waits for the
  // collective any more, because peers do. Raises at once if the group is abandoned.
  void wait_for(const std::vector<GlooWork>& works) {
    // gloo's threads may outlive the wait.
    struct Left {
      size_t works;
      std::exception_ptr why;
    };
    const auto left = std::make_shared<Left>(works.size());
    for (const auto& work : works) {
      work->getFuture()->addCallback(
          [self = shared_from_this(), left](c10::ivalue::Future& done) {
            std::lock_guard<std::mutex> lock(self->mutex_);
            --left->works;
            if (done.hasError() && !left->why) {
              left->why = done.exception_ptr();
            }
            self->changed_.notify_all();
          },
          /*uses_future=*/false);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return abandoned_ || left->works == 0; }); // gloo has its own time limit
    if (left->works > 0) {
      throw was_aborted(call);
    }
    if (left->why) {
      std::rethrow_exception(left->why);
    }
  }

  // Called when all of gloo's works are over.
  void carried(std::function<void()> then) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) {
      then_ = std::move(then);
      over_ = true;
      changed_.notify_all();
    }
  }

  void abandon() {
    std::lock_guard<std::mutex> lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
  }

  Call call; // the worker's until carried

 private:
  std::function<void()> then_; // guarded by mutex_, as the next
  bool abandoned_ = false;
};

constexpr int kEnvelopes = 0, kData = 1; // tags of gloo

struct Envelope {
  int64_t elements;
  Turn turn;
  int8_t type;
  char site[kSiteBytes];
};

at::Tensor envelope_of(const Call& call) {
  at::Tensor bytes = at::zeros({sizeof(Envelope)}, at::kByte);
  if (call.kind == OpType::SEND) {
    auto& written = *reinterpret_cast<Envelope*>(bytes.mutable_data_ptr<uint8_t>());
    written.elements = call.inputs.front().numel();
    written.turn = call.turn;
    written.type = static_cast<int8_t>(call.inputs.front().scalar_type());
    copy_text(written.site, kSiteBytes, call.site);
  }
  return bytes;
}

// A transfer under way. Has its own thread from its start to its end: gloo has none for a transfer, and a peer's send
// ends only after the receiver has requested the data.
class GlooLetter final : public Awaited {
 public:
  // earlier: receives from the same sender that were started before this one.
  GlooLetter(
      c10::intrusive_ptr<c10d::Backend> gloo, Call call, std::vector<std::shared_ptr<GlooLetter>> earlier,
      std::shared_ptr<const Group> group)
      : Awaited(std::move(group), call.what()),
        gloo_(std::move(gloo)),
        call_(std::move(call)),
        envelope_(envelope_of(call_)),
        earlier_(std::move(earlier)) {
    Tensors envelope{envelope_};
    if (call_.kind == OpType::SEND) {
      works_.push_back(gloo_->send(envelope, call_.root, kEnvelopes));
      Tensors data{call_.inputs.front().view(at::kByte)};
      works_.push_back(gloo_->send(data, call_.root, kData));
    } else {
      works_.push_back(gloo_->recv(envelope, call_.root, kEnvelopes));
    }
    thread_ = std::thread([this] { run(); });
  }
  ~GlooLetter() override {
    give_up(std::make_exception_ptr(std::runtime_error(c10::str("simccl: ", call_.name, " was given up."))));
    thread_.join();
  }

  void abort(const std::exception_ptr& why) override { give_up(why); }

  const Call& call() const { return call_; }

 private:
  void give_up(const std::exception_ptr& why) {
    if (end(why)) {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto works = works_;
      lock.unlock();
      for (const auto& work : works) {
        work->abort();
      }
    }
  }

  void run() {
    at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::finish
    std::exception_ptr why;
    try {
      if (call_.kind == OpType::SEND) {
        wait_for(works_[0]);
        wait_for(works_[1]);
      } else {
        receive();
      }
    } catch (...) {
      why = std::current_exception();
    }
    call_.inputs.clear(); // the operation may live on
    call_.outputs.clear();
    end(why);
  }

  void wait_for(const GlooWork& work) const {
    if (!work->wait(kNoTimeout)) {
      throw was_aborted(call_);
    }
  }

  void wait_for_earlier() {
    constexpr std::chrono::milliseconds kSlice{20}; // interval of checks for an abort of this transfer
    for (const auto& earlier : std::exchange(earlier_, {})) {
      std::unique_lock<std::mutex> lock(earlier->mutex_);
      while (!earlier->changed_.wait_for(lock, kSlice, [&] { return earlier->asked_ || earlier->over_; })) {
        lock.unlock();
        if (advance()) {
          return;
        }
        lock.lock();
      }
    }
  }

  // Reads the envelope and receives the data; then raises the difference between the ranks, if any.
  void receive() {
    wait_for_earlier();
    wait_for(works_.front());
    const auto& sent = *reinterpret_cast<const Envelope*>(envelope_.const_data_ptr<uint8_t>());
    const auto type = static_cast<at::ScalarType>(sent.type);
    const auto& to = call_.outputs.front();
    const bool agrees = sent.elements == to.numel() && type == to.scalar_type();
    // Receive even data that does not fit: the next letter comes after it.
    Tensors data{
        agrees ? to.view(at::kByte)
               : at::empty({sent.elements * static_cast<int64_t>(c10::elementSize(type))}, at::kByte)};
    const GlooWork work = gloo_->recv(data, call_.root, kData);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      works_.push_back(work);
      asked_ = true;
      changed_.notify_all();
      if (over_) {
        work->abort();
      }
    }
    wait_for(work);
    if (!agrees) {
      std::rethrow_exception(group_->failure(unequal_letter(
          group_->called(call_.root), sent.elements, sent.type, sent.site, group_->called(group_->rank), call_)));
    }
    if (auto message = mutual_block(group_->called(call_.root), sent.turn, sent.site, call_); !message.empty()) {
      std::rethrow_exception(group_->failure(message));
    }
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  Call call_; // its tensors: used by the thread only
  const at::Tensor envelope_;
  std::vector<std::shared_ptr<GlooLetter>> earlier_; // used by the thread only
  std::vector<GlooWork> works_;                      // guarded by mutex_; the envelope's first
  bool asked_ = false;                               // guarded by mutex_; a receive has requested its data
  std::thread thread_;
};

// One rank's description of a collective: its number, its counts (most for an all-to-all), and its fingerprint.
at::Tensor description_of(const Call& call, uint64_t number, size_t size) {
  const Counts counts = counts_of(call);
  const Fingerprint print = fingerprint_of(call, counts);
  const size_t counts_bytes = 2 * size * sizeof(int64_t);
  at::Tensor bytes = at::zeros({static_cast<int64_t>(sizeof number + counts_bytes + sizeof print)}, at::kByte);
  auto* to = bytes.mutable_data_ptr<uint8_t>();
  std::memcpy(to, &number, sizeof number);
  copy_bytes(to + sizeof number, counts.data(), counts.size() * sizeof(int64_t));
  std::memcpy(to + sizeof number + counts_bytes, &print, sizeof print);
  return bytes;
}

Participant read_description(const at::Tensor& bytes, int64_t global_rank, size_t size) {
  const auto* counts = reinterpret_cast<const int64_t*>(bytes.const_data_ptr<uint8_t>() + sizeof(uint64_t));
  const auto* print = reinterpret_cast<const Fingerprint*>(counts + 2 * size);
  return {global_rank, print, {counts, print->count_size}};
}

class Gloo final : public Transport {
 public:
  Gloo(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Group> group)
      : Transport(std::move(group)), backend_(std::move(backend)) {
    backend_->setGroupDesc(kTransportDescription);
  }

  ~Gloo() override {
    bool broken = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      broken = broken_;
      changed_.notify_all();
    }
    if (worker_.joinable()) {
      if (getpid() == group_->owner) {
        worker_.join();
      } else {
        worker_.detach(); // a forked child has no such thread
      }
    }
    if (broken) {
      // gloo's destructor waits for its collectives, which cannot be stopped and may have lost their peers.
      backend_.release();
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
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = broken_ || broken;
    ending_ = ending_ || broken;
    if (broken && current_ != nullptr) {
      current_->abandon();
    }
    changed_.notify_all();
  }

 private:
  TransferPtr begin(Call call) override {
    at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::finish
    // gloo's threads and the worker read the inputs later, when the program may have freed them.
    call.inputs = c10::fmap(call.inputs, [](const at::Tensor& input) { return input.clone(); });
    std::lock_guard<std::mutex> lock(mutex_);
    if (c10d::isP2POp(call.kind)) {
      return begin_letter(std::move(call));
    }
    auto made = std::make_shared<GlooCollective>(std::move(call), group_);
    queued_.push_back(made);
    if (!worker_.joinable()) {
      worker_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
    return made;
  }

  TransferPtr begin_letter(Call call) {
    std::vector<std::shared_ptr<GlooLetter>> earlier;
    std::erase_if(receiving_, [&](const auto& weak) {
      const auto letter = weak.lock();
      if (letter == nullptr || letter->advance()) {
        return true;
      }
      if (call.kind == OpType::RECV && letter->call().root == call.root) {
        earlier.push_back(letter);
      }
      return false;
    });
    const bool is_send = call.kind == c10d::OpType::SEND;
    auto made = std::make_shared<GlooLetter>(backend_, std::move(call), std::move(earlier), group_);
    if (!is_send) {
      receiving_.push_back(made);
    }
    return made;
  }

  std::shared_ptr<GlooCollective> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ending_ || !queued_.empty(); });
    if (broken_ || queued_.empty()) {
      return current_ = nullptr;
    }
    current_ = queued_.front();
    queued_.pop_front();
    return current_;
  }

  void work() {
    at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::finish
    uint64_t number = 0;
    while (const auto collective = next()) {
      try {
        compare(*collective, ++number);
        auto begun = begin_on_gloo(*backend_, collective->call);
        collective->wait_for(begun.works);
        collective->carried(std::move(begun.then));
      } catch (...) {
        collective->abort(std::current_exception());
      }
    }
  }

  // Raises the difference between the ranks' calls, if any.
  void compare(GlooCollective& collective, uint64_t number) {
    const auto& call = collective.call;
    const size_t size = group_->global_ranks.size();
    Tensors inputs{description_of(call, number, size)};
    TensorLists outputs(1);
    std::generate_n(std::back_inserter(outputs.front()), size, [&] { return at::empty_like(inputs.front()); });
    const auto options = with_timeout<c10d::AllgatherOptions>(call);
    try {
      collective.wait_for({backend_->allgather(outputs, inputs, options)});
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
        std::rethrow_exception(group_->disagreement(number, message));
      }
    }
    if (auto message = disagreement_of_all(ranks); !message.empty()) {
      std::rethrow_exception(group_->failure(message));
    }
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<GlooCollective>> queued_;
  std::shared_ptr<GlooCollective> current_; // that the worker runs
  std::deque<std::weak_ptr<GlooLetter>> receiving_;
  bool ending_ = false; // no more calls will be queued
  bool broken_ = false;
  std::thread worker_;
};

} // namespace

std::shared_ptr<Transport> make_gloo_transport(
    c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Group> group) {
  return std::make_shared<Gloo>(std::move(backend), std::move(group));
}

} // namespace torch_ext::sim
