// Runs before Python finalizes, so that a thread that still needs Python does not end the process by SIGABRT.
//
// Note [Threads at exit]
// Before Python 3.14, Python ends a thread that requests the GIL after finalization has begun by pthread_exit. That
// unwinds its stack, and the first destructor on the way calls std::terminate. Autograd's device threads run into this
// in a correct program: `backward()` returns when the last gradient is computed, before the device thread drops the
// graph task, which holds a Python context. See https://github.com/pytorch/pytorch/issues/190489 and
// docs/findings/abort_at_exit.md.
//
// `before_finalization`, a Python exit function, does two things:
// - It runs a backward that visits every device thread. A thread drops one graph task before it works on the next, and
//   this task holds no Python object.
// - Daemon threads can still request the GIL too late, even with CPU tensors, and so can a backward in a later exit
//   function. From here on such a thread sleeps where Python would have ended it, as Python 3.14 does.
#include "bindings.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

using torch::autograd::Engine;
using torch::autograd::variable_list;

// Torch also waits this long for its device threads at the end of a process. Only a task that never ends takes longer.
constexpr std::chrono::seconds kPatience{10};

// The engine's queues are protected, and it has no function that waits for its threads.
struct Queues : Engine {
  static const auto& of(Engine& engine) { return engine.*(&Queues::device_ready_queues_); }
};

// Does nothing, on the thread of a device.
struct Visit final : torch::autograd::Node {
  explicit Visit(const at::Tensor& of_device) { add_input_metadata(of_device); }
  variable_list apply(variable_list&& /*inputs*/) override { return {}; }
};

// A separate thread, because a graph task copies the caller's Python state. In anomaly mode nodes hold some too.
void visit_device_threads() {
  auto* visits = new torch::autograd::edge_list(); // never freed
  variable_list inputs;
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    inputs.push_back(at::empty({0}, at::TensorOptions().device(c10::Device(kSim, index))));
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
      over->set_exception(std::current_exception()); // ends the wait; no caller could handle the error
    }
  }).detach();
  over->get_future().wait_for(kPatience);
  // The engine's destructor would wait for the end of a sleeping device thread, which never comes.
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
