// Which step of a backward pass this thread is in: the engine's threads have no Python frames to tell.
#pragma once

#include <string>

namespace torch_ext::sim::races {

// The name of the autograd node that this thread evaluates, which lives as long as the process; nullptr if none, or one
// that is written in Python, whose frames tell more.
const std::string* current_autograd_node();

} // namespace torch_ext::sim::races
