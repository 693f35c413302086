// The memory of the machine that all processes of a run hold on simulated devices together, and its cap.
//
// Note [The run's memory]
// A device's capacity is simulated, the machine's memory is not. Ranks that fill their devices would exhaust it, and
// the kernel would kill one of the machine's processes. So the bytes of all ranks' pools that may have pages (Note
// [Pages on demand] in blocks.h) have a cap together. A shared page has the total, and an entry with the share of each
// process; when the cap is reached, the shares of processes that have ended are dropped. No lock guards the page, so a
// dead process cannot hold one: a process killed between the two counts leaves the total too high by one allocation.
// The kernel's free memory would not do: ranks that read it at the same moment and write later all find enough.
//
// torch_ext/machine_memory.py makes the page and writes the cap at its beginning; this file lays out the rest.
// Host allocations are not counted; they have the rest of the machine.
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
  size_t run;     // held by all processes of the run
  size_t process; // held by this process
};
MachineMemory machine_memory() noexcept;

// The variable in bytes that `name` holds; `otherwise` if it is unset or empty. Raises ValueError for anything else.
size_t bytes_of_variable(const char* name, size_t otherwise);

} // namespace torch_ext::sim
