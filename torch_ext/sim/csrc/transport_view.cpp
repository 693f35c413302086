#include "transport_view.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "alias.h"
#include "bounds.h"
#include "device.h"

namespace torch_ext::sim {

at::Tensor transport_view(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(
      tensor.device().type() == kSim, "simccl works on sim tensors, but got a tensor on ", tensor.device(),
      ". Use a group with a backend for that device, such as 'cpu:gloo,sim:simccl'.");
  TORCH_CHECK(tensor.layout() == at::kStrided, "simccl works on dense tensors, but got layout ", tensor.layout(), ".");
  check_bounds(name, tensor);
  at::Tensor alias = host_alias(tensor.is_conj() ? tensor.conj() : tensor);
  // Dense in another order than row-major is fine as long as every rank has the same order: NCCL allows it too. The
  // transport does not look, and would run past what a tensor with holes covers.
  TORCH_CHECK_VALUE(
      alias.is_non_overlapping_and_dense(), "Tensors must be contiguous, but got sizes ", alias.sizes(),
      " with strides ", alias.strides(), ".");
  return alias.as_strided({alias.numel()}, {1});
}

Tensors transport_view(const Tensors& tensors, const std::string& name) {
  Tensors views;
  views.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    views.push_back(transport_view(tensor, name));
  }
  return views;
}

Tensors transport_parts(const at::Tensor& tensor, int64_t parts, const std::string& name) {
  const at::Tensor view = transport_view(tensor, name);
  const int64_t each = view.numel() / parts;
  Tensors cut;
  cut.reserve(static_cast<size_t>(parts));
  for (int64_t part = 0; part < parts; ++part) {
    cut.push_back(view.narrow(0, part * each, each));
  }
  return cut;
}

Tensors transport_rows(
    const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t parts, const std::string& name) {
  TORCH_CHECK_VALUE(
      tensor.dim() > 0 && tensor.is_contiguous(),
      "all_to_all_single cuts dimension 0 of contiguous tensors, but got sizes ", tensor.sizes(), " with strides ",
      tensor.strides(), ".");
  const int64_t all = tensor.size(0);
  if (rows.empty()) {
    TORCH_CHECK_VALUE(
        all % parts == 0, "Tensor's dim 0 does not divide equally across group size: got ", all, " rows for ", parts,
        " ranks. Say how many rows each rank gets.");
    return transport_parts(tensor, parts, name);
  }
  const auto sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(rows.size()) == parts && sum == all, "Split sizes don't match total dim 0 size: got ",
      rows.size(), " splits of ", sum, " rows, expected ", parts, " of ", all, ".");
  const at::Tensor view = transport_view(tensor, name);
  const int64_t row = all == 0 ? 0 : view.numel() / all;
  Tensors cut;
  int64_t at = 0;
  for (const auto count : rows) {
    cut.push_back(view.narrow(0, at * row, count * row));
    at += count;
  }
  return cut;
}

std::vector<int64_t> numels(const Tensors& tensors) {
  std::vector<int64_t> counts;
  counts.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    counts.push_back(tensor.numel());
  }
  return counts;
}

} // namespace torch_ext::sim
