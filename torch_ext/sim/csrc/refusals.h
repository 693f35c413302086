// Calls that CUDA refuses and the host's kernels accept: products of integer matrices, which cuBLAS lacks, and, under
// torch.use_deterministic_algorithms, operators whose CUDA kernel adds atomically.
#pragma once

#include <ATen/core/ivalue.h>

#include "std.h"

namespace torch_ext::sim {

struct Refusal;

// The refusal of an operator by its name ("aten::mm"); nullptr if CUDA accepts all of its calls.
const Refusal* refusal_of(const std::string& name);

// Raises NotImplementedError for integers, and RuntimeError (or warns) for a nondeterministic kernel, in CUDA's words.
void check_refusal(const Refusal& refusal, c10::ArrayRef<c10::IValue> arguments);

} // namespace torch_ext::sim
