// Where in a program something happened: Python frames, taken at once and named only when they are shown.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstddef>
#include <memory>
#include <string>

namespace torch_ext::sim {

// Taking one costs well under a microsecond. Null where Python is not running.
using CallStack = std::shared_ptr<torch::CapturedTraceback>;

// Takes the GIL for a moment, so it must be called without any lock of ours.
CallStack current_call_stack();

// A line for each frame, innermost first and at most `most` of them: "\n    train.py:8 in step". Empty without frames.
std::string lines_of(const CallStack& stack, size_t most);

} // namespace torch_ext::sim
