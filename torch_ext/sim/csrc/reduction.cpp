#include "reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include <cstdint>
#include <optional>

#include "alias.h"

namespace torch_ext::sim {
namespace {

using c10d::ReduceOp;

std::optional<at::ScalarType> staging_type_of(at::ScalarType type) {
  switch (type) {
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
    case at::kUInt64:
      return at::kLong;
    default:
      return c10::isFloat8Type(type) ? std::make_optional(at::kFloat) : std::nullopt;
  }
}

ReduceOp boolean_op(const ReduceOp& wanted) {
  switch (wanted) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
    case ReduceOp::BOR:
      return ReduceOp::MAX;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::BAND:
      return ReduceOp::MIN;
    case ReduceOp::BXOR:
      return ReduceOp::BXOR;
    default:
      TORCH_CHECK_VALUE(
          false, "Cannot use ReduceOp.AVG or PREMUL_SUM with boolean inputs; convert them to a number type.");
  }
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
    : wanted_(wanted), op_(wanted), type_(type), staging_type_(staging_type_of(type)) {
  TORCH_CHECK_VALUE(
      !is_bitwise(wanted) || c10::isIntegralType(type, /*includeBool=*/true), "Cannot use a bitwise ReduceOp with ",
      type, " tensors; it is defined for integers and booleans.");
  TORCH_CHECK_VALUE(
      !c10::isComplexType(type) || wanted == ReduceOp::SUM || wanted == ReduceOp::AVG || wanted == ReduceOp::PREMUL_SUM,
      "Complex tensors can be reduced with SUM, AVG and PREMUL_SUM only.");
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

at::Tensor Reduction::same_bytes(const at::Tensor& host) const {
  if (type_ == at::kBool) {
    return host.view(at::kByte);
  }
  return host.is_complex() ? at::view_as_real(host) : host;
}

void Reduction::scale(at::Tensor& buffer) const {
  if (factor_.has_value()) {
    buffer.mul_(factor_->to(buffer.scalar_type()));
  }
}

at::Tensor Reduction::source(const at::Tensor& host) const {
  const bool as_it_is = !staging_type_.has_value() && !factor_.has_value();
  return (as_it_is ? same_bytes(host) : prepare_copy(host)).view({-1});
}

uint64_t Reduction::source_bytes(const at::Tensor& host) const {
  return static_cast<uint64_t>(host.numel()) * c10::elementSize(staging_type_.value_or(type_));
}

at::Tensor Reduction::target(const at::Tensor& host) const {
  return staging_type_.has_value()
      ? at::empty({host.numel()}, host.options().dtype(staging_type_))
      : same_bytes(host).view({-1});
}

at::Tensor Reduction::prepare(const at::Tensor& host) const {
  at::Tensor buffer = staging_type_.has_value() ? host.to(*staging_type_) : same_bytes(host);
  scale(buffer);
  return buffer;
}

at::Tensor Reduction::prepare_copy(const at::Tensor& host) const {
  at::Tensor buffer = staging_type_.has_value() ? host.to(*staging_type_) : same_bytes(host).clone();
  scale(buffer);
  return buffer;
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
    target.copy_(buffer);
  }
}

} // namespace torch_ext::sim
