// Starts calls on any transport, and applies faults.
//
// Note [Seams]
// Each call of every group passes `Transport::start`, which asks the hook of `torch_ext.faults.points`, if there is
// one, what happens to it. The hook gets the name of the call and of its group. It may sleep, raise or end the process,
// and returns how the call goes wrong:
//
//   drop       the call never reaches the peers. A send is over at once, like a lost message; any other call runs into
//              its time limit, here and on the peers
//   duplicate  a send is made twice. Other calls are refused
//   corrupt    flips one bit of the sent data, in a copy; of the received data if the call sends none
//
// An operation on a list of tensors, such as a coalesced one, is a call for each of them.
//
// Note [Transfers that block each other]
// NCCL runs the transfers between two ranks in the order of their calls, on one stream, and a receive ends when its
// send has run. A send of more bytes than NCCL buffers ends when its receive has begun; whether a smaller one does
// depends on the machine, so it counts as one that does not block. Here a send is over at once, and a program would
// pass that hangs on GPUs. So each rank counts its transfers with a peer, a send carries the numbers along, and the
// receive that gets it compares. For the receive `r` and its send, ranks block each other for ever if
//
//   the peer started more receives before its send than this rank sends before `r`: both begin with a receive
//   the send blocks, and this rank started one that blocks before `r`, and the peer has not received it before its own
//
// The numbers follow from the order of calls on either rank, so the verdict is the same in every run. Batched transfers
// (batch_isend_irecv) start together and are not counted. No check in a group of gloo, which buffers, and with
// TORCH_EXT_SIM_P2P=buffered.
#include "transport.h"

#include <pybind11/stl.h>

#include "../bindings.h"
#include "../clock.h"
#include "../host_tensors.h"
#include "../std.h"
#include "fingerprint.h"
#include "fold.h"
#include "segment.h"

namespace torch_ext::sim {
namespace {

using Milliseconds = std::chrono::milliseconds;
using c10d::OpType;

std::atomic<PyObject*> hook{nullptr}; // never freed: a call may be in it

// How a call goes wrong; see Note [Seams].
struct Effect {
  std::string kind;
  int64_t element = 0; // to corrupt
  int64_t bit = 0;     // of the element; negative: counted from its end, where numbers have sign and exponent
};

Effect effect_on(const Call& call, Group& group) {
  PyObject* const asked = hook.load(std::memory_order_relaxed);
  if (asked == nullptr) {
    return {};
  }
  std::string name;
  {
    const std::scoped_lock lock(group.mutex);
    name = group.name;
  }
  namespace py = pybind11;
  py::gil_scoped_acquire gil;
  const auto found = py::reinterpret_borrow<py::object>(asked)(call.name, name);
  if (found.is_none()) {
    return {};
  }
  const auto [kind, element, bit] = found.cast<std::tuple<std::string, int64_t, int64_t>>();
  return {kind, element, bit};
}

at::Tensor with_a_flipped_bit(const at::Tensor& host, const Effect& effect) {
  at::Tensor copy = host.clone();
  if (copy.numel() > 0) {
    const auto bits = static_cast<int64_t>(copy.element_size()) * 8;
    const auto bit = (effect.bit % bits + bits) % bits + effect.element % copy.numel() * bits;
    static_cast<uint8_t*>(copy.mutable_data_ptr())[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
  return copy;
}

} // namespace

std::exception_ptr Group::failure(const std::string& what) const {
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str("simccl on ", called(rank), ": ", what)));
}

void Group::check_limit(const Call& call, int64_t launched, int64_t end, int first, int last) const {
  const auto limit = limit_of(call, kNoTimeout);
  const auto waited = std::chrono::nanoseconds(end - launched);
  if (clock::has_limits() && waited > limit) {
    std::rethrow_exception(failure(
        c10::str(
            call.what(), " timed out in virtual time: ", called(first), " launched it ",
            std::chrono::ceil<Milliseconds>(waited).count(), " ms before its end, ", called(last),
            " was ready last, and its limit is ", limit.count(), " ms.")));
  }
}

void Stepped::finish(Milliseconds timeout) {
  inner_->finish(timeout);
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto step = std::exchange(step_, nullptr)) {
    // A thread outside of inference mode may write views made in it only below autograd.
    at::AutoDispatchBelowADInplaceOrView below;
    step();
  }
}

bool Awaited::advance() {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

void Awaited::finish(Milliseconds timeout) {
  timeout = timeout == kNoTimeout ? limit_ : timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [this] { return over_; };
  if (timeout == kNoTimeout) {
    changed_.wait(lock, is_over);
  } else if (!changed_.wait_for(lock, timeout, is_over)) {
    lock.unlock();
    abort(group_->failure(c10::str(what_, " timed out: it was not over after ", timeout.count(), " ms.")));
    lock.lock();
  }
  if (why_) {
    std::rethrow_exception(why_);
  }
}

void Awaited::end(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_) {
    over_ = true;
    why_ = why;
    changed_.notify_all();
  }
}

uint64_t bytes_that_nccl_buffers() {
  constexpr uint64_t kDefault = uint64_t{4} << 20; // DEFAULT_BUFFSIZE of NCCL
  const char* text = std::getenv(kBufferVariable);
  return text == nullptr ? kDefault : std::strtoull(text, nullptr, /*base: as written*/ 0);
}

void Transport::take_turn(Call& call) {
  const bool is_send = call.kind == OpType::SEND;
  const char* wish = std::getenv("TORCH_EXT_SIM_P2P");
  if (call.batched || group_->any_device || (wish != nullptr && std::string_view(wish) == "buffered")) {
    call.turn.opposite = is_send ? 0 : ~uint64_t{0};
    return;
  }
  Pair& pair = pairs_[call.root];
  if (is_send) {
    const bool blocks = call.inputs.front().nbytes() > bytes_that_nccl_buffers();
    call.turn = {pair.received, blocks ? uint64_t{1} : 0};
    ++pair.sent;
    if (blocks) {
      pair.blocking = pair.sent;
      pair.site = call.site;
    }
  } else {
    call.turn = {pair.sent, pair.blocking};
    call.blocking_site = pair.site;
    ++pair.received;
  }
}

TransferPtr Transport::start(Call call) {
  call.site = site_of_call();
  if (c10d::isP2POp(call.kind)) {
    take_turn(call);
  }
  if (group_->any_device) {
    call.device = -1;
  }
  const Effect effect = effect_on(call, *group_);
  if (effect.kind == "drop") {
    auto dropped = std::make_shared<Awaited>(
        group_, c10::str(call.name, ", dropped by a planted fault,"), group_->limit_of(call, kNoTimeout));
    if (call.kind == OpType::SEND) {
      dropped->end(); // as if a peer had received it
    }
    return dropped;
  }
  if (effect.kind == "duplicate") {
    TORCH_CHECK_VALUE(call.kind == OpType::SEND, "A fault may duplicate a send only, but was to duplicate ", call.name);
    settle(*begin(call));
  }
  if (effect.kind != "corrupt") {
    return begin(std::move(call));
  }
  if (call.inputs.empty()) {
    Tensors outputs = call.outputs;
    return std::make_shared<Stepped>(begin(std::move(call)), [outputs = std::move(outputs), effect] {
      for (const auto& output : outputs) {
        output.copy_(with_a_flipped_bit(output, effect));
      }
    });
  }
  for (auto& input : call.inputs) {
    input = with_a_flipped_bit(input, effect);
  }
  return begin(std::move(call));
}

bool is_from_root(const Call& call) {
  return call.kind == OpType::BROADCAST || call.kind == OpType::SCATTER;
}

void write_outputs(const Call& call, const Group& group, FoldOrder order, uint64_t number, const InputOf& input) {
  const bool has_input_per_rank =
      call.kind == OpType::SCATTER || call.kind == OpType::REDUCE_SCATTER || call.kind == OpType::ALLTOALL;
  const size_t index = has_input_per_rank ? static_cast<size_t>(group.rank) : 0;
  if (call.outputs.empty() || (call.kind == OpType::BROADCAST && call.root == group.rank)) {
    return;
  }
  if (!call.reduction.has_value()) {
    for (size_t i = 0; i < call.outputs.size(); ++i) {
      const auto& to = call.outputs[i];
      const int peer = is_from_root(call) ? call.root : static_cast<int>(i);
      copy_bytes(to.mutable_data_ptr(), input(peer, index, to.nbytes()), to.nbytes());
    }
    return;
  }
  const at::Tensor to = call.reduction->target(call.outputs.front());
  const auto count = static_cast<uint64_t>(to.numel());
  std::vector<const std::byte*> from;
  from.reserve(group.global_ranks.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    from.push_back(input(peer, index, to.nbytes()));
  }
  if (count > 0) {
    const Fold fold{order, call.reduction->transport_op(), to.scalar_type(), count, number};
    fold.run(static_cast<std::byte*>(to.mutable_data_ptr()), from, 0, count);
  }
  call.reduction->finish(to, call.outputs.front());
}

void bind_faults(pybind11::module_& m) {
  m.def("set_fault_hook", [](const pybind11::object& called) {
    hook = called.is_none() ? nullptr : pybind11::object(called).release().ptr();
  });
}

} // namespace torch_ext::sim
