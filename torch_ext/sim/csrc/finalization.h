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
// - It runs a backward of its own, which visits every device thread. A thread drops one graph task before it works on
//   the next, and this one holds nothing of Python's.
// - Threads that the program leaves running (daemon threads) can still come too late, with CPU tensors as well, and so
//   can a backward in an exit function that runs after this one. From here on such a thread sleeps where Python would
//   have ended it, as Python 3.14 does.
#pragma once

namespace torch_ext::sim {

// Call it without the interpreter's lock, from the thread that will finalize Python. Never raises.
void before_finalization() noexcept;

} // namespace torch_ext::sim
