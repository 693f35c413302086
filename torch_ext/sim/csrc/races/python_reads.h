// Reads of pinned memory by methods of torch's Python API that call no operator: `tolist`, `numpy`, DLPack.
#pragma once

namespace torch_ext::sim::races {

// Both are called with the GIL held.
void watch_python_reads();
void leave_python_reads();

} // namespace torch_ext::sim::races
