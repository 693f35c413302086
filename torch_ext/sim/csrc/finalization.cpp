// What happens before Python finalizes, so that a thread that still needs Python does not end the process by SIGABRT.
//
// Note [Threads at exit]
// Before Python 3.14, a thread that asks for the interpreter's lock after finalization has begun is ended by
// pthread_exit. That unwinds its stack, and the first destructor on the way calls std::terminate. Autograd's device
// threads run into this in a correct program: `backward()` returns when the last gradient is there, while the device
// thread has yet to drop the graph task, which holds a Python context (`_engine_run_backward` of
// torch/autograd/graph.py stores it). See https://github.com/pytorch/pytorch/issues/190489 and
// docs/findings/abort_at_exit.md.
//
// `before_finalization`, an exit function of Python's, does two things:
// - It runs its own backward, which visits every device thread. A thread drops one graph task before it works on the
//   next, and this one holds nothing of Python's.
// - Daemon threads can still come too late, with CPU tensors as well, and so can a backward in an exit function that
// runs
//   after this one. From here on such a thread sleeps where Python would have ended it, as Python 3.14 does.
#include "bindings.h"

#include <ATen/Functions.h>
#include <Python.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <unistd.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

using torch::autograd::Engine;
using torch::autograd::variable_list;

// Torch waits as long for its device threads at the end of a process. Only a task that does not end takes so long.
constexpr std::chrono::seconds kPatience{10};

// The engine shows its queues to derived classes only, and has no function that waits for its threads.
struct Queues : Engine {
  static const auto& of(Engine& engine) { return engine.*(&Queues::device_ready_queues_); }
};

// Does nothing, on the thread of a device.
struct Visit final : torch::autograd::Node {
  explicit Visit(const at::Tensor& of_device) { add_input_metadata(of_device); }
  variable_list apply(variable_list&& /*inputs*/) override { return {}; }
};

// A thread of its own, because a graph task takes the caller's Python state along. Nodes hold some in anomaly mode.
void visit_device_threads() {
  const auto device = [](size_t index) { return c10::Device(kSim, static_cast<c10::DeviceIndex>(index)); };
  auto* visits = new torch::autograd::edge_list(); // never freed
  variable_list inputs;
  for (size_t index = 0; index < static_cast<size_t>(device_count()); ++index) {
    inputs.push_back(at::empty({0}, at::TensorOptions().device(device(index))));
    visits->emplace_back(c10::make_intrusive<Visit>(inputs.back()), 0);
  }
  Engine::get_default_engine().execute(
      *visits, inputs, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
}

void wait_for_device_threads() {
  // In a child of fork() the engine is a new one, without threads.
  if (Queues::of(Engine::get_default_engine()).empty()) {
    return; // no backward has run
  }
  const auto over = std::make_shared<std::promise<void>>(); // the thread may outlive the wait
  std::thread([over] {
    try {
      visit_device_threads();
      over->set_value();
    } catch (...) {
      over->set_exception(std::current_exception()); // ends the wait; nobody could mend it now
    }
  }).detach();
  over->get_future().wait_for(kPatience);
  // A sleeping device thread never says that it has ended, which the engine would wait for when it is destroyed.
  setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0", /*replace=*/0);
}

std::thread::id finalizing_thread;
std::terminate_handler outer_handler = nullptr;

[[noreturn]] void sleep_or_terminate() {
  const bool ended_by_python = Py_IsInitialized() == 0 && std::current_exception() == nullptr;
  if (ended_by_python && std::this_thread::get_id() != finalizing_thread) {
    while (true) {
      pause();
    }
  }
  if (outer_handler != nullptr) {
    outer_handler();
  }
  std::abort();
}

} // namespace

void before_finalization() noexcept {
  finalizing_thread = std::this_thread::get_id();
  const auto before = std::set_terminate(&sleep_or_terminate);
  if (before != &sleep_or_terminate) { // a program may call its exit functions twice
    outer_handler = before;
  }
  wait_for_device_threads();
}

} // namespace torch_ext::sim
