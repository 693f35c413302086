// Starts calls on any transport, and applies the planted faults.
//
// Note [Seams]
// Each call of every group passes `Transport::start`, which applies the faults planted for it:
//
//   delay     the launching thread sleeps first
//   drop      the call never reaches the peers. A send is over at once, like a lost message; any other call runs into
//             its time limit, here and on the peers
//   corrupt   flips one bit of the sent data, in a copy; of the received data if the call sends none
//   kill      the process ends by SIGKILL
//
// Calls are counted by group, from 1. An operation on a list of tensors, such as a coalesced one, is a call for each of
// them. A fault is applied once in each matching group.
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

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <unistd.h>

#include "../bindings.h"
#include "../host_tensors.h"
#include "../std.h"
#include "fingerprint.h"

namespace torch_ext::sim {
namespace {

using Milliseconds = std::chrono::milliseconds;

enum class FaultKind : uint8_t { kDelay, kDrop, kCorrupt, kKill };

struct Fault {
  FaultKind kind;
  uint64_t at;           // number of the call in its group
  std::string group;     // by name; empty: any
  Milliseconds duration; // of a delay
};

struct Plan {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::atomic<bool> is_empty{true};
};

Plan& plan = *new Plan(); // never freed: groups may outlive static objects

std::vector<Fault> faults_for(Group& group, uint64_t number) {
  std::vector<Fault> found;
  if (!plan.is_empty.load(std::memory_order_acquire)) {
    const std::scoped_lock lock(plan.mutex, group.mutex);
    for (const auto& fault : plan.faults) {
      if (fault.at == number && (fault.group.empty() || fault.group == group.name)) {
        found.push_back(fault);
      }
    }
  }
  return found;
}

// A call that never reaches its peers.
class Dropped final : public Awaited {
 public:
  Dropped(std::shared_ptr<const Group> group, const Call& call)
      : Awaited(std::move(group), c10::str(call.name, ", dropped by a planted fault,")),
        limit_(group_->limit_of(call, kNoTimeout)) {
    over_ = call.kind == c10d::OpType::SEND;
  }
  void finish(Milliseconds timeout) override { Awaited::finish(timeout == kNoTimeout ? limit_ : timeout); }

 private:
  const Milliseconds limit_;
};

at::Tensor with_a_flipped_bit(const at::Tensor& host) {
  at::Tensor copy = host.clone();
  if (copy.nbytes() > 0) {
    // The last byte of the first element: sign or exponent of a number, so that no tolerance covers it.
    static_cast<uint8_t*>(copy.mutable_data_ptr())[copy.element_size() - 1] ^= 0x40;
  }
  return copy;
}

FaultKind kind_of(const std::string& name) {
  static const std::map<std::string, FaultKind> kinds{
      {"delay", FaultKind::kDelay},
      {"drop", FaultKind::kDrop},
      {"corrupt", FaultKind::kCorrupt},
      {"kill", FaultKind::kKill}};
  const auto found = kinds.find(name);
  TORCH_CHECK_VALUE(found != kinds.end(), "unknown fault: ", name);
  return found->second;
}

} // namespace

std::exception_ptr Group::failure(const std::string& what) const {
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str("simccl on ", called(rank), ": ", what)));
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
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [this] { return over_; };
  if (timeout == kNoTimeout) {
    changed_.wait(lock, is_over); // gloo has its own time limit
  } else if (!changed_.wait_for(lock, timeout, is_over)) {
    lock.unlock();
    abort(group_->failure(c10::str(what_, " timed out: it was not over after ", timeout.count(), " ms.")));
    lock.lock();
  }
  if (why_) {
    std::rethrow_exception(why_);
  }
}

bool Awaited::end(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) {
    return false;
  }
  over_ = true;
  why_ = why;
  changed_.notify_all();
  return true;
}

uint64_t bytes_that_nccl_buffers() {
  constexpr uint64_t kDefault = uint64_t{4} << 20; // DEFAULT_BUFFSIZE of NCCL
  const char* text = std::getenv(kBufferVariable);
  return text == nullptr ? kDefault : std::strtoull(text, nullptr, /*base: as written*/ 0);
}

void Transport::take_turn(Call& call) {
  const bool is_send = call.kind == c10d::OpType::SEND;
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
  bool is_dropped = false, is_corrupted = false;
  for (const auto& fault : faults_for(*group_, ++started_)) {
    switch (fault.kind) {
      case FaultKind::kDelay:
        std::this_thread::sleep_for(fault.duration);
        break;
      case FaultKind::kKill:
        ::kill(getpid(), SIGKILL);
        break;
      case FaultKind::kDrop:
        is_dropped = true;
        break;
      case FaultKind::kCorrupt:
        is_corrupted = true;
        break;
    }
  }
  if (is_dropped) {
    return std::make_shared<Dropped>(group_, call);
  }
  if (!is_corrupted) {
    return begin(std::move(call));
  }
  if (call.inputs.empty()) {
    Tensors outputs = call.outputs;
    return std::make_shared<Stepped>(begin(std::move(call)), [outputs = std::move(outputs)] {
      for (const auto& output : outputs) {
        output.copy_(with_a_flipped_bit(output));
      }
    });
  }
  for (auto& input : call.inputs) {
    input = with_a_flipped_bit(input);
  }
  return begin(std::move(call));
}

void bind_faults(pybind11::module_& m) {
  m.def("plant_fault", [](const std::string& kind, uint64_t at, const std::string& group, Milliseconds duration) {
    std::lock_guard<std::mutex> lock(plan.mutex);
    plan.faults.push_back({kind_of(kind), at, group, duration});
    plan.is_empty.store(false, std::memory_order_release);
  });
  m.def("clear_faults", [] {
    std::lock_guard<std::mutex> lock(plan.mutex);
    plan.faults.clear();
    plan.is_empty.store(true, std::memory_order_release);
  });
}

} // namespace torch_ext::sim
