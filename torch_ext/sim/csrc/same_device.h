// The device check of kernels that are written by hand; the fallback has its own (checks.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "device.h"

namespace torch_ext::sim {

// The one sim device that the defined ones among `tensors` live on. Raises RuntimeError when they live on several.
inline c10::DeviceIndex same_device(const char* kernel, std::initializer_list<at::Tensor> tensors) {
  std::optional<c10::Device> first;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    if (!first.has_value()) {
      first = tensor.device();
    }
    TORCH_CHECK(
        tensor.device() == *first, "Expected all tensors to be on the same device, but found at least two devices, ",
        *first, " and ", tensor.device(), "! (when checking arguments of ", kernel, ")");
  }
  return first->index();
}

} // namespace torch_ext::sim
