// Fires the callbacks of `torch.cuda._gpu_trace` where torch's CUDA half fires them, so that torch's CUDA stream
// sanitizer (TORCH_CUDA_SANITIZER=1) runs on simulated devices. `sim` has no such callbacks. Callbacks take the GIL.
#pragma once

#include <c10/core/impl/GPUTrace.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// Calls `fire` with torch's table of callbacks, if a program has activated them.
template <typename Fire>
void trace(Fire fire) {
  if constexpr (kSim == c10::DeviceType::CUDA) {
    if (const auto* interpreter = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(interpreter != nullptr)) {
      fire(**interpreter);
    }
  }
}

} // namespace torch_ext::sim
