#include "host_tensors.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include "alias.h"
#include "checks.h"
#include "device.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

// The types that have no entry in ncclDataType of torch's ProcessGroupNCCL.
constexpr std::array kUnknownToNccl{at::kShort, at::kUInt16, at::kUInt32, at::kUInt64};

// An unowned alias with the tensor's strides. Raises as `transport_view`, but for holes.
at::Tensor transport_alias(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(
      tensor.device().type() == kSim, "simccl works on ", kSimName, " tensors, but got a tensor on ", tensor.device(),
      ". Use a group with a backend for that device, such as 'cpu:gloo,", kSimName, ":simccl'.");
  TORCH_CHECK(tensor.layout() == at::kStrided, "simccl works on dense tensors, but got layout ", tensor.layout(), ".");
  TORCH_CHECK_TYPE(
      std::ranges::count(kUnknownToNccl, tensor.scalar_type()) == 0,
      "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
  check_bounds(name, tensor);
  return unowned_host_alias(tensor.is_conj() ? tensor.conj() : tensor);
}

[[noreturn]] void refuse_strides(const at::Tensor& tensor) {
  C10_THROW_ERROR(
      ValueError,
      c10::str("Tensors must be contiguous, but got sizes ", tensor.sizes(), " with strides ", tensor.strides(), "."));
}

at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

} // namespace

at::Tensor transport_view(const at::Tensor& tensor, const std::string& name) {
  const at::Tensor alias = transport_alias(tensor, name);
  // The transport ignores strides, and would run past the memory of a tensor with holes.
  if (!alias.is_non_overlapping_and_dense()) {
    refuse_strides(tensor);
  }
  return flat(alias);
}

Tensors transport_view(const Tensors& tensors, const std::string& name) {
  return c10::fmap(tensors, [&](const at::Tensor& tensor) { return transport_view(tensor, name); });
}

Tensors transport_list(const Tensors& tensors, const std::string& name) {
  if (!std::ranges::all_of(tensors, [&](const at::Tensor& one) { return one.is_same_size(tensors.front()); })) {
    return transport_view(tensors, name);
  }
  return c10::fmap(tensors, [&](const at::Tensor& tensor) {
    const at::Tensor alias = transport_alias(tensor, name);
    return alias.is_contiguous() ? flat(alias) : alias;
  });
}

void check_contiguous(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.layout() == at::kStrided && !tensor.is_contiguous(tensor.suggest_memory_format())) {
      refuse_strides(tensor);
    }
  }
}

Tensors transport_parts(const at::Tensor& tensor, int64_t parts, const std::string& name) {
  const at::Tensor view = transport_view(tensor, name);
  return view.split_with_sizes(std::vector<int64_t>(static_cast<size_t>(parts), view.numel() / parts));
}

Tensors transport_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t parts) {
  constexpr const char* kName = "all_to_all";
  TORCH_CHECK_VALUE(
      tensor.dim() > 0 && tensor.is_contiguous(),
      "Tensors must be contiguous: all_to_all_single cuts dimension 0, but got sizes ", tensor.sizes(),
      " with strides ", tensor.strides(), ".");
  const int64_t all = tensor.size(0);
  if (rows.empty()) {
    TORCH_CHECK(
        all % parts == 0, "Tensor's dim 0 does not divide equally across group size: got ", all, " rows for ", parts,
        " ranks. Say how many rows each rank gets.");
    return transport_parts(tensor, parts, kName);
  }
  const auto sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  TORCH_CHECK(
      static_cast<int64_t>(rows.size()) == parts && sum == all && std::ranges::min(rows) >= 0,
      "Split sizes don't match total dim 0 size: got ", rows.size(), " splits of ", sum, " rows, expected ", parts,
      " of ", all, ".");
  const at::Tensor view = transport_view(tensor, kName);
  const int64_t row = all == 0 ? 0 : view.numel() / all;
  return view.split_with_sizes(c10::fmap(rows, [&](int64_t count) { return count * row; }));
}

std::vector<int64_t> numels(const Tensors& tensors) {
  return c10::fmap(tensors, [](const at::Tensor& tensor) { return tensor.numel(); });
}

namespace {

using c10d::ReduceOp;

ReduceOp boolean_op(const ReduceOp& wanted) {
  const bool is_any = wanted == ReduceOp::SUM || wanted == ReduceOp::MAX || wanted == ReduceOp::BOR;
  const bool is_all = wanted == ReduceOp::PRODUCT || wanted == ReduceOp::MIN || wanted == ReduceOp::BAND;
  TORCH_CHECK_VALUE(
      is_any || is_all || wanted == ReduceOp::BXOR,
      "Cannot use ReduceOp.AVG or PREMUL_SUM with boolean inputs; convert them to a number type.");
  return is_any ? ReduceOp::MAX : is_all ? ReduceOp::MIN : ReduceOp::BXOR;
}

bool is_bitwise(const ReduceOp& op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

at::Tensor factor_of(const ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(
      supplement != nullptr,
      "PREMUL_SUM without a factor: make the operation with torch.distributed._make_nccl_premul_sum.");
  return supplement->tensor_factor.defined()
      ? on_host(supplement->tensor_factor)
      : at::scalar_tensor(supplement->double_factor, at::kDouble);
}

} // namespace

Reduction::Reduction(const ReduceOp& wanted, at::ScalarType type, int group_size)
    : wanted_(wanted), op_(wanted), type_(type) {
  TORCH_CHECK_VALUE(
      !is_bitwise(wanted) || c10::isIntegralType(type, /*includeBool=*/true), "Cannot use a bitwise ReduceOp with ",
      type, " tensors; it is defined for integers and booleans.");
  TORCH_CHECK_VALUE(
      !c10::isComplexType(type) || wanted == ReduceOp::SUM || wanted == ReduceOp::AVG || wanted == ReduceOp::PREMUL_SUM,
      "Complex tensors can be reduced with SUM, AVG and PREMUL_SUM only.");
  if (c10::isFloat8Type(type)) {
    staging_type_ = at::kFloat;
  }
  if (type == at::kBool) {
    op_ = boolean_op(wanted);
  } else if (wanted == ReduceOp::AVG) {
    op_ = ReduceOp::SUM;
    divisor_ = group_size;
  } else if (wanted == ReduceOp::PREMUL_SUM) {
    factor_ = factor_of(wanted);
    op_ = ReduceOp::SUM;
  }
}

void check_known_to_nccl(const ReduceOp& wanted, at::ScalarType type) {
  constexpr std::array<std::pair<ReduceOp::RedOpType, const char*>, 3> kBitwise{
      {{ReduceOp::BAND, "BAND"}, {ReduceOp::BOR, "BOR"}, {ReduceOp::BXOR, "BXOR"}}};
  for (const auto& [op, name] : kBitwise) {
    TORCH_CHECK_VALUE(wanted != op, "Cannot use ReduceOp.", name, " with NCCL");
  }
  TORCH_CHECK_TYPE(type != at::kBool || wanted != ReduceOp::AVG, "Cannot use ReduceOp.AVG with boolean inputs");
  TORCH_CHECK(
      type != at::kFloat8_e5m2fnuz && type != at::kFloat8_e4m3fnuz && type != at::kFloat8_e8m0fnu,
      "Unsupported Float8 type for NCCL reduction");
  const bool is_float = c10::isFloatingType(type) && !c10::isFloat8Type(type);
  TORCH_CHECK_TYPE(
      wanted != ReduceOp::PREMUL_SUM || is_float || c10::isComplexType(type),
      "PreMulSum Data type must be half, float, bfloat16 or double");
}

at::Tensor Reduction::same_bytes(const at::Tensor& host) const {
  if (type_ == at::kBool) {
    return host.view(at::kByte);
  }
  return host.is_complex() ? at::view_as_real(host) : host;
}

at::Tensor Reduction::source(const at::Tensor& host) const {
  if (!staging_type_.has_value() && !factor_.has_value()) {
    return same_bytes(host).view({-1});
  }
  at::Tensor buffer = staging_type_.has_value() ? host.to(*staging_type_) : same_bytes(host).clone();
  if (factor_.has_value()) {
    buffer.mul_(factor_->to(buffer.scalar_type()));
  }
  return buffer.view({-1});
}

uint64_t Reduction::source_bytes(const at::Tensor& host) const {
  return static_cast<uint64_t>(host.numel()) * c10::elementSize(staging_type_.value_or(type_));
}

at::Tensor Reduction::target(const at::Tensor& host) const {
  return staging_type_.has_value()
      ? at::empty({host.numel()}, host.options().dtype(staging_type_))
      : same_bytes(host).view({-1});
}

void Reduction::finish(const at::Tensor& buffer, const at::Tensor& host) const {
  at::Tensor target = staging_type_.has_value() ? host : same_bytes(host);
  if (divisor_ != 1) {
    if (c10::isIntegralType(type_, /*includeBool=*/false)) {
      buffer.div_(divisor_, "trunc");
    } else {
      buffer.div_(divisor_);
    }
  }
  if (!target.is_alias_of(buffer)) {
    target.copy_(buffer.view_as(target));
  }
}

} // namespace torch_ext::sim
