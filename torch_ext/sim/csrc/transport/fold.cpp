#include "fold.h"

#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/bitwise_and_cpu_dispatch.h>
#include <ATen/ops/bitwise_or_cpu_dispatch.h>
#include <ATen/ops/bitwise_xor_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum_cpu_dispatch.h>
#include <ATen/ops/minimum_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <c10/util/Exception.h>

#include "../host_tensors.h"
#include "../std.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Inputs = std::vector<const std::byte*>;

// Elements whose partial result stays in the L2 cache; too few for torch to start threads.
constexpr uint64_t kBlock = 16384;

// Combines `with` into `into`. Calls torch's kernels past its dispatcher, so that no profiler shows them.
void combine(ReduceOp::RedOpType op, at::Tensor into, const at::Tensor& with) {
  switch (op) {
    case ReduceOp::SUM:
      at::cpu::add_out(into, into, with);
      return;
    case ReduceOp::PRODUCT:
      at::cpu::mul_out(into, into, with);
      return;
    case ReduceOp::MIN:
      at::cpu::minimum_out(into, into, with);
      return;
    case ReduceOp::MAX:
      at::cpu::maximum_out(into, into, with);
      return;
    case ReduceOp::BAND:
      at::cpu::bitwise_and_out(into, into, with);
      return;
    case ReduceOp::BOR:
      at::cpu::bitwise_or_out(into, into, with);
      return;
    case ReduceOp::BXOR:
      at::cpu::bitwise_xor_out(into, into, with);
      return;
    default:
      TORCH_INTERNAL_ASSERT(false, "no reduction of a transport's");
  }
}

std::vector<size_t> ranks_from(size_t first, size_t count) {
  std::vector<size_t> ranks(count);
  for (size_t i = 0; i < count; ++i) {
    ranks[i] = (first + i) % count;
  }
  return ranks;
}

// Buffers for partial results, for each thread, since several groups may reduce at a time.
std::byte* scratch(size_t bytes) {
  thread_local std::vector<std::byte> kept;
  kept.resize(std::max(kept.size(), bytes));
  return kept.data();
}

struct Step {
  ReduceOp::RedOpType op;
  at::ScalarType type;
  const Inputs& from;

  size_t item() const { return c10::elementSize(type); }
  at::Tensor tensor(const std::byte* data, uint64_t count) const {
    return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(count)}, type);
  }

  // Writes elements [begin, end) to `to`, combined in the order of `ranks`, or in pairs.
  void run(std::byte* to, const std::vector<size_t>& ranks, bool in_pairs, uint64_t begin, uint64_t end) const {
    for (uint64_t at = begin; at < end; at += kBlock) {
      const uint64_t count = std::min(kBlock, end - at), bytes = count * item();
      std::byte* const buffers = scratch(in_pairs ? bytes * ranks.size() : bytes);
      const auto part = [&](size_t i) { return tensor(buffers + i * bytes, count); };
      for (size_t i = 0; i < (in_pairs ? ranks.size() : 1); ++i) { // the output may lie over an input
        std::memcpy(buffers + i * bytes, from[ranks[i]] + at * item(), bytes);
      }
      for (size_t stride = 1; in_pairs && stride < ranks.size(); stride *= 2) {
        for (size_t i = 0; i + stride < ranks.size(); i += 2 * stride) {
          combine(op, part(i), part(i + stride));
        }
      }
      for (size_t i = 1; !in_pairs && i < ranks.size(); ++i) {
        combine(op, part(0), tensor(from[ranks[i]] + at * item(), count));
      }
      std::memcpy(to + (at - begin) * item(), buffers, bytes);
    }
  }
};

} // namespace

FoldOrder FoldOrder::parse(const std::string& text) {
  static const std::map<std::string_view, Kind> kinds{
      {"", Kind::kRank}, {"rank", Kind::kRank}, {"ring", Kind::kRing}, {"tree", Kind::kTree}};
  if (const auto found = kinds.find(text); found != kinds.end()) {
    return {found->second, 0};
  }
  constexpr std::string_view kRandom = "random:";
  if (text.starts_with(kRandom)) {
    FoldOrder order{Kind::kRandom, 0};
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data() + kRandom.size(), end, order.seed);
    if (error == std::errc() && stopped == end) {
      return order;
    }
  }
  TORCH_CHECK_VALUE(false, "TORCH_EXT_SIM_REDUCE=", text, ": expected rank, ring, tree or random:SEED with a number.");
}

void Fold::run(std::byte* to, const Inputs& from, uint64_t begin, uint64_t end) const {
  const Step step{op, type, from};
  auto ranks = ranks_from(0, from.size());
  if (order.kind == FoldOrder::Kind::kRing) {
    for (uint64_t part = 0; part < ranks.size(); ++part) {
      const uint64_t first = std::max(begin, elements * part / ranks.size());
      const uint64_t last = std::min(end, elements * (part + 1) / ranks.size());
      if (first < last) {
        step.run(to + (first - begin) * step.item(), ranks_from(part + 1, ranks.size()), false, first, last);
      }
    }
    return;
  }
  if (order.kind == FoldOrder::Kind::kRandom) {
    std::mt19937_64 source(order.seed * 0x9E3779B97F4A7C15u + number);
    for (size_t left = ranks.size(); left > 1; --left) { // std::shuffle differs between libraries
      std::swap(ranks[left - 1], ranks[source() % left]);
    }
  }
  step.run(to, ranks, order.kind == FoldOrder::Kind::kTree, begin, end);
}

void write_outputs(const Call& call, const Group& group, FoldOrder order, uint64_t number, const InputOf& input) {
  const auto mine = static_cast<size_t>(group.rank);
  const auto take = [&](size_t output, int peer, size_t index) {
    const auto& to = call.outputs[output];
    copy_bytes(to.mutable_data_ptr(), input(peer, index, to.nbytes()), to.nbytes());
  };
  switch (call.kind) {
    case OpType::BARRIER:
      return;
    case OpType::BROADCAST:
      if (call.root != group.rank) {
        take(0, call.root, 0);
      }
      return;
    case OpType::SCATTER:
      return take(0, call.root, mine);
    case OpType::ALLGATHER:
    case OpType::GATHER: // outputs are empty except on the root
    case OpType::ALLTOALL:
      for (size_t peer = 0; peer < call.outputs.size(); ++peer) {
        take(peer, static_cast<int>(peer), call.kind == OpType::ALLTOALL ? mine : 0);
      }
      return;
    case OpType::ALLREDUCE:
    case OpType::REDUCE: // likewise
    case OpType::REDUCE_SCATTER: {
      if (call.outputs.empty()) {
        return;
      }
      const at::Tensor to = call.reduction->target(call.outputs.front());
      const auto count = static_cast<uint64_t>(to.numel());
      Inputs from;
      for (int peer = 0; peer < group.size(); ++peer) {
        from.push_back(input(peer, call.kind == OpType::REDUCE_SCATTER ? mine : 0, to.nbytes()));
      }
      Fold{order, call.reduction->transport_op(), to.scalar_type(), count, number}.run(
          static_cast<std::byte*>(to.mutable_data_ptr()), from, 0, count);
      call.reduction->finish(to, call.outputs.front());
      return;
    }
    default:
      TORCH_INTERNAL_ASSERT(false, call.name, " is no collective of a transport's");
  }
}

} // namespace torch_ext::sim
