// Who made an access: an operator, a collective, a host operator, an allocation or a free, and from where.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../call_stack.h"
#include "clock.h"
#include "history.h"

namespace torch_ext::sim::races {

using Stack = CallStack;

// Takes the GIL for a moment, so it must be called without any lock of ours.
Stack current_stack();

struct Operand {
  c10::ScalarType type;
  c10::SmallVector<int64_t, 4> sizes;
};

struct Operation final : Origin {
  Operation(uint64_t alike, const std::string& called, Stack from)
      : Origin(alike), name(called), stack(std::move(from)) {}

  const std::string& name; // lives as long as the process
  const Stack stack;
  Lane host = kHost;                 // the thread that asked for it
  const std::string* node = nullptr; // the autograd node that is being evaluated; lives as long as the process
  std::optional<uint64_t> sequence;  // of a collective in its group
  c10::SmallVector<Operand, 4> operands;
};

} // namespace torch_ext::sim::races
