// Optional tensors, which operators pass as none or as an undefined tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torch_ext::sim {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

inline at::Tensor value_or_none(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

} // namespace torch_ext::sim
