// Calls that CUDA refuses and the host's kernels accept: element types that CUDA's kernel lacks, such as integers in
// products of matrices, operators without one, and, under torch.use_deterministic_algorithms, kernels whose result
// depends on the order of threads.
#pragma once

#include <ATen/core/ivalue.h>

#include "std.h"

namespace torch_ext::sim {

struct Refusal;
using Refusals = std::span<const Refusal>;

// The refusals of an operator by its name ("aten::mm"); empty if CUDA accepts all of its calls.
Refusals refusals_of(const std::string& name);

// Raises NotImplementedError for an element type or a missing kernel, and RuntimeError (or warns) for a kernel that is
// not deterministic, in CUDA's words.
void check_refusals(Refusals refusals, c10::ArrayRef<c10::IValue> arguments);

// Raises NotImplementedError if `type` is an integer. kernel: as CUDA's message names it.
void refuse_integers(const char* kernel, at::ScalarType type);

} // namespace torch_ext::sim
