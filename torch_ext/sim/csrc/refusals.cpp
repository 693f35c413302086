#include "checks.h"

#include <torch/version.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// Which calls are refused.
enum class When : uint8_t {
  kMissing,  // all of them
  kIntegers, // by the type of the first tensor, as the next two
  kHalves,   // of 16 bits
  kLayouts,  // by the shapes, strides and types of a product of float8 matrices
  kScatters, // booleans and complex numbers, with a reduction (the fifth argument) other than a sum
  // Under use_deterministic_algorithms alone:
  kAlways,        // the operator is nondeterministic
  kProducts,      // with the reduction "prod" or "multiply", the fifth argument, of tensors
  kAccumulates,   // with the fourth argument true
  kIndices,       // with a dimension, the second argument, and so with indices
  kFloats,        // for floating-point and complex numbers
  kWeights,       // with weights, the second argument
  kReduced,       // with a reduction, the fourth argument
  kMaximumOfBags, // with embedding_bag's mode "max", the eighth argument
};

struct Refusal {
  std::string_view name; // of the operator and its in-place form, without aten:: and the underscore
  When when;
  const char* kernel; // as CUDA's message names it
};

namespace {

// The names of the kernels stand in torch's sources, in AT_DISPATCH_... and alertNotDeterministic(...). Rows of one
// operator are neighbours.
constexpr std::array kRefusals{
    Refusal{"histogram", When::kMissing, ""},
    Refusal{"_histogramdd_bin_edges", When::kMissing, ""},
    Refusal{"_histogramdd_from_bin_cts", When::kMissing, ""},
    Refusal{"_histogramdd_from_bin_tensors", When::kMissing, ""},
    Refusal{"_upsample_bicubic2d_aa", When::kIntegers, "upsample_bicubic2d_out_frame"},
    Refusal{"_upsample_bilinear2d_aa", When::kIntegers, "upsample_bilinear2d_out_frame"},
    Refusal{"addbmm", When::kIntegers, "addmm_cuda"},
    Refusal{"addmm", When::kIntegers, "addmm_cuda"},
    Refusal{"addmv", When::kIntegers, "addmv_impl_cuda"},
    Refusal{"avg_pool2d", When::kIntegers, "avg_pool2d_out_cuda_frame"},
    Refusal{"avg_pool3d", When::kIntegers, "avg_pool3d_out_cuda"},
    Refusal{"baddbmm", When::kIntegers, "baddbmm_cuda"},
    Refusal{"bmm", When::kIntegers, "baddbmm_cuda"},
    Refusal{"dot", When::kIntegers, "dot"},
    Refusal{"max_pool2d_with_indices", When::kIntegers, "max_pool2d_with_indices_out_cuda_frame"},
    Refusal{"max_pool3d_with_indices", When::kIntegers, "max_pool3d_with_indices_out_frame"},
    Refusal{"mm", When::kIntegers, "addmm_cuda"},
    Refusal{"mv", When::kIntegers, "addmv_impl_cuda"},
    Refusal{"native_dropout_backward", When::kIntegers, "masked_scale"},
    Refusal{"upsample_bicubic2d", When::kIntegers, "upsample_bicubic2d_out_frame"},
    Refusal{"upsample_bilinear2d", When::kIntegers, "upsample_bilinear2d_out_frame"},
    Refusal{"vdot", When::kIntegers, "vdot"},
    Refusal{"_scaled_mm", When::kLayouts, ""},
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
    Refusal{"angle", When::kHalves, "angle_cuda"},
#endif
    Refusal{"igamma", When::kHalves, "igamma_cuda"},
    Refusal{"igammac", When::kHalves, "igammac_cuda"},
    Refusal{"scatter", When::kScatters, "cuda_scatter_gather_base_kernel_func"},
    Refusal{"scatter", When::kProducts, "scatter_reduce_cuda_kernel"},
    Refusal{"scatter_reduce", When::kScatters, "cuda_scatter_gather_base_kernel_func"},
    Refusal{"scatter_reduce", When::kProducts, "scatter_reduce_cuda_prod_"},
    Refusal{"histc", When::kHalves, "histc"},
    Refusal{"histc", When::kFloats, "_histc_cuda with floating point input"},
    Refusal{"_adaptive_avg_pool2d_backward", When::kAlways, "adaptive_avg_pool2d_backward_cuda"},
    Refusal{"_adaptive_avg_pool3d_backward", When::kAlways, "adaptive_avg_pool3d_backward_cuda"},
    Refusal{"_ctc_loss_backward", When::kAlways, "ctc_loss_backward_gpu"},
    Refusal{"_embedding_bag_dense_backward", When::kMaximumOfBags, "embedding_bag_backward_cuda_max"},
    Refusal{"adaptive_max_pool2d_backward", When::kAlways, "adaptive_max_pool2d_backward_cuda"},
    Refusal{"avg_pool3d_backward", When::kAlways, "avg_pool3d_backward_cuda"},
    Refusal{"bincount", When::kWeights, "_bincount_cuda"},
    Refusal{"fractional_max_pool2d_backward", When::kAlways, "fractional_max_pool2d_backward_cuda"},
    Refusal{"fractional_max_pool3d_backward", When::kAlways, "fractional_max_pool3d_backward_cuda"},
    Refusal{"grid_sampler_2d_backward", When::kAlways, "grid_sampler_2d_backward_cuda"},
    Refusal{"grid_sampler_3d_backward", When::kAlways, "grid_sampler_3d_backward_cuda"},
    Refusal{"median", When::kIndices, "median CUDA with indices output"},
    Refusal{"nanmedian", When::kIndices, "median CUDA with indices output"},
    Refusal{"nll_loss2d_forward", When::kReduced, "nll_loss2d_forward_out_cuda_template"},
    Refusal{"put", When::kAccumulates, "put_"},
    Refusal{"reflection_pad1d_backward", When::kAlways, "reflection_pad1d_backward_out_cuda"},
    Refusal{"reflection_pad2d_backward", When::kAlways, "reflection_pad2d_backward_cuda"},
    Refusal{"reflection_pad3d_backward", When::kAlways, "reflection_pad3d_backward_out_cuda"},
    Refusal{"upsample_bicubic2d_backward", When::kAlways, "upsample_bicubic2d_backward_out_cuda"},
    Refusal{"upsample_bilinear2d_backward", When::kAlways, "upsample_bilinear2d_backward_out_cuda"},
    Refusal{"upsample_linear1d_backward", When::kAlways, "upsample_linear1d_backward_out_cuda"},
    Refusal{"upsample_trilinear3d_backward", When::kAlways, "upsample_trilinear3d_backward_out_cuda"},
};

constexpr const char* kNotImplemented = "\" not implemented for '";

// See cuda_as_sim/table.py, which checks the text of the variable. A device without a name multiplies float8 matrices.
double capability() {
  const char* text = std::getenv("TORCH_EXT_SIM_CAPABILITY");
  return !kIsCuda ? 9.0 : text == nullptr ? 8.0 : std::strtod(text, nullptr);
}

// As ScaledBlas.cpp of torch: float8 came with 8.9, and cuBLASLt multiplies rows by columns until 10.0.
void check_scaled_product(const at::Tensor& one, const at::Tensor& other) {
  constexpr int64_t kMultiple = 16;
  constexpr double kFirst = 8.9, kAnyLayout = 10.0;
  TORCH_CHECK(
      capability() >= kFirst,
      "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+. "
      "TORCH_EXT_SIM_CAPABILITY=9.0 makes this device one.");
  if (one.dim() != 2 || other.dim() != 2) {
    return; // the host's kernel says so
  }
  const int64_t rows = other.size(0), columns = other.size(1);
  TORCH_CHECK(
      one.size(1) % kMultiple == 0, "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (",
      one.size(0), "x", one.size(1), ").");
  TORCH_CHECK(
      rows % kMultiple == 0 && columns % kMultiple == 0, "mat2 shape (", rows, "x", columns,
      ") must be divisible by 16");
  TORCH_CHECK_VALUE(
      one.scalar_type() != at::kFloat8_e5m2 || other.scalar_type() != at::kFloat8_e5m2,
      "Multiplication of two Float8_e5m2 matrices is not supported");
  TORCH_CHECK(
      capability() >= kAnyLayout || (one.stride(1) == 1 && other.stride(0) == 1),
      "Only multiplication of row-major and column-major matrices is supported by cuBLASLt");
}

bool applies(When when, c10::ArrayRef<c10::IValue> arguments) {
  constexpr size_t kReduction = 3, kWord = 4, kMode = 7;
  constexpr int64_t kMaximum = 2;
  const auto reduces_by = [&](std::string_view one, std::string_view other) {
    const bool is_named = arguments.size() > kWord && arguments[kWord].isString();
    return is_named && (arguments[kWord].toStringView() == one || arguments[kWord].toStringView() == other);
  };
  const auto type = arguments[0].toTensor().scalar_type();
  switch (when) {
    case When::kIntegers:
      return c10::isIntegralType(type, /*includeBool=*/true);
    case When::kHalves:
      return type == at::kHalf || type == at::kBFloat16;
    case When::kScatters:
      return (type == at::kBool || c10::isComplexType(type)) && arguments.size() > kWord &&
          arguments[kWord].isString() && !reduces_by("sum", "add");
    case When::kProducts:
      return reduces_by("prod", "multiply") && arguments[kReduction].isTensor();
    case When::kAccumulates:
      return arguments[kReduction].toBool();
    case When::kIndices:
      return arguments.size() > 1;
    case When::kFloats:
      return c10::isFloatingType(type) || c10::isComplexType(type);
    case When::kWeights:
      return arguments[1].isTensor() && arguments[1].toTensor().defined();
    case When::kReduced:
      return arguments[kReduction].toInt() != 0;
    case When::kMaximumOfBags:
      return arguments[kMode].toInt() == kMaximum;
    default:
      return true;
  }
}

} // namespace

Refusals refusals_of(const std::string& name) {
  constexpr std::string_view kSpace = "aten::";
  std::string_view own = name;
  if (!own.starts_with(kSpace)) {
    return {};
  }
  own.remove_prefix(kSpace.size());
  own.remove_suffix(own.ends_with('_') ? 1 : 0);
  const auto is_of_it = [&](const Refusal& each) { return each.name == own; };
  const auto* first = std::find_if(kRefusals.begin(), kRefusals.end(), is_of_it);
  return {first, std::find_if_not(first, kRefusals.end(), is_of_it)};
}

void check_refusals(Refusals refusals, c10::ArrayRef<c10::IValue> arguments) {
  const bool deterministic = at::globalContext().deterministicAlgorithms();
  for (const Refusal& refusal : refusals) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        refusal.when != When::kMissing, "Could not run 'aten::", refusal.name,
        "' with arguments from the 'CUDA' backend: it has a kernel for the host only.");
    if (refusal.when == When::kLayouts) {
      check_scaled_product(arguments[0].toTensor(), arguments[1].toTensor());
      continue;
    }
    const bool is_of_types = refusal.when < When::kAlways;
    if ((!is_of_types && !deterministic) || !applies(refusal.when, arguments)) {
      continue;
    }
    if (!is_of_types) {
      at::Context::alertNotDeterministic(refusal.kernel);
      continue;
    }
    const bool empty = std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& each) {
      return each.isTensor() && each.toTensor().numel() == 0;
    });
    TORCH_CHECK_NOT_IMPLEMENTED(
        empty, "\"", refusal.kernel, kNotImplemented, arguments[0].toTensor().scalar_type(), "'");
  }
}

void refuse_integers(const char* kernel, at::ScalarType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::isIntegralType(type, /*includeBool=*/true), "\"", kernel, kNotImplemented, type, "'");
}

} // namespace torch_ext::sim
