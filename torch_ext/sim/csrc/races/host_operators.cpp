#include "host_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "../device.h"
#include "../kernel.h"
#include "../kernel_observer.h"
#include "../kernel_scope.h"
#include "../pinned_memory.h"
#include "watch.h"

namespace torch_ext::sim::races {
namespace {

using Accesses = c10::SmallVector<sim::Access, 4>;

at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// Whether the operator itself touches memory. One that is written in terms of others has no kernel of the host.
bool is_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.operator_name().name == "aten::copy_";
}

// Whether its stream, and not the host, reads tensors of the host that are among its inputs.
bool transfers(std::string_view name) {
  return name.find("copy") != std::string_view::npos || name.starts_with("c10d::");
}

// Adds what the operator does to `tensor`, if that is the host's. Returns whether it is a device's.
bool add(const at::Tensor& tensor, bool write, Accesses& accesses) {
  if (!tensor.defined()) {
    return false;
  }
  if (tensor.device().type() == kSim) {
    return true;
  }
  if (tensor.device().is_cpu() && tensor.has_storage() && is_pinned(tensor.storage().data())) {
    if (const auto access = access_to(tensor, write)) {
      accesses.push_back(*access);
    }
  }
  return false;
}

std::unique_ptr<at::ObserverContext> entering(const at::RecordFunction& function) {
  if (pinned_blocks_made() == 0 || in_kernel() || is_unobserved()) {
    return nullptr;
  }
  const auto inputs = function.inputs();
  const auto schema = function.operator_schema();
  if (!schema.has_value() || inputs.size() != schema->arguments().size()) {
    return nullptr;
  }
  Accesses accesses;
  bool is_of_device = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (alias != nullptr && !write) {
      continue; // it makes a view
    }
    if (inputs[i].isTensor()) {
      is_of_device |= add(inputs[i].toTensor(), write, accesses);
    } else if (inputs[i].isTensorList() || inputs[i].isOptionalTensorList()) {
      for (const c10::IValue& element : inputs[i].toListRef()) {
        is_of_device |= element.isTensor() && add(element.toTensor(), write, accesses);
      }
    }
  }
  const auto name = function.operator_name();
  if (accesses.empty() || !name.has_value() || (is_of_device && transfers(name->name))) {
    return nullptr;
  }
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  if (op.has_value() && is_kernel(*op)) {
    watch().host_used(name->name, accesses);
  }
  return nullptr;
}

} // namespace

void watch_host_operators() {
  callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&entering).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void leave_host_operators() {
  at::removeCallback(callback);
  callback = at::INVALID_CALLBACK_HANDLE;
}

} // namespace torch_ext::sim::races
