// Lets a thread block without blocking the interpreter.
#pragma once

#include "std.h"

namespace torch_ext::sim {

// Releases the GIL for its lifetime, if this thread holds it. Needed by code that blocks on peers, or on threads that
// may drop tensors known to Python: callers in torch do not all release the GIL.
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
