// Tells the watch what host operators do to pinned memory: see Note [What is host work] in watch.h.
#pragma once

namespace torch_ext::sim::races {

// Begin and end to look. Calls do not nest.
void watch_host_operators();
void leave_host_operators();

} // namespace torch_ext::sim::races
