#include "call_stack.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <string>

namespace torch_ext::sim {

CallStack current_call_stack() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

std::string lines_of(const CallStack& stack, size_t most) {
  if (stack == nullptr) {
    return "";
  }
  const auto named = torch::symbolize({stack.get()});
  const auto& frames = named.tracebacks.front();
  std::string lines;
  for (size_t i = 0; i < std::min(frames.size(), most); ++i) {
    const auto& frame = named.all_frames[frames[i]];
    lines += c10::str("\n    ", frame.filename, ":", frame.lineno, " in ", frame.funcname);
  }
  if (frames.size() > most) {
    lines += c10::str("\n    and ", frames.size() - most, " frames that called it");
  }
  return lines;
}

} // namespace torch_ext::sim
