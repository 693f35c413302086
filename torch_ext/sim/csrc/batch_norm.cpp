// Batch norm. Its synchronised form exists on GPUs only, so that no host kernel can serve it: it is written in terms of
// other operators on device tensors. The host kernel of the plain form takes fewer combinations of types than GPUs do.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "alias.h"
#include "kernel.h"
#include "optional_tensor.h"

namespace torch_ext::sim {
namespace {

using at::Tensor;

// Half precision is accumulated in float, as on GPUs.
c10::ScalarType accumulate_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// --- synchronised batch norm: input is (N, C, ...), statistics are (C,) ---

std::vector<int64_t> all_but_channel(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  return dims;
}

// (C,) as (1, C, 1, ...), so that it broadcasts against `input`.
Tensor per_channel(const Tensor& statistics, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = input.size(1);
  return statistics.view(shape);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto [variance, mean] =
      at::var_mean(input.to(accumulate_type(input)), all_but_channel(input), /*unbiased=*/false, /*keepdim=*/false);
  return {mean, at::rsqrt(variance + eps)};
}

Tensor normalize(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
    const Tensor& invstd, double /*eps*/) {
  same_device("aten::batch_norm_elemt", {input, value_or_none(weight), value_or_none(bias), mean, invstd});
  Tensor scaled = (input - per_channel(mean, input)) * per_channel(invstd, input);
  if (given(weight)) {
    scaled = scaled * per_channel(*weight, input);
  }
  if (given(bias)) {
    scaled = scaled + per_channel(*bias, input);
  }
  return scaled.to(input.scalar_type());
}

Tensor& normalize_out(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
    const Tensor& invstd, double eps, Tensor& out) {
  out.resize_(input.sizes()).copy_(normalize(input, weight, bias, mean, invstd, eps));
  return out;
}

void move_towards(const OptionalTensor& running, const Tensor& value, double momentum) {
  if (given(running)) {
    running->mul_(1 - momentum).add_(value.to(running->scalar_type()), momentum);
  }
}

// mean, invstd: (W, C), one row a rank; counts: (W,). Merges the ranks' moments into those of the whole batch.
std::tuple<Tensor, Tensor> gather_stats_with_counts(
    const Tensor& input, const Tensor& mean, const Tensor& invstd, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, const Tensor& counts) {
  same_device(
      "aten::batch_norm_gather_stats_with_counts",
      {input, mean, invstd, counts, value_or_none(running_mean), value_or_none(running_var)});
  const Tensor weights = counts.to(mean.scalar_type()).view({-1, 1});
  const Tensor total = weights.sum();
  const Tensor variances = invstd.pow(-2) - eps;
  const Tensor global_mean = (mean * weights).sum(0) / total;
  const Tensor squares = ((variances + (mean - global_mean).pow(2)) * weights).sum(0);
  move_towards(running_mean, global_mean, momentum);
  move_towards(running_var, squares / (total - 1), momentum);
  return {global_mean, at::rsqrt(squares / total + eps)};
}

std::tuple<Tensor, Tensor> gather_stats(
    const Tensor& input, const Tensor& mean, const Tensor& invstd, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, int64_t count) {
  const Tensor counts = at::zeros_like(mean.select(1, 0)).add_(count);
  return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

// Sums over all but the channel: of dy, of dy * (x - mean), and from them the gradients of weight and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool input_g, bool weight_g, bool bias_g) {
  same_device("aten::batch_norm_backward_reduce", {grad_output, input, mean, invstd, value_or_none(weight)});
  const auto dims = all_but_channel(input);
  const Tensor grad = grad_output.to(accumulate_type(input));
  const Tensor sum_dy = grad.sum(dims);
  const Tensor sum_dy_xmu = (grad * (input - per_channel(mean, input))).sum(dims);
  const auto parameter_type = given(weight) ? weight->scalar_type() : sum_dy.scalar_type();
  return {
      input_g ? sum_dy : Tensor(), input_g ? sum_dy_xmu : Tensor(),
      weight_g ? (sum_dy_xmu * invstd).to(parameter_type) : Tensor(), bias_g ? sum_dy.to(parameter_type) : Tensor()};
}

// dx = (dy - sum_dy / n - (x - mean) * invstd^2 * sum_dy_xmu / n) * invstd * weight, with n the size of the whole batch
Tensor batch_norm_backward_elemt(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu, const Tensor& counts) {
  same_device(
      "aten::batch_norm_backward_elemt",
      {grad_output, input, mean, invstd, value_or_none(weight), sum_dy, sum_dy_xmu, counts});
  const Tensor total = counts.sum().to(mean.scalar_type());
  const Tensor slope = invstd.pow(2) * sum_dy_xmu / total;
  const Tensor centred = input - per_channel(mean, input);
  Tensor grad = (grad_output - per_channel(sum_dy / total, input) - centred * per_channel(slope, input)) *
      per_channel(invstd, input);
  if (given(weight)) {
    grad = grad * per_channel(*weight, input);
  }
  return grad.to(input.scalar_type());
}

// --- batch norm: the host wants weight, bias and statistics of one type ---

Tensor cast(const OptionalTensor& tensor, c10::ScalarType type) {
  return given(tensor) ? on_host(*tensor).to(type) : Tensor();
}

// Weight, bias and running statistics as the host kernel takes them beside `input`: in the input's type, or all in
// float. GPUs keep statistics in float beside parameters of half precision, and the other way round. Weights of a type
// that GPUs refuse too stay as they are, for the kernel to refuse.
class HostTypes {
 public:
  HostTypes(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running) {
    const auto parameters = given(weight) ? weight->scalar_type() : input.scalar_type();
    const bool accepted_by_gpus = parameters == input.scalar_type() || parameters == at::kFloat;
    mixed_ = given(running) && running->scalar_type() != parameters && accepted_by_gpus;
    common_ = accumulate_type(input);
  }

  Tensor operator()(const OptionalTensor& tensor) const {
    return mixed_ ? cast(tensor, common_) : (given(tensor) ? on_host(*tensor) : Tensor());
  }

  // Brings what the kernel wrote to a converted copy of `original` back.
  void store(const Tensor& converted, const OptionalTensor& original) const {
    if (mixed_ && given(original)) {
      on_host(*original).copy_(converted);
    }
  }

 private:
  bool mixed_;
  c10::ScalarType common_;
};

std::tuple<Tensor, Tensor, Tensor> native_batch_norm(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, bool training, double momentum, double eps) {
  Kernel kernel("aten::native_batch_norm");
  kernel.reads(input).reads(weight).reads(bias);
  if (training) {
    kernel.writes(running_mean).writes(running_var);
  } else {
    kernel.reads(running_mean).reads(running_var);
  }
  kernel.launch();
  const HostTypes host(input, weight, running_mean);
  const Tensor mean = host(running_mean);
  const Tensor variance = host(running_var);
  auto [output, save_mean, save_invstd] =
      at::native_batch_norm(on_host(input), host(weight), host(bias), mean, variance, training, momentum, eps);
  if (training) {
    host.store(mean, running_mean);
    host.store(variance, running_var);
  }
  return {kernel.result(std::move(output)), kernel.result(std::move(save_mean)), kernel.result(std::move(save_invstd))};
}

std::tuple<Tensor, Tensor, Tensor> native_batch_norm_backward(
    const Tensor& grad_output, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& save_mean, const OptionalTensor& save_invstd,
    bool training, double eps, std::array<bool, 3> output_mask) {
  Kernel kernel("aten::native_batch_norm_backward");
  kernel.reads(grad_output).reads(input).reads(weight).reads(running_mean).reads(running_var);
  kernel.reads(save_mean).reads(save_invstd).launch();
  const HostTypes host(input, weight, running_mean);
  auto [grad_input, grad_weight, grad_bias] = at::native_batch_norm_backward(
      on_host(grad_output), on_host(input), host(weight), host(running_mean), host(running_var), host(save_mean),
      host(save_invstd), training, eps, output_mask);
  const auto as_weight = [&](Tensor&& grad) {
    return kernel.result(given(weight) && grad.defined() ? grad.to(weight->scalar_type()) : std::move(grad));
  };
  return {kernel.result(std::move(grad_input)), as_weight(std::move(grad_weight)), as_weight(std::move(grad_bias))};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  m.impl("batch_norm_elemt", TORCH_FN(normalize));
  m.impl("batch_norm_elemt.out", TORCH_FN(normalize_out));
  m.impl("batch_norm_gather_stats", TORCH_FN(gather_stats));
  m.impl("batch_norm_gather_stats_with_counts", TORCH_FN(gather_stats_with_counts));
  m.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  m.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
  m.impl("native_batch_norm", TORCH_FN(native_batch_norm));
  m.impl("native_batch_norm_backward", TORCH_FN(native_batch_norm_backward));
}

} // namespace torch_ext::sim
