// Device checks, as strict as those of a GPU: see Note [Strict devices] in checks.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"

namespace torch_ext::sim {

// What the fallback needs to know of an operator, worked out once from its schema.
struct OperatorFacts {
  std::string name;
  std::vector<bool> written; // per argument: the operator writes to it
  std::vector<bool> fresh;   // per result: none of the arguments, nor a view of one
  bool is_view = false;      // results are views of arguments, or it compares them, so that no memory is touched
  bool host_reads =
      false;          // the host learns values: a result is none of the device's, or has as many elements as they say
  int generator = -1; // position of the Generator argument, -1 without one
  bool has_host_kernel = false;
  bool host_indices = false; // tensors in its tensor lists may live on the host
  bool is_indexing = false;  // of these, one whose lists are indices
};

const OperatorFacts& facts_of(const c10::OperatorHandle& op);

// The one device that the tensors among `arguments` live on; the current device where there is no tensor.
// Raises RuntimeError when they live on several, and AcceleratorError for one whose memory is gone (Note [Bounds]).
c10::DeviceIndex common_device(
    const OperatorFacts& facts, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

// Whether the host waits for the stream in this call, because it learns values or must move some of its own.
bool host_waits(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments);

// Raises NotImplementedError: `op` has no kernel for tensors of a sparse layout.
[[noreturn]] void refuse_sparse(const c10::OperatorHandle& op);

} // namespace torch_ext::sim
