// Kernels that the host lacks. Synchronised batch norm and the fused cells of recurrent layers are composed of other
// operators on device tensors; gates are (N, G * H) with G = 4 for LSTM and 3 for GRU. The host's dropout would draw
// from the host's generator, its batch norm accepts fewer combinations of types than GPUs do, and its norm by root mean
// square is several operators. Torch sends convolution and fused attention to operators that exist to be overridden by
// a device.
#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_embedding_bag.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/_thnn_differentiable_gru_cell_backward.h>
#include <ATen/ops/_thnn_differentiable_lstm_cell_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "alias.h"
#include "allocator.h"
#include "checks.h"
#include "device.h"
#include "dry.h"
#include "generator.h"
#include "graph.h"
#include "kernel.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

using at::Tensor;

// Half precision is accumulated in float, as on GPUs.
c10::ScalarType accumulate_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

OptionalTensor optional_on_host(const OptionalTensor& tensor) {
  return tensor.has_value() ? std::make_optional(on_host(*tensor)) : std::nullopt;
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

// --- batch norm and layer norm: the host wants weight, bias and statistics of one type, and its statistics have it ---

Tensor cast(const OptionalTensor& tensor, c10::ScalarType type) {
  return given(tensor) ? on_host(*tensor).to(type) : Tensor();
}

// Weight, bias and running statistics in the types that the host kernel accepts with `input`: the input's type, or all
// in float. GPUs also accept running statistics in float with parameters of half precision, and the other way round,
// and save the statistics of half precision in float. The kernel refuses weights of a type that GPUs refuse.
class HostTypes {
 public:
  // saves_float: whether the host kernel should save them so, too.
  HostTypes(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running, bool saves_float = false)
      : common_(accumulate_type(input)), parameters_(given(weight) ? weight->scalar_type() : input.scalar_type()) {
    const bool accepted_by_gpus = parameters_ == input.scalar_type() || parameters_ == at::kFloat;
    const bool differs = given(running) && running->scalar_type() != parameters_;
    mixed_ = (differs || (saves_float && c10::isReducedFloatingType(input.scalar_type()))) && accepted_by_gpus;
  }

  // A host kernel saves its statistics in the weight's type.
  Tensor weight(const OptionalTensor& weight, const Tensor& host_input, c10::IntArrayRef shape) const {
    return mixed_ && !given(weight) ? at::ones(shape, host_input.options().dtype(common_)) : (*this)(weight);
  }

  // What a host kernel has saved, in the type in which it did.
  Tensor saved(const OptionalTensor& statistics) const { return cast(statistics, mixed_ ? common_ : parameters_); }

  Tensor operator()(const OptionalTensor& tensor) const {
    return mixed_ ? cast(tensor, common_) : (given(tensor) ? on_host(*tensor) : Tensor());
  }

  // Copies the kernel's writes to a converted copy back to `original`.
  void store(const Tensor& converted, const OptionalTensor& original) const {
    if (mixed_ && given(original)) {
      on_host(*original).copy_(converted);
    }
  }

 private:
  bool mixed_;
  c10::ScalarType common_, parameters_;
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
  const auto in_float = [&](Tensor&& saved) { return kernel.result(saved.to(accumulate_type(input))); };
  return {kernel.result(std::move(output)), in_float(std::move(save_mean)), in_float(std::move(save_invstd))};
}

std::tuple<Tensor, Tensor, Tensor> native_batch_norm_backward(
    const Tensor& grad_output, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& save_mean, const OptionalTensor& save_invstd,
    bool training, double eps, std::array<bool, 3> output_mask) {
  Kernel kernel("aten::native_batch_norm_backward");
  kernel.reads(grad_output).reads(input).reads(weight).reads(running_mean).reads(running_var);
  kernel.reads(save_mean).reads(save_invstd).launch();
  // CUDA's kernels for channels-last inputs do not look at the running statistics.
  const bool is_fused = output_mask[0] && (training || output_mask[1] || output_mask[2]) &&
      !input.is_contiguous(at::MemoryFormat::ChannelsLast) && !input.is_contiguous(at::MemoryFormat::ChannelsLast3d) &&
      !(input.is_contiguous() && input.stride(1) == 1);
  TORCH_CHECK(
      !is_fused || !given(weight) || !given(running_mean) || running_mean->scalar_type() == weight->scalar_type(),
      "Expected running_mean to have type ", weight->scalar_type(), " but got ", running_mean->scalar_type());
  const HostTypes host(input, weight, running_mean);
  auto [grad_input, grad_weight, grad_bias] = at::native_batch_norm_backward(
      on_host(grad_output), on_host(input), host(weight), host(running_mean), host(running_var), host.saved(save_mean),
      host.saved(save_invstd), training, eps, output_mask);
  const auto as_weight = [&](Tensor&& grad) {
    return kernel.result(given(weight) && grad.defined() ? grad.to(weight->scalar_type()) : std::move(grad));
  };
  return {kernel.result(std::move(grad_input)), as_weight(std::move(grad_weight)), as_weight(std::move(grad_bias))};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(
    const Tensor& input, c10::IntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  Kernel kernel("aten::native_layer_norm");
  kernel.reads(input).reads(weight).reads(bias).launch();
  const HostTypes host(input, weight, {}, /*saves_float=*/true);
  const Tensor x = on_host(input);
  auto [output, mean, rstd] = at::native_layer_norm(x, shape, host.weight(weight, x, shape), host(bias), eps);
  return {kernel.result(std::move(output)), kernel.result(std::move(mean)), kernel.result(std::move(rstd))};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, c10::IntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const OptionalTensor& weight, const OptionalTensor& bias, std::array<bool, 3> output_mask) {
  Kernel kernel("aten::native_layer_norm_backward");
  kernel.reads(grad_output).reads(input).reads(mean).reads(rstd).reads(weight).reads(bias).launch();
  const HostTypes host(input, weight, {}, /*saves_float=*/true);
  const Tensor x = on_host(input);
  auto [grad_input, grad_weight, grad_bias] = at::native_layer_norm_backward(
      on_host(grad_output), x, shape, host(mean), host(rstd), host.weight(weight, x, shape), host(bias), output_mask);
  const auto as_given = [&](Tensor&& grad, const OptionalTensor& parameter) {
    return kernel.result(given(parameter) && grad.defined() ? grad.to(parameter->scalar_type()) : std::move(grad));
  };
  return {
      kernel.result(std::move(grad_input)), as_given(std::move(grad_weight), weight),
      as_given(std::move(grad_bias), bias)};
}

// --- bags of embeddings: the host's results are empty where it does not need them, and others full where GPUs' are ---

// The bag of each index.
Tensor bags_of(const Tensor& offsets, int64_t count) {
  return at::searchsorted(offsets, at::arange(count, offsets.options()), /*out_int32=*/false, /*right=*/true).sub_(1);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> embedding_bag(
    const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool scale_grad_by_freq, int64_t mode,
    bool sparse, const OptionalTensor& per_sample_weights, bool include_last_offset, int64_t padding_idx) {
  constexpr int64_t kMax = 2;
  Kernel kernel("aten::_embedding_bag");
  kernel.reads(weight).reads(indices).reads(offsets).reads(per_sample_weights);
  const auto device = kernel.launch();
  auto [output, bags, sizes, largest] = at::_embedding_bag(
      on_host(weight), on_host(indices), on_host(offsets), scale_grad_by_freq, mode, sparse,
      optional_on_host(per_sample_weights), include_last_offset, padding_idx);
  if (mode != kMax) {
    largest = at::empty({0}, sizes.options());
    bags = at::empty(indices.sizes(), sizes.options());
    if (!is_dry()) {
      const KernelScope scope(device, "aten::_embedding_bag", Allocations::kScratch);
      bags.copy_(bags_of(on_host(offsets), indices.size(0)));
    }
  }
  return {
      kernel.result(std::move(output)), kernel.result(std::move(bags)), kernel.result(std::move(sizes)),
      kernel.result(std::move(largest))};
}

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return given(bias) ? gates + *bias : gates;
}

// workspace: the gates input, forget, cell, output side by side before they are activated, (N, 4 * H)
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  Tensor workspace = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto gates = workspace.chunk(4, 1);
  Tensor cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) {
    return {};
  }
  const auto grads = at::_thnn_differentiable_lstm_cell_backward(
      grad_hy, grad_cy, workspace, at::zeros_like(workspace), /*input_bias=*/{}, /*hidden_bias=*/{}, cx, cy);
  const Tensor& of_gates = std::get<0>(grads);
  return {of_gates, std::get<2>(grads), has_bias ? of_gates.sum(0) : Tensor()};
}

// workspace: reset and update before they are activated, the input's part of new, hx and the hidden part of new, side
// by side, (N, 5 * H)
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = from_input[0] + from_hidden[0];
  const Tensor update = from_input[1] + from_hidden[1];
  const Tensor fresh = (from_input[2] + reset.sigmoid() * from_hidden[2]).tanh();
  return {fresh + update.sigmoid() * (hx - fresh), at::cat({reset, update, from_input[2], hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor none = at::zeros_like(parts[0]);
  auto [grad_input, grad_hidden, grad_hx, grad_input_bias, grad_hidden_bias] =
      at::_thnn_differentiable_gru_cell_backward(
          grad_hy, at::cat({parts[0], parts[1], parts[2]}, 1), at::cat({none, none, parts[4]}, 1), parts[3],
          /*input_bias=*/{}, /*hidden_bias=*/{});
  if (has_bias) {
    grad_input_bias = grad_input.sum(0);
    grad_hidden_bias = grad_hidden.sum(0);
  }
  return {grad_input, grad_hidden, grad_hx, grad_input_bias, grad_hidden_bias};
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0 || p == 0) {
    return {input.clone(), at::zeros_like(input, input.options().dtype(at::kBool)).fill_(true)};
  }
  if (p == 1) {
    return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
  }
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {(input * mask).mul_(1 / (1 - p)), mask};
}

// The host has no histogram of integers. An element equal to `max` counts in the last bin; without a range, as elements
// have it.
Tensor histc_of_integers(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  Kernel kernel("aten::histc");
  kernel.reads(self).launch();
  const Tensor host = on_host(self);
  TORCH_CHECK(bins > 0, "bins must be > 0");
  auto low = min.toLong(), high = max.toLong();
  if (low == high && host.numel() > 0) {
    low = host.min().item<int64_t>();
    high = host.max().item<int64_t>();
  }
  if (low == high) {
    --low;
    ++high;
  }
  TORCH_CHECK(low < high, "max must be larger than min");
  const Tensor counted = host.masked_select((host >= low).logical_and(host <= high)).to(at::kLong);
  const Tensor bin = ((counted - low) * bins).div(high - low, "floor").clamp_max(bins - 1);
  return kernel.result(at::bincount(bin, /*weights=*/{}, bins).to(self.scalar_type()));
}

void histc(const c10::OperatorHandle& op, Stack* stack) {
  constexpr size_t kArguments = 4;
  const auto type = torch::jit::peek(*stack, 0, kArguments).toTensor().scalar_type();
  c10::isIntegralType(type, /*includeBool=*/false) ? captured<&histc_of_integers>(op, stack) : run_on_host(op, stack);
}

// The values of at::SDPBackend (aten/src/ATen/native/transformers/sdp_utils_cpp.h), whose header compiles too slowly.
constexpr int64_t kSdpMath = 0;
constexpr int64_t kSdpFlash = 1;
constexpr int64_t kSdpOverrideable = 4;

// --- root mean square norm, over the dimensions of `shape`, the last ones: y = x * rstd * weight ---

std::tuple<Tensor, Tensor> rms_norm(
    const Tensor& input, c10::IntArrayRef shape, const OptionalTensor& weight, std::optional<double> eps) {
  Kernel kernel("aten::_fused_rms_norm");
  kernel.reads(input).reads(weight).launch();
  auto [output, rstd] = at::_fused_rms_norm(on_host(input), shape, optional_on_host(weight), eps);
  return {kernel.result(std::move(output)), kernel.result(std::move(rstd))};
}

// With g = dy * weight and r = rstd:  dx = g * r - sum(g * x) * r^3 / count * x,  dweight = sum(dy * x * r) over all
// rows; in the order of the formula's automatic derivative, so that the results are the host's.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_output, const Tensor& input, c10::IntArrayRef shape, const Tensor& rstd,
    const OptionalTensor& weight, std::array<bool, 2> output_mask) {
  Kernel kernel("aten::_fused_rms_norm_backward");
  kernel.reads(grad_output).reads(input).reads(rstd).reads(weight).launch();
  std::vector<int64_t> rows(input.dim()), normed(shape.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::copy(rows.end() - static_cast<int64_t>(shape.size()), rows.end(), normed.begin());
  rows.resize(rows.size() - shape.size());
  const auto type = accumulate_type(input);
  const Tensor x = on_host(input).to(type), scale = on_host(rstd).to(type);
  const Tensor grad = on_host(grad_output).to(type), scaled = given(weight) ? grad * on_host(*weight) : grad;
  Tensor of_input, of_weight;
  if (output_mask[0]) {
    const Tensor of_scale = (scaled * x).sum(normed, /*keepdim=*/true);
    const Tensor of_mean = -0.5 * of_scale * scale.pow(3) / c10::multiply_integers(shape);
    of_input = (scaled * scale + of_mean * (2 * x)).to(input.scalar_type());
  }
  if (output_mask[1] && given(weight)) {
    const Tensor each = grad * (x * scale);
    of_weight = (rows.empty() ? each : each.sum(rows)).to(weight->scalar_type());
  }
  return {kernel.result(std::move(of_input)), kernel.result(std::move(of_weight))};
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const bool is_flat = input.dim() < 5, is_dilated = std::ranges::any_of(dilation, [](int64_t by) { return by > 1; });
  refuse_integers(
      transposed ? (is_flat ? "slow_conv_transpose2d_out_cuda" : "slow_conv_transpose3d_out_cuda")
          : is_flat && !is_dilated
          ? "slow_conv2d_cuda"
          : "slow_conv_dilated<>",
      input.scalar_type());
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

// --- for the device CUDA, of which torch asks some operators in another way ---

using ConvolutionGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ConvolutionGrads convolution_backward_with_sizes(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    at::OptionalIntArrayRef /*bias_sizes*/, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask) {
  return convolution_backward(
      grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask);
}

// Torch asks CUDA alone for a softmax of half precision in float32 as one kernel. The host lacks it.
template <auto function, const char* name>
Tensor softmax(const Tensor& input, int64_t dim, bool half_to_float) {
  Kernel kernel(name);
  kernel.reads(input).launch();
  return kernel.result(function(half_to_float ? on_host(input).to(at::kFloat) : on_host(input), dim, false));
}

template <auto function, const char* name>
Tensor softmax_grad(const Tensor& grad, const Tensor& output, int64_t dim, c10::ScalarType input_type) {
  Kernel kernel(name);
  kernel.reads(grad).reads(output).launch();
  return kernel.result(function(on_host(grad), on_host(output), dim, grad.scalar_type()).to(input_type));
}

constexpr char kSoftmax[] = "aten::_softmax", kSoftmaxGrad[] = "aten::_softmax_backward_data",
               kLogSoftmax[] = "aten::_log_softmax", kLogGrad[] = "aten::_log_softmax_backward_data";

void answer_no(const c10::OperatorHandle& op, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

// --- fused attention: query is (B, H, S, D), key and value are (B, G, T, D), where G divides H ---
//
// The host's fused kernel needs as many heads of keys as of queries, so heads of keys are repeated. It has no dropout
// and no gradient of a bias: such calls go by the formula, with P in the host's memory. M is 0 or 1 / (1 - p), for
// dropout.
//
//   P = softmax(scale * Q K^T + bias)       O = (P * M) V                dV = (P * M)^T dO
//   dP = (dO V^T) * M                       dS = P * (dP - sum(dP * P))   dQ = scale * dS K, dK = scale * dS^T Q
//
// Results and gradients get the strides of torch's meta kernels, which compiled code checks.

// A host tensor with the sizes of `tensor`, without memory: Dynamo calls this with tensors that have none.
at::Tensor sizes_on_host(const at::Tensor& tensor, std::optional<int64_t> heads = std::nullopt) {
  auto sizes = tensor.sizes().vec();
  if (heads.has_value() && sizes.size() == 4 && sizes[1] != 0 && *heads % sizes[1] == 0) {
    sizes[1] = *heads;
  }
  return at::from_blob(nullptr, sizes, tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const bool has_mask = given(mask);
  bool is_unknown = dropout == 1; // the formula would divide by zero
  for (const auto& tensor : {query, key, value, has_mask ? *mask : query}) {
    is_unknown = is_unknown || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_nested();
  }
  if (is_unknown) {
    return kSdpMath;
  }
  const auto heads = enable_gqa && query.dim() == 4 ? std::make_optional(query.size(1)) : std::nullopt;
  const at::Tensor queries = sizes_on_host(query), keys = sizes_on_host(key, heads),
                   values = sizes_on_host(value, heads);
  const auto bias = has_mask ? std::make_optional(sizes_on_host(*mask)) : std::nullopt;
  // Hide the call from Dynamo's modes, which do not know these tensors. A subclass may ask its dispatch for its sizes,
  // so they are read above.
  const c10::impl::ExcludeDispatchKeyGuard unseen(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  // This kernel stands for those of a GPU: flash attention accepts no mask, and the memory-efficient one alone float32.
  auto& context = at::globalContext();
  const bool has_flash = context.userEnabledFlashSDP();
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  context.setSDPUseFlash(
      context.userEnabledMemEfficientSDP() || (is_half && (context.userEnabledCuDNNSDP() || (has_flash && !has_mask))));
  const auto restored = c10::make_scope_exit([&] { context.setSDPUseFlash(has_flash); });
  const int64_t host_choice = at::_fused_sdp_choice(queries, keys, values, bias, /*dropout_p=*/0, is_causal, scale);
  return host_choice == kSdpFlash ? kSdpOverrideable : kSdpMath;
}

at::Tensor repeated_heads(const at::Tensor& tensor, int64_t heads) {
  const at::Tensor host = on_host(tensor);
  return host.size(1) == heads ? host : host.repeat_interleave(heads / host.size(1), 1);
}

// Stores a gradient of repeated heads.
at::Tensor store_heads(const at::Tensor& grad, const at::Tensor& destination) {
  auto sizes = destination.sizes().vec();
  const bool repeated = sizes[1] != grad.size(1);
  if (repeated) {
    sizes.insert(sizes.begin() + 2, grad.size(1) / sizes[1]);
  }
  on_host(destination).copy_(repeated ? grad.reshape(sizes).sum(2) : grad);
  return destination;
}

class AttentionFormula {
 public:
  AttentionFormula(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias,
      double dropout, bool is_causal, std::optional<double> scale, int64_t seed)
      : scale_(scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))))),
        query_(on_host(query).to(accumulate_type(query))),
        key_(repeated_heads(key, query.size(1)).to(query_.scalar_type())),
        value_(repeated_heads(value, query.size(1)).to(query_.scalar_type())),
        scores_(at::matmul(query_, key_.mT()).mul_(scale_)) {
    if (is_causal) {
      scores_.masked_fill_(
          at::ones({query.size(2), key.size(2)}, at::kBool).tril_().logical_not_(),
          -std::numeric_limits<double>::infinity());
    }
    if (given(bias)) {
      scores_.add_(on_host(*bias));
    }
    weights_ = at::_safe_softmax(scores_, -1);
    factors_ = at::ones({}, scores_.options());
    if (dropout > 0) {
      const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
      factors_ = at::empty_like(scores_).bernoulli_(1 - dropout, generator).div_(1 - dropout);
    }
  }

  at::Tensor output() const { return at::matmul(weights_ * factors_, value_); }
  at::Tensor logsumexp() const { return at::logsumexp(scores_, -1); }

  // Of query, key, value and the scores.
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> gradients(const at::Tensor& grad_output) const {
    const at::Tensor grad = on_host(grad_output).to(query_.scalar_type());
    const at::Tensor grad_weights = at::matmul(grad, value_.mT()).mul_(factors_);
    const at::Tensor grad_scores = weights_ * (grad_weights - (grad_weights * weights_).sum(-1, /*keepdim=*/true));
    return {
        at::matmul(grad_scores, key_).mul_(scale_), at::matmul(grad_scores.mT(), query_).mul_(scale_),
        at::matmul((weights_ * factors_).mT(), grad), grad_scores};
  }

 private:
  double scale_;
  at::Tensor query_, key_, value_;
  at::Tensor scores_, weights_; // (B, H, S, T)
  at::Tensor factors_;          // of dropout
};

using AttentionResult = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

AttentionResult attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias, double dropout,
    bool is_causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  const int64_t heads = query.size(1);
  const at::Tensor output = at::empty_like(query);
  const at::Tensor logsumexp =
      at::empty({query.size(0), heads, query.size(2)}, query.options().dtype(accumulate_type(query)));
  // The host kernel has no ragged batches: their results are tensors of the shapes that torch's meta kernel gives.
  const auto none = [&query](c10::IntArrayRef size) { return at::zeros(size, query.options().dtype(at::kLong)); };
  const at::Tensor seed = none({});
  Kernel kernel("aten::_scaled_dot_product_fused_attention_overrideable");
  kernel.reads(query).reads(key).reads(value).reads(bias).writes(output).writes(logsumexp).writes(seed);
  const auto device = kernel.allocates(Allocations::kScratch).launch();
  int64_t drawn = 0;
  if (dropout > 0) {
    const auto count = logsumexp.numel() * key.size(2);
    drawn = static_cast<int64_t>(host_generator(std::nullopt, device, count).current_seed());
  }
  if (is_dry()) {
    // The kernel has only results, which exist.
  } else if (dropout > 0) {
    on_host(seed).fill_(drawn);
    const AttentionFormula formula(query, key, value, bias, dropout, is_causal, scale, drawn);
    on_host(output).copy_(formula.output());
    on_host(logsumexp).copy_(formula.logsumexp());
  } else {
    const auto [host_output, host_logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        on_host(query), repeated_heads(key, heads), repeated_heads(value, heads), dropout, is_causal,
        optional_on_host(bias), scale);
    on_host(output).copy_(host_output);
    on_host(logsumexp).copy_(host_logsumexp);
  }
  return {
      output,    logsumexp,         none({0}),
      none({0}), query.sym_size(2), key.sym_size(2),
      seed,      none({}),          at::empty({0}, query.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> grad_input_mask, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor& /*cum_seq_q*/, const at::Tensor& /*cum_seq_k*/, int64_t /*max_q*/, int64_t /*max_k*/,
    double dropout, bool is_causal, const at::Tensor& philox_seed, const at::Tensor& /*philox_offset*/,
    std::optional<double> scale) {
  if (!grad_output.defined()) {
    return {};
  }
  const int64_t heads = query.size(1);
  const at::Tensor grad_query = at::empty_like(query);
  const at::Tensor grad_key = at::empty_like(key);
  const at::Tensor grad_value = at::empty_like(value);
  const at::Tensor grad_bias = bias.defined() && grad_input_mask[3] ? at::empty_like(bias) : at::Tensor();
  Kernel kernel("aten::_scaled_dot_product_fused_attention_overrideable_backward");
  kernel.reads(grad_output).reads(query).reads(key).reads(value).reads(bias).reads(output).reads(logsumexp);
  kernel.reads(philox_seed).writes(grad_query).writes(grad_key).writes(grad_value).writes(grad_bias);
  kernel.allocates(Allocations::kScratch).launch();
  if (is_dry()) {
    return {grad_query, grad_key, grad_value, grad_bias};
  }
  at::Tensor host_query, host_key, host_value;
  if (dropout > 0 || grad_bias.defined()) {
    const auto seed = on_host(philox_seed).item<int64_t>();
    const AttentionFormula formula(query, key, value, bias, dropout, is_causal, scale, seed);
    at::Tensor host_bias;
    std::tie(host_query, host_key, host_value, host_bias) = formula.gradients(grad_output);
    if (grad_bias.defined()) {
      on_host(grad_bias).copy_(at::sum_to(host_bias, bias.sizes()));
    }
  } else {
    const auto mask = bias.defined() ? std::make_optional(on_host(bias)) : std::nullopt;
    std::tie(host_query, host_key, host_value) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        on_host(grad_output), on_host(query), repeated_heads(key, heads), repeated_heads(value, heads), on_host(output),
        on_host(logsumexp), dropout, is_causal, mask, scale);
  }
  return {
      store_heads(host_query, grad_query), store_heads(host_key, grad_key), store_heads(host_value, grad_value),
      grad_bias};
}

// Reads whether a matrix had a result; a dry run assumes so.
void check_linalg(const c10::OperatorHandle& op, Stack* stack) {
  is_dry() ? torch::jit::drop(*stack, op.schema().arguments().size())
           : op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeExplicitAutograd), stack);
}

// The kernel of an operator that is composed of others.
template <auto function>
void composed(const c10::OperatorHandle& op, Stack* stack) {
  common_device(facts_of(op), op.schema(), torch::jit::last(*stack, op.schema().arguments().size()));
  call_boxed<function>(op, stack);
}

template <c10::KernelFunction::BoxedKernelFunction* function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

} // namespace

SIM_LIBRARY_IMPL(aten, kSimKey, m) {
  m.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  m.impl("batch_norm_elemt", boxed<&composed<&normalize>>());
  m.impl("batch_norm_elemt.out", boxed<&composed<&normalize_out>>());
  m.impl("batch_norm_gather_stats", boxed<&composed<&gather_stats>>());
  m.impl("batch_norm_gather_stats_with_counts", boxed<&composed<&gather_stats_with_counts>>());
  m.impl("batch_norm_backward_reduce", boxed<&composed<&batch_norm_backward_reduce>>());
  m.impl("batch_norm_backward_elemt", boxed<&composed<&batch_norm_backward_elemt>>());
  m.impl("native_layer_norm", boxed<&captured<&layer_norm>>());
  m.impl("native_layer_norm_backward", boxed<&captured<&layer_norm_backward>>());
  m.impl("_linalg_check_errors", boxed<&check_linalg>());
  m.impl("_embedding_bag", boxed<&captured<&embedding_bag>>());
  m.impl("_embedding_bag_forward_only", boxed<&captured<&embedding_bag>>());
  m.impl("_native_batch_norm_legit", boxed<&captured<&native_batch_norm>>());
  m.impl("native_batch_norm", boxed<&captured<&native_batch_norm>>());
  m.impl("native_batch_norm_backward", boxed<&captured<&native_batch_norm_backward>>());
  m.impl("_thnn_fused_lstm_cell", boxed<&composed<&lstm_cell>>());
  m.impl("_thnn_fused_lstm_cell_backward_impl", boxed<&composed<&lstm_cell_backward>>());
  m.impl("_thnn_fused_gru_cell", boxed<&composed<&gru_cell>>());
  m.impl("_thnn_fused_gru_cell_backward", boxed<&composed<&gru_cell_backward>>());
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("histc", boxed<&histc>());
  m.impl("_fused_rms_norm", boxed<&captured<&rms_norm>>());
  m.impl("_fused_rms_norm_backward", boxed<&captured<&rms_norm_backward>>());
  m.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable", boxed<&captured<&attention>>());
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", boxed<&captured<&attention_backward>>());
  if (!kIsCuda) {
    at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
    m.impl("convolution_overrideable", boxed<&captured<&convolution>>());
    m.impl("convolution_backward_overrideable", boxed<&captured<&convolution_backward>>());
    return;
  }
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  m.impl("convolution", boxed<&captured<&convolution>>());
  m.impl("convolution_backward", boxed<&captured<&convolution_backward_with_sizes>>());
  m.impl("_softmax", boxed<&captured<&softmax<&at::_softmax, kSoftmax>>>());
  m.impl("_log_softmax", boxed<&captured<&softmax<&at::_log_softmax, kLogSoftmax>>>());
  m.impl("_softmax_backward_data", boxed<&captured<&softmax_grad<&at::_softmax_backward_data, kSoftmaxGrad>>>());
  m.impl("_log_softmax_backward_data", boxed<&captured<&softmax_grad<&at::_log_softmax_backward_data, kLogGrad>>>());
  // Torch queries cuDNN's and MIOpen's own CTC loss on CUDA only.
  for (const char* name :
       {"_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"}) {
    m.impl(name, boxed<&answer_no>());
  }
}

} // namespace torch_ext::sim
