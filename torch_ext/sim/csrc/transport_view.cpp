#include "transport_view.h"

#include <cstdint>
#include <vector>

#include "alias.h"
#include "device.h"

namespace torch_ext::sim {

at::Tensor checked_alias(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kSim, "simccl works on sim tensors, but got a tensor on ", tensor.device(),
      ". Use a group with a backend for that device, such as 'cpu:gloo,sim:simccl'.");
  TORCH_CHECK(tensor.layout() == at::kStrided, "simccl works on dense tensors, but got layout ", tensor.layout(), ".");
  at::Tensor alias = host_alias(tensor.is_conj() ? tensor.conj() : tensor);
  // Dense in another order than row-major is fine as long as every rank has the same order: NCCL allows it too. The
  // transport does not look, and would run past what a tensor with holes covers.
  TORCH_CHECK_VALUE(
      alias.is_non_overlapping_and_dense(), "Tensors must be contiguous, but got sizes ", alias.sizes(),
      " with strides ", alias.strides(), ".");
  return alias.is_contiguous() ? alias : alias.as_strided({alias.numel()}, {1});
}

at::Tensor transport_rows(const at::Tensor& tensor) {
  at::Tensor alias = checked_alias(tensor);
  switch (alias.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return alias;
    default:
      return (alias.dim() == 0 ? alias.view({1}) : alias).view(at::kByte);
  }
}

at::Tensor transport_view(const at::Tensor& tensor) {
  return transport_rows(tensor).view({-1});
}

Tensors transport_view(const Tensors& tensors) {
  Tensors aliases;
  aliases.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    aliases.push_back(transport_view(tensor));
  }
  return aliases;
}

TensorLists transport_view(const TensorLists& lists) {
  TensorLists aliases;
  for (const auto& list : lists) {
    aliases.push_back(transport_view(list));
  }
  return aliases;
}

std::vector<int64_t> transport_splits(std::vector<int64_t> splits, const at::Tensor& tensor, const at::Tensor& host) {
  if (tensor.dim() > 0 && host.size(0) != tensor.size(0) && tensor.size(0) > 0) {
    for (auto& split : splits) {
      split *= host.size(0) / tensor.size(0);
    }
  }
  return splits;
}

} // namespace torch_ext::sim
