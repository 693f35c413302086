// Note [CUDA's kernels]
// Builds of torch with CUDA's kernels register them for the very device that is simulated. Each gets a replacement:
// torch's composition of other operators where there is one, as for devices that register no kernel; else the fallback.
// PrivateUse2 registers no kernels, so the dispatcher finds the compositions under its keys. The kernel registered last
// runs, so a fallback's file replaces CUDA's kernels before our own kernels are registered.
#pragma once

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

template <c10::DispatchKey unused>
void run_composition(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(unused), stack);
}

// Registers the fallback of `key`: see Note [CUDA's kernels]. `unused` is for PrivateUse2 and the layout of `key`.
template <c10::KernelFunction::BoxedKernelFunction* fallback, c10::DispatchKey unused>
void register_fallback(torch::Library& m, c10::DispatchKey key) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<fallback>());
  if (!kIsCuda) {
    return;
  }
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };
  Quiet quiet; // torch warns of the first kernel that is replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>; // NOLINT: they last as long as the process
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || name.getNamespace() == "c10d") { // c10d's kernels call the process group on any device
      continue;
    }
    const auto put = [&](c10::DispatchKey where, c10::KernelFunction kernel) {
      kept.push_back(dispatcher.registerImpl(name, where, std::move(kernel), std::nullopt, nullptr, "torch_ext"));
    };
    put(key,
        op->hasComputedKernelForDispatchKey(unused)
            ? c10::KernelFunction::makeFromBoxedFunction<&run_composition<unused>>()
            : c10::KernelFunction::makeFromBoxedFunction<fallback>());
    // Differentiate such a composition part by part. Where a device has a kernel, torch uses a formula for the whole,
    // which may call an operator that only CUDA has: _fused_rms_norm_backward.
    if (key == c10::DispatchKey::CUDA && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      constexpr auto kUnused = c10::DispatchKey::AutogradPrivateUse2;
      put(c10::DispatchKey::AutogradCUDA, c10::KernelFunction::makeFromBoxedFunction<&run_composition<kUnused>>());
    }
  }
}

} // namespace torch_ext::sim
