// Blocking without stopping the interpreter.
#pragma once

#include <Python.h>

namespace torch_ext::sim {

// Lets go of the GIL for its lifetime, if this thread has it. What blocks on peers, or on threads that may let go of
// tensors known to Python, needs it: callers in torch do not all release it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

} // namespace torch_ext::sim
