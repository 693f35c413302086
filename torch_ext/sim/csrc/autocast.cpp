// Autocast: torch keeps the lists of operators for each policy, a device registers them under its own key. Every build
// of torch registers CUDA's.
#include <ATen/autocast_mode.h>

#include "device.h"
#include "std.h"

// The registration macros below spell torch's types without their namespace. A separate namespace hides those names
// from the other sources of the unit (Note [Two units] in build.py).
namespace torch_ext::sim::autocast_policies {
namespace {

using namespace at;

// binary_cross_entropy is unsafe in half precision on every device; it fails with advice, as on GPUs.
at::Tensor refuse_binary_cross_entropy(
    const at::Tensor& /*input*/, const at::Tensor& /*target*/, const std::optional<at::Tensor>& /*weight*/,
    int64_t /*reduction*/) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\nUse "
      "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which include the sigmoid and are safe.");
}

} // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  if (!kIsCuda) {
    m.fallback(torch::CppFunction::makeFallthrough());
  }
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  if (kIsCuda) {
    return;
  }
#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
#undef SIM_LOWER_PRECISION
#undef SIM_FP32
#undef SIM_FP32_SET_OPT_DTYPE
#undef SIM_PROMOTE
  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), TORCH_FN(refuse_binary_cross_entropy));
}

} // namespace torch_ext::sim::autocast_policies
