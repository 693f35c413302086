#include "out_of_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <iomanip>
#include <ios>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "call_stack.h"
#include "machine_memory.h"
#include "memory_history.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kMostHolders = 8;
constexpr size_t kFramesOfHolder = 4;

std::string readable(size_t nbytes) {
  constexpr std::array<const char*, 4> kUnits{"bytes", "KiB", "MiB", "GiB"};
  constexpr double kNext = 1024;
  auto amount = static_cast<double>(nbytes);
  size_t unit = 0;
  while (amount >= kNext && unit + 1 < kUnits.size()) {
    amount /= kNext;
    ++unit;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << amount << " " << kUnits.at(unit);
  return text.str();
}

struct Held {
  size_t bytes = 0;
  size_t blocks = 0;
};

// By the lines that allocated it where they are known, else by the kernel, or by size: most operators have torch.empty
// make their results.
std::vector<std::pair<std::string, Held>> holders(const std::vector<BlockFacts>& blocks) {
  std::map<std::string, Held> by_whom;
  for (const auto& block : blocks) {
    if (block.state != BlockFacts::State::kLive) {
      continue;
    }
    const auto tag = name_of_tag(block.tag);
    const auto lines = lines_of(stack_of_memory(block.data), kFramesOfHolder);
    const std::string made = tag.empty() ? "of " + readable(block.rounded) : "made by " + tag;
    auto& held = by_whom[lines.empty() ? made : "made at" + lines];
    held.bytes += block.rounded;
    held.blocks += 1;
  }
  std::vector<std::pair<std::string, Held>> sorted(by_whom.begin(), by_whom.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& one, const auto& other) {
    return one.second.bytes > other.second.bytes;
  });
  return sorted;
}

std::string list_of(const std::vector<std::pair<std::string, Held>>& held) {
  std::string text;
  for (size_t i = 0; i < std::min(held.size(), kMostHolders); ++i) {
    const auto& [made, what] = held[i];
    text +=
        c10::str("\n  ", readable(what.bytes), " in ", what.blocks, what.blocks == 1 ? " block " : " blocks ", made);
  }
  if (held.size() > kMostHolders) {
    size_t rest = 0;
    for (size_t i = kMostHolders; i < held.size(); ++i) {
      rest += held[i].second.bytes;
    }
    text += c10::str("\n  ", readable(rest), " in other blocks");
  }
  return text;
}

std::string message_of_machine(size_t nbytes) {
  const auto memory = machine_memory();
  if (memory.cap == 0) {
    return c10::str("sim out of memory: the machine's, not the device's. The host refused ", readable(nbytes), ".");
  }
  return c10::str(
      "sim out of memory: the machine's, not the device's. Tried to allocate ", readable(nbytes),
      ". The processes of this run hold ", readable(memory.run), " on simulated devices together, this one ",
      readable(memory.process), "; they may hold ", readable(memory.cap),
      ", by default 80 % of what the machine or its cgroup had available when the run began.");
}

} // namespace

void raise_out_of_memory(BlockPool& pool, size_t nbytes, Short whose) {
  const auto stats = pool.stats();
  const auto current = [](const c10::CachingAllocator::StatArray& array) {
    return static_cast<size_t>(array[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
  };
  const size_t reserved = current(stats.reserved_bytes), allocated = current(stats.allocated_bytes);
  const size_t limit = pool.limit(), allowed = pool.allowed();
  const size_t left = allowed > reserved ? allowed - reserved : 0;
  if (is_recording_memory()) {
    note_memory({MemoryEvent::Kind::kOutOfMemory, pool.device(), nullptr, nbytes, 0, 0, left, nullptr});
  }
  const auto held = holders(pool.blocks());
  const auto advice = is_recording_memory()
      ? ""
      : " To see the lines that allocated it, call torch.sim.memory._record_memory_history() first.";
  TORCH_CHECK_WITH(
      OutOfMemoryError, whose == Short::kDevice, message_of_machine(nbytes),
      held.empty() ? "" : "\nAllocated by tensors of this process, most first:", list_of(held),
      held.empty() ? " " : "\n", "Free tensors, use fewer ranks, or bound each device with --memory SIZE. ",
      "TORCH_EXT_SIM_MACHINE_MEMORY=BYTES sets another cap.", advice);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "sim out of memory. Tried to allocate ", readable(nbytes),
      ". Device sim:", static_cast<int>(pool.device()), " has a total capacity of ", readable(limit), " of which ",
      readable(left), " is free.", allowed < limit ? c10::str(" ", readable(allowed), " allowed;") : std::string(),
      " Of the memory in use ", readable(allocated), " is allocated by tensors, and ",
      readable(reserved > allocated ? reserved - allocated : 0), " is reserved but unallocated.",
      held.empty() ? "" : "\nAllocated by tensors, most first:", list_of(held), held.empty() ? " " : "\n",
      "Free tensors, or raise the capacity with torch.sim.set_memory_limit.", advice);
  std::abort(); // the check above always throws
}

} // namespace torch_ext::sim
