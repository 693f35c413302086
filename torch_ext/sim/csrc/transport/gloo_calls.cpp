#include "gloo_calls.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "../transport_view.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

// What is copied travels as bytes where gloo does not know the type.
at::Tensor known(const at::Tensor& host) {
  switch (host.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return host;
    default:
      return host.view(at::kByte);
  }
}

Tensors known(const Tensors& hosts) {
  Tensors views;
  for (const auto& host : hosts) {
    views.push_back(known(host));
  }
  return views;
}

template <typename Options>
Options with_timeout(const Call& call) {
  Options options;
  options.timeout = call.timeout;
  return options;
}

template <typename Options>
Options with_root(const Call& call, int64_t root) {
  auto options = with_timeout<Options>(call);
  options.rootRank = root;
  return options;
}

// Whether no rank has anything, which gloo refuses to reduce. Of an all-to-all, one rank does not know of all.
bool is_empty(const Call& call) {
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  return call.kind != OpType::ALLTOALL && std::all_of(call.inputs.begin(), call.inputs.end(), is_empty) &&
      std::all_of(call.outputs.begin(), call.outputs.end(), is_empty);
}

GlooWorks gather_to_root(c10d::Backend& gloo, const Call& call) {
  Tensors inputs = known(call.inputs);
  TensorLists outputs;
  if (!call.outputs.empty()) {
    outputs.push_back(known(call.outputs));
  }
  return {{gloo.gather(outputs, inputs, with_root<c10d::GatherOptions>(call, call.root))}};
}

GlooWorks scatter_from_root(c10d::Backend& gloo, const Call& call) {
  Tensors outputs = known(call.outputs);
  TensorLists inputs;
  if (!call.inputs.empty()) {
    inputs.push_back(known(call.inputs));
  }
  return {{gloo.scatter(outputs, inputs, with_root<c10d::ScatterOptions>(call, call.root))}};
}

// gloo uses the buffers of all ranks for partial results, so only an output may serve as it is.
GlooWorks reduce(c10d::Backend& gloo, const Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor from = call.inputs.front();
  const at::Tensor to = call.outputs.empty() ? at::Tensor() : call.outputs.front();
  const at::Tensor buffer =
      to.defined() && to.is_alias_of(from) ? reduction.prepare(from) : reduction.prepare_copy(from);
  Tensors buffers{buffer};
  GlooWorks begun;
  if (call.kind == OpType::REDUCE) {
    auto options = with_root<c10d::ReduceOptions>(call, call.root);
    options.reduceOp = reduction.transport_op();
    begun.works.push_back(gloo.reduce(buffers, options));
  } else {
    auto options = with_timeout<c10d::AllreduceOptions>(call);
    options.reduceOp = reduction.transport_op();
    begun.works.push_back(gloo.allreduce(buffers, options));
  }
  begun.then = [reduction, buffer, to] {
    if (to.defined()) {
      reduction.finish(buffer, to);
    }
  };
  return begun;
}

GlooWorks reduce_scatter(c10d::Backend& gloo, const Call& call) {
  const auto reduction = *call.reduction;
  const at::Tensor buffer = reduction.prepare_copy(at::cat(call.inputs));
  auto options = with_timeout<c10d::AllreduceOptions>(call);
  options.reduceOp = reduction.transport_op();
  Tensors buffers{buffer};
  const auto sizes = numels(call.inputs);
  const auto rank = gloo.getRank();
  const auto before = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
  const at::Tensor own = buffer.narrow(0, before, sizes[static_cast<size_t>(rank)]);
  return {
      {gloo.allreduce(buffers, options)}, [reduction, own, to = call.outputs.front()] { reduction.finish(own, to); }};
}

GlooWorks all_gather(c10d::Backend& gloo, const Call& call) {
  const auto& input = call.inputs.front();
  const bool equal = std::all_of(call.outputs.begin(), call.outputs.end(), [&](const auto& output) {
    return output.numel() == input.numel();
  });
  if (equal) {
    TensorLists outputs{known(call.outputs)};
    Tensors inputs = known(call.inputs);
    return {{gloo.allgather(outputs, inputs, with_timeout<c10d::AllgatherOptions>(call))}};
  }
  GlooWorks parts;
  for (size_t root = 0; root < call.outputs.size(); ++root) {
    Tensors one{known(call.outputs[root])};
    if (root == static_cast<size_t>(gloo.getRank())) {
      one.front().copy_(known(input));
    }
    parts.works.push_back(gloo.broadcast(one, with_root<c10d::BroadcastOptions>(call, static_cast<int64_t>(root))));
  }
  return parts;
}

// gloo takes one tensor a side, which is cut by numbers of elements.
GlooWorks exchange(c10d::Backend& gloo, const Call& call) {
  const Tensors from = known(call.inputs), to = known(call.outputs);
  auto to_sizes = numels(to), from_sizes = numels(from);
  at::Tensor flat_from = at::cat(from);
  at::Tensor flat_to = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t{0})}, flat_from.options());
  auto work = gloo.alltoall_base(flat_to, flat_from, to_sizes, from_sizes, with_timeout<c10d::AllToAllOptions>(call));
  return {{std::move(work)}, [flat_to, to] {
            const auto parts = flat_to.split_with_sizes(numels(to));
            for (size_t i = 0; i < parts.size(); ++i) {
              to[i].copy_(parts[i]);
            }
          }};
}

} // namespace

GlooWorks begin_on_gloo(c10d::Backend& gloo, Call& call) {
  if (is_empty(call)) {
    return {};
  }
  switch (call.kind) {
    case OpType::BROADCAST: {
      Tensors tensors{known(call.inputs.empty() ? call.outputs.front() : call.inputs.front())};
      return {{gloo.broadcast(tensors, with_root<c10d::BroadcastOptions>(call, call.root))}};
    }
    case OpType::ALLREDUCE:
    case OpType::REDUCE:
      return reduce(gloo, call);
    case OpType::REDUCE_SCATTER:
      return reduce_scatter(gloo, call);
    case OpType::ALLGATHER:
      return all_gather(gloo, call);
    case OpType::GATHER:
      return gather_to_root(gloo, call);
    case OpType::SCATTER:
      return scatter_from_root(gloo, call);
    case OpType::ALLTOALL:
      return exchange(gloo, call);
    case OpType::BARRIER:
      return {};
    default:
      TORCH_INTERNAL_ASSERT(false, call.name, " is no collective of a transport's");
  }
}

} // namespace torch_ext::sim
