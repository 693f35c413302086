#include "seams.h"

#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../transport_view.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using Milliseconds = std::chrono::milliseconds;

struct Plan {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::atomic<bool> is_empty{true};
};

// Never freed: groups may outlive static objects.
Plan& plan() {
  static auto* made = new Plan();
  return *made;
}

std::vector<Fault> faults_for(const std::string& group, uint64_t number) {
  std::vector<Fault> found;
  if (!plan().is_empty.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(plan().mutex);
    for (const auto& fault : plan().faults) {
      if (fault.at == number && (fault.group.empty() || fault.group == group)) {
        found.push_back(fault);
      }
    }
  }
  return found;
}

// A call that its peers never hear of.
class Dropped final : public Transfer {
 public:
  Dropped(std::string name, Milliseconds limit, bool is_send) : name_(std::move(name)), limit_(limit), over_(is_send) {}

  bool advance() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return over_;
  }
  void finish(Milliseconds timeout) override {
    const auto limit = timeout == kNoTimeout ? limit_ : timeout;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, limit, [this] { return over_; })) {
      over_ = true;
      why_ = std::make_exception_ptr(
          c10::DistBackendError(
              {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
              c10::str(
                  "simccl: ", name_, " was dropped by a planted fault and timed out after ", limit.count(), " ms.")));
    }
    if (why_) {
      std::rethrow_exception(why_);
    }
  }
  void abort(const std::exception_ptr& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) {
      over_ = true;
      why_ = why;
      changed_.notify_all();
    }
  }
  int source() const override { return -1; }

 private:
  const std::string name_;
  const Milliseconds limit_;
  std::mutex mutex_; // guards what follows
  std::condition_variable changed_;
  bool over_;
  std::exception_ptr why_;
};

at::Tensor with_a_flipped_bit(const at::Tensor& host) {
  at::Tensor copy = host.clone();
  if (copy.nbytes() > 0) {
    // The last byte of the first element: sign or exponent of a number, so that no tolerance covers it.
    static_cast<uint8_t*>(copy.mutable_data_ptr())[copy.element_size() - 1] ^= 0x40;
  }
  return copy;
}

// A call whose result is changed when it has arrived.
class Corrupted final : public Transfer {
 public:
  Corrupted(TransferPtr inner, Tensors outputs) : inner_(std::move(inner)), outputs_(std::move(outputs)) {}

  bool advance() override { return inner_->advance(); }
  void finish(Milliseconds timeout) override {
    inner_->finish(timeout);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& output : std::exchange(outputs_, {})) {
      output.copy_(with_a_flipped_bit(output));
    }
  }
  void abort(const std::exception_ptr& why) override { inner_->abort(why); }
  int source() const override { return inner_->source(); }

 private:
  const TransferPtr inner_;
  std::mutex mutex_;
  Tensors outputs_;
};

void delay(const Fault& fault) {
  std::this_thread::sleep_for(fault.duration);
}

TransferPtr drop(const Call& call, Milliseconds group_timeout) {
  const auto limit = call.timeout > Milliseconds(0) ? call.timeout : group_timeout;
  return std::make_shared<Dropped>(call.name, limit, call.kind == c10d::OpType::SEND);
}

TransferPtr corrupt(Transport& inner, Call call) {
  if (call.inputs.empty()) {
    Tensors outputs = call.outputs;
    return std::make_shared<Corrupted>(inner.start(std::move(call)), std::move(outputs));
  }
  for (auto& input : call.inputs) {
    input = with_a_flipped_bit(input);
  }
  return inner.start(std::move(call));
}

void kill() {
  ::kill(getpid(), SIGKILL);
}

class Seams final : public Transport {
 public:
  explicit Seams(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}

  TransferPtr start(Call call) override {
    const uint64_t number = ++started_;
    bool is_dropped = false, is_corrupted = false;
    for (const auto& fault : faults_for(name_, number)) {
      switch (fault.kind) {
        case FaultKind::kDelay:
          delay(fault);
          break;
        case FaultKind::kKill:
          kill();
          break;
        case FaultKind::kDrop:
          is_dropped = true;
          break;
        case FaultKind::kCorrupt:
          is_corrupted = true;
          break;
      }
    }
    return is_dropped ? drop(call, inner_->timeout())
        : is_corrupted
        ? corrupt(*inner_, std::move(call))
        : inner_->start(std::move(call));
  }
  const char* kind() const override { return inner_->kind(); }
  Milliseconds timeout() const override { return inner_->timeout(); }
  void set_timeout(Milliseconds timeout) override { inner_->set_timeout(timeout); }
  void set_name(const std::string& name) override {
    name_ = name;
    inner_->set_name(name);
  }
  void settle() override { inner_->settle(); }
  void leave(bool broken) override { inner_->leave(broken); }

 private:
  const std::shared_ptr<Transport> inner_;
  std::string name_;
  std::atomic<uint64_t> started_{0};
};

FaultKind kind_of(const std::string& name) {
  const FaultKind kinds[] = {FaultKind::kDelay, FaultKind::kDrop, FaultKind::kCorrupt, FaultKind::kKill};
  const char* names[] = {"delay", "drop", "corrupt", "kill"};
  for (size_t i = 0; i < std::size(kinds); ++i) {
    if (name == names[i]) {
      return kinds[i];
    }
  }
  TORCH_CHECK_VALUE(false, "unknown fault: ", name);
}

} // namespace

void plant(Fault fault) {
  std::lock_guard<std::mutex> lock(plan().mutex);
  plan().faults.push_back(std::move(fault));
  plan().is_empty.store(false, std::memory_order_release);
}

void clear_faults() {
  std::lock_guard<std::mutex> lock(plan().mutex);
  plan().faults.clear();
  plan().is_empty.store(true, std::memory_order_release);
}

std::shared_ptr<Transport> with_seams(std::shared_ptr<Transport> transport) {
  return std::make_shared<Seams>(std::move(transport));
}

void bind_seams(pybind11::module_& m) {
  namespace py = pybind11;
  m.def(
      "plant_fault",
      [](const std::string& kind, uint64_t at, const std::string& group, Milliseconds duration) {
        plant({kind_of(kind), at, group, duration});
      },
      py::arg("kind"), py::arg("at"), py::arg("group"), py::arg("duration"));
  m.def("clear_faults", &clear_faults);
}

} // namespace torch_ext::sim
