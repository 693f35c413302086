#include "gloo.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "../flight_record.h"
#include "../transport_view.h"
#include "transport.h"

namespace torch_ext::sim {

using c10d::OpType;
using GlooWork = c10::intrusive_ptr<c10d::Work>;

// gloo's works of a call, and the step that runs once when all of them have succeeded.
struct Gloo::Begun {
  std::vector<GlooWork> works;
  std::function<void()> then = nullptr;
};

namespace {

// What is copied travels as bytes where gloo does not know the type.
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
  Tensors views;
  for (const auto& host : hosts) {
    views.push_back(known(host));
  }
  return views;
}

// A collective's state is told by gloo's threads. A transfer between two ranks has no thread of gloo's: it completes
// when somebody waits, so one is started when somebody polls, and not before.
class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(std::vector<GlooWork> works, std::function<void()> then, Call call, bool is_collective)
      : works_(std::move(works)), then_(std::move(then)), call_(std::move(call)), is_collective_(is_collective) {}

  ~GlooTransfer() override {
    if (watcher_.joinable()) {
      works_.front()->abort();
      watcher_.join();
    }
  }

  // Of a collective, called once.
  static void track(const std::shared_ptr<GlooTransfer>& self) {
    self->left_ = self->works_.size();
    for (const auto& work : self->works_) {
      work->getFuture()->addCallback(
          [self](c10::ivalue::Future& done) {
            std::lock_guard<std::mutex> lock(self->mutex_);
            --self->left_;
            if (done.hasError() && !self->why_) {
              self->why_ = done.exception_ptr();
            }
            self->changed_.notify_all();
          },
          /*uses_future=*/false);
    }
  }

  bool advance() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_collective_) {
      return over_ || why_ || left_ == 0;
    }
    if (!over_ && !why_ && !watcher_.joinable()) {
      watcher_ = std::thread([this] { wait_for_peer(kNoTimeout); });
    }
    return over_ || why_;
  }

  void finish(std::chrono::milliseconds timeout) override {
    if (is_collective_) {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto is_over = [this] { return over_ || why_ || left_ == 0; };
      if (timeout == kNoTimeout) {
        changed_.wait(lock, is_over); // gloo has a time limit of its own
      } else if (!changed_.wait_for(lock, timeout, is_over)) {
        why_ = std::make_exception_ptr(
            std::runtime_error(
                c10::str("simccl: ", call_.name, " timed out: it was not over after ", timeout.count(), " ms.")));
      }
      end();
    } else {
      wait_for_peer(timeout);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (why_) {
      std::rethrow_exception(why_);
    }
  }

  void abort(const std::exception_ptr& why) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (over_) {
        return;
      }
      why_ = why_ ? why_ : why;
      changed_.notify_all();
    }
    for (const auto& work : works_) {
      try {
        work->abort();
      } catch (const c10::Error&) {
        // gloo's collectives cannot be aborted: see Note [Giving up].
      }
    }
  }

  int source() const override { return works_.front()->sourceRank(); }

 private:
  // With the lock held. Runs the last step, once.
  void end() {
    if (!over_ && !why_ && then_) {
      try {
        // Views made in inference mode may not be written by a thread that is not in it, unless below autograd.
        at::AutoDispatchBelowADInplaceOrView below;
        then_();
      } catch (...) {
        why_ = std::current_exception();
      }
    }
    over_ = true;
    then_ = nullptr;
  }

  void wait_for_peer(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> only_one(waiting_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (over_ || why_) {
        return;
      }
    }
    std::exception_ptr why;
    try {
      for (const auto& work : works_) {
        if (!work->wait(timeout)) {
          why = std::make_exception_ptr(std::runtime_error("simccl: " + call_.name + " was aborted."));
        }
      }
    } catch (...) {
      why = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    why_ = why_ ? why_ : why;
    end();
  }

  std::vector<GlooWork> works_;
  std::function<void()> then_;
  Call call_; // holds the tensors
  const bool is_collective_;
  std::mutex waiting_; // held by the one thread that waits for a peer
  std::mutex mutex_;   // guards what follows
  std::condition_variable changed_;
  size_t left_ = 0; // works of a collective that are not over
  bool over_ = false;
  std::exception_ptr why_;
  std::thread watcher_;
};

template <typename Options>
Options with_timeout(const Call& call) {
  Options options;
  options.timeout = call.timeout;
  return options;
}

} // namespace

Gloo::Gloo(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)), record_name_(next_transport_name()) {
  backend_->setGroupDesc(record_name_);
}

Gloo::~Gloo() {
  if (broken_) {
    // gloo's destructor waits for its collectives, which cannot be stopped and may have lost their peers.
    backend_.release();
  }
}

void Gloo::leave(bool broken) {
  broken_ = broken_ || broken;
}

void Gloo::settle() {
  for (const auto& weak : std::exchange(started_, {})) {
    if (const auto transfer = weak.lock()) {
      try {
        transfer->finish(kNoTimeout);
      } catch (...) {
        // Whoever waits for that one is told what became of it.
      }
    }
  }
}

TransferPtr Gloo::start(Call call) {
  const bool is_collective = !c10d::isP2POp(call.kind);
  Begun begun = begin(call);
  auto made =
      std::make_shared<GlooTransfer>(std::move(begun.works), std::move(begun.then), std::move(call), is_collective);
  if (is_collective) {
    GlooTransfer::track(made);
    std::erase_if(started_, [](const auto& earlier) { return earlier.expired(); });
    started_.push_back(made);
  }
  return made;
}

Gloo::Begun Gloo::begin(Call& call) {
  switch (call.kind) {
    case OpType::BROADCAST: {
      auto options = with_timeout<c10d::BroadcastOptions>(call);
      options.rootRank = call.root;
      Tensors tensors{known(call.outputs.front())};
      return {{backend_->broadcast(tensors, options)}};
    }
    case OpType::ALLREDUCE:
    case OpType::REDUCE:
      return reduce(call);
    case OpType::REDUCE_SCATTER:
      return reduce_scatter(call);
    case OpType::ALLGATHER:
      return all_gather(call);
    case OpType::GATHER: {
      auto options = with_timeout<c10d::GatherOptions>(call);
      options.rootRank = call.root;
      Tensors inputs = known(call.inputs);
      TensorLists outputs;
      if (!call.outputs.empty()) {
        outputs.push_back(known(call.outputs));
      }
      return {{backend_->gather(outputs, inputs, options)}};
    }
    case OpType::SCATTER: {
      auto options = with_timeout<c10d::ScatterOptions>(call);
      options.rootRank = call.root;
      Tensors outputs = known(call.outputs);
      TensorLists inputs;
      if (!call.inputs.empty()) {
        inputs.push_back(known(call.inputs));
      }
      return {{backend_->scatter(outputs, inputs, options)}};
    }
    case OpType::ALLTOALL:
      return exchange(call);
    case OpType::BARRIER:
      return {{backend_->barrier(with_timeout<c10d::BarrierOptions>(call))}};
    default:
      return begin_transfer(call);
  }
}

Gloo::Begun Gloo::begin_transfer(Call& call) {
  Tensors tensors = known(call.kind == OpType::SEND ? call.inputs : call.outputs);
  switch (call.kind) {
    case OpType::SEND:
      return {{backend_->send(tensors, call.root, call.tag)}};
    case OpType::RECV:
      return {{backend_->recv(tensors, call.root, call.tag)}};
    default:
      return {{backend_->recvAnysource(tensors, call.tag)}};
  }
}

// gloo uses the buffers of all ranks for partial results, so only an output may serve as it is.
Gloo::Begun Gloo::reduce(Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor from = call.inputs.front();
  const at::Tensor to = call.outputs.empty() ? at::Tensor() : call.outputs.front();
  const at::Tensor buffer =
      to.defined() && to.is_alias_of(from) ? reduction.prepare(from) : reduction.prepare_copy(from);
  Tensors buffers{buffer};
  GlooWork work;
  if (call.kind == OpType::REDUCE) {
    auto options = with_timeout<c10d::ReduceOptions>(call);
    options.reduceOp = reduction.transport_op();
    options.rootRank = call.root;
    work = backend_->reduce(buffers, options);
  } else {
    auto options = with_timeout<c10d::AllreduceOptions>(call);
    options.reduceOp = reduction.transport_op();
    work = backend_->allreduce(buffers, options);
  }
  return {{std::move(work)}, [reduction, buffer, to] {
            if (to.defined()) {
              reduction.finish(buffer, to);
            }
          }};
}

Gloo::Begun Gloo::reduce_scatter(Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor buffer = reduction.prepare_copy(at::cat(call.inputs));
  auto options = with_timeout<c10d::AllreduceOptions>(call);
  options.reduceOp = reduction.transport_op();
  Tensors buffers{buffer};
  const auto sizes = numels(call.inputs);
  const auto rank = backend_->getRank();
  const auto before = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
  const at::Tensor own = buffer.narrow(0, before, sizes[static_cast<size_t>(rank)]);
  return {{backend_->allreduce(buffers, options)}, [reduction, own, to = call.outputs.front()] {
            reduction.finish(own, to);
          }};
}

Gloo::Begun Gloo::all_gather(Call& call) {
  const auto& input = call.inputs.front();
  const bool equal = std::all_of(call.outputs.begin(), call.outputs.end(), [&](const auto& output) {
    return output.numel() == input.numel();
  });
  if (equal) {
    TensorLists outputs{known(call.outputs)};
    Tensors inputs = known(call.inputs);
    return {{backend_->allgather(outputs, inputs, with_timeout<c10d::AllgatherOptions>(call))}};
  }
  Begun parts;
  for (size_t root = 0; root < call.outputs.size(); ++root) {
    Tensors one{known(call.outputs[root])};
    if (root == static_cast<size_t>(backend_->getRank())) {
      one.front().copy_(known(input));
    }
    auto options = with_timeout<c10d::BroadcastOptions>(call);
    options.rootRank = static_cast<int64_t>(root);
    parts.works.push_back(backend_->broadcast(one, options));
  }
  return parts;
}

// gloo takes one tensor a side, which is cut by numbers of elements.
Gloo::Begun Gloo::exchange(Call& call) {
  const Tensors from = known(call.inputs), to = known(call.outputs);
  auto to_sizes = numels(to), from_sizes = numels(from);
  at::Tensor flat_from = at::cat(from);
  at::Tensor flat_to = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t{0})}, flat_from.options());
  auto work =
      backend_->alltoall_base(flat_to, flat_from, to_sizes, from_sizes, with_timeout<c10d::AllToAllOptions>(call));
  return {{std::move(work)}, [flat_to, to] {
            const auto parts = flat_to.split_with_sizes(numels(to));
            for (size_t i = 0; i < parts.size(); ++i) {
              to[i].copy_(parts[i]);
            }
          }};
}

} // namespace torch_ext::sim
