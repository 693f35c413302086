// Convolution and fused attention. Torch sends both to operators that exist to be overridden by a device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "alias.h"
#include "kernel.h"
#include "optional_tensor.h"

namespace torch_ext::sim {
namespace {

// at::SDPBackend as torch numbers it (aten/src/ATen/native/transformers/sdp_utils_cpp.h), which no header narrow enough
// to be worth its compile time exports.
constexpr int64_t kSdpMath = 0;
constexpr int64_t kSdpFlash = 1;
constexpr int64_t kSdpOverrideable = 4;

OptionalTensor optional_on_host(const OptionalTensor& tensor) {
  return tensor.has_value() ? std::make_optional(on_host(*tensor)) : std::nullopt;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  Kernel kernel("aten::convolution");
  kernel.reads(input).reads(weight).reads(bias).launch();
  return kernel.result(
      at::convolution(
          on_host(input), on_host(weight), optional_on_host(bias), stride, padding, dilation, transposed,
          output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> output_mask) {
  Kernel kernel("aten::convolution_backward");
  kernel.reads(grad_output).reads(input).reads(weight).launch();
  const int64_t bias_size = grad_output.size(1);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      on_host(grad_output), on_host(input), on_host(weight), c10::IntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, output_mask);
  return {
      kernel.result(std::move(grad_input)), kernel.result(std::move(grad_weight)), kernel.result(std::move(grad_bias))};
}

int64_t fused_sdp_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  // A mask that needs a gradient would get none from the fused kernel.
  const bool mask_needs_grad = mask.has_value() && mask->defined() && mask->requires_grad();
  if (mask_needs_grad || enable_gqa) {
    return kSdpMath;
  }
  const int64_t host_choice = at::_fused_sdp_choice(
      on_host(query), on_host(key), on_host(value), optional_on_host(mask), dropout, is_causal, scale, enable_gqa);
  return host_choice == kSdpFlash ? kSdpOverrideable : kSdpMath;
}

using AttentionResult = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

AttentionResult attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias, double dropout,
    bool is_causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  Kernel kernel("aten::_scaled_dot_product_fused_attention_overrideable");
  kernel.reads(query).reads(key).reads(value).reads(bias).launch();
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), dropout, is_causal, optional_on_host(bias), scale);
  // The host kernel draws no random numbers (it takes no dropout) and has no ragged batches, so the places for them
  // hold empty tensors.
  const auto none = [&query] { return at::empty({0}, query.options().dtype(at::kLong)); };
  return {
      kernel.result(std::move(output)),
      kernel.result(std::move(logsumexp)),
      none(),
      none(),
      query.sym_size(2),
      key.sym_size(2),
      none(),
      none(),
      at::empty({0}, query.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> /*grad_input_mask*/, const at::Tensor& output,
    const at::Tensor& logsumexp, const at::Tensor& /*cum_seq_q*/, const at::Tensor& /*cum_seq_k*/, int64_t /*max_q*/,
    int64_t /*max_k*/, double dropout, bool is_causal, const at::Tensor& /*philox_seed*/,
    const at::Tensor& /*philox_offset*/, std::optional<double> scale) {
  Kernel kernel("aten::_scaled_dot_product_fused_attention_overrideable_backward");
  kernel.reads(grad_output).reads(query).reads(key).reads(value).reads(bias).reads(output).reads(logsumexp).launch();
  const auto mask = bias.defined() ? std::make_optional(on_host(bias)) : std::nullopt;
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad_output), on_host(query), on_host(key), on_host(value), on_host(output), on_host(logsumexp), dropout,
      is_causal, mask, scale);
  return {
      kernel.result(std::move(grad_query)), kernel.result(std::move(grad_key)), kernel.result(std::move(grad_value)),
      at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
}

} // namespace torch_ext::sim
