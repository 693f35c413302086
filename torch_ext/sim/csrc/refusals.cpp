#include "refusals.h"

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "std.h"

namespace torch_ext::sim {

// Which calls are refused.
enum class When : uint8_t {
  kIntegers,      // of the first tensor; the rest holds under use_deterministic_algorithms alone
  kAlways,        // the operator is nondeterministic
  kFloats,        // for floating-point and complex numbers
  kWeights,       // with weights, the second argument
  kReduced,       // with a reduction, the fourth argument
  kMaximumOfBags, // with embedding_bag's mode "max", the eighth argument
};

struct Refusal {
  std::string_view name; // of the operator, without aten::
  When when;
  const char* kernel; // as CUDA's message names it
};

namespace {

// The names of the kernels stand in torch's sources, in AT_DISPATCH_... and alertNotDeterministic(...).
constexpr std::array kRefusals{
    Refusal{"addbmm", When::kIntegers, "addmm_cuda"},
    Refusal{"addbmm_", When::kIntegers, "addmm_cuda"},
    Refusal{"addmm", When::kIntegers, "addmm_cuda"},
    Refusal{"addmm_", When::kIntegers, "addmm_cuda"},
    Refusal{"addmv", When::kIntegers, "addmv_impl_cuda"},
    Refusal{"addmv_", When::kIntegers, "addmv_impl_cuda"},
    Refusal{"baddbmm", When::kIntegers, "baddbmm_cuda"},
    Refusal{"baddbmm_", When::kIntegers, "baddbmm_cuda"},
    Refusal{"bmm", When::kIntegers, "baddbmm_cuda"},
    Refusal{"dot", When::kIntegers, "dot"},
    Refusal{"mm", When::kIntegers, "addmm_cuda"},
    Refusal{"mv", When::kIntegers, "addmv_impl_cuda"},
    Refusal{"vdot", When::kIntegers, "vdot"},
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
    Refusal{"histc", When::kFloats, "_histc_cuda with floating point input"},
    Refusal{"nll_loss2d_forward", When::kReduced, "nll_loss2d_forward_out_cuda_template"},
    Refusal{"reflection_pad1d_backward", When::kAlways, "reflection_pad1d_backward_out_cuda"},
    Refusal{"reflection_pad2d_backward", When::kAlways, "reflection_pad2d_backward_cuda"},
    Refusal{"reflection_pad3d_backward", When::kAlways, "reflection_pad3d_backward_out_cuda"},
    Refusal{"upsample_bicubic2d_backward", When::kAlways, "upsample_bicubic2d_backward_out_cuda"},
    Refusal{"upsample_bilinear2d_backward", When::kAlways, "upsample_bilinear2d_backward_out_cuda"},
    Refusal{"upsample_linear1d_backward", When::kAlways, "upsample_linear1d_backward_out_cuda"},
    Refusal{"upsample_trilinear3d_backward", When::kAlways, "upsample_trilinear3d_backward_out_cuda"},
};

bool applies(When when, c10::ArrayRef<c10::IValue> arguments) {
  constexpr size_t kReduction = 3, kMode = 7;
  constexpr int64_t kMaximum = 2;
  switch (when) {
    case When::kFloats: {
      const auto type = arguments[0].toTensor().scalar_type();
      return c10::isFloatingType(type) || c10::isComplexType(type);
    }
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

const Refusal* refusal_of(const std::string& name) {
  constexpr std::string_view kSpace = "aten::";
  const std::string_view whole = name;
  if (!whole.starts_with(kSpace)) {
    return nullptr;
  }
  const auto* found = std::find_if(kRefusals.begin(), kRefusals.end(), [&](const Refusal& each) {
    return each.name == whole.substr(kSpace.size());
  });
  return found == kRefusals.end() ? nullptr : found;
}

void check_refusal(const Refusal& refusal, c10::ArrayRef<c10::IValue> arguments) {
  if (refusal.when == When::kIntegers) {
    const auto type = arguments[0].toTensor().scalar_type();
    const bool empty = std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& each) {
      return each.isTensor() && each.toTensor().numel() == 0;
    });
    TORCH_CHECK_NOT_IMPLEMENTED(
        empty || !c10::isIntegralType(type, /*includeBool=*/true), "\"", refusal.kernel, "\" not implemented for '",
        type, "'");
  } else if (at::globalContext().deterministicAlgorithms() && applies(refusal.when, arguments)) {
    at::Context::alertNotDeterministic(refusal.kernel);
  }
}

} // namespace torch_ext::sim
