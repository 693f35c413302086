// The memory of the machine that all processes of a run hold on simulated devices together, and its cap.
//
// Note [The run's memory]
// A device's capacity is simulated, the machine's memory is not. Ranks that fill their devices would exhaust it, and
// the kernel would kill one of the machine's processes. So the bytes that the pools of all ranks hold together have a
// cap. A shared page has the total, and an entry for each process with its part. A process that dies gives nothing back
// by itself: when the cap is reached, the parts of processes that have ended are dropped. No lock guards the page, so
// none can be left behind: a process killed between the two counts leaves the total too high by one allocation. Asking
// the kernel at each allocation how much memory is left would need no page. But ranks ask at the same moment and write
// later, so the kernel would tell all of them that there is enough.
//
// torch_ext/machine_memory.py makes the page and writes the cap at its beginning; the rest of it is laid out here.
// Memory that was allocated for the host is not counted; the rest of the machine is for that.
#pragma once

#include "std.h"

namespace torch_ext::sim {

// Maps the page behind `descriptor`. Without it nothing is counted.
void use_memory_page(int descriptor);

// Counts bytes that this process is about to take from the host; false, and nothing is counted, if they pass the cap.
bool take_from_machine(size_t nbytes) noexcept;
void return_to_machine(size_t nbytes) noexcept;

struct MachineMemory {
  size_t cap;
  size_t run;     // what all processes of the run hold
  size_t process; // what this one holds
};
MachineMemory machine_memory() noexcept;

// The variable in bytes that `name` holds; `otherwise` if it is unset or empty. Raises ValueError for anything else.
size_t bytes_of_variable(const char* name, size_t otherwise);

} // namespace torch_ext::sim
