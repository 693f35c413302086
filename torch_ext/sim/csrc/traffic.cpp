#include "traffic.h"

#include "clock.h"
#include "dry.h"
#include "host_tensors.h"
#include "std.h"
#include "transport/transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

uint64_t total(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), uint64_t{0}, [](uint64_t sum, const at::Tensor& each) {
    return sum + each.nbytes();
  });
}

uint64_t divided_up(uint64_t bytes, uint64_t parts) {
  return (bytes + parts - 1) / parts;
}

// The node of each rank of a group.
std::vector<int64_t> nodes_of(const Group& group) {
  const auto size = clock::ranks_per_node();
  return c10::fmap(group.global_ranks, [&](int64_t rank) { return size == 0 ? 0 : rank / size; });
}

// `sent` bytes over the busiest edge of a ring or chain, in `rounds` around it.
clock::Traffic around(const Group& group, int64_t rounds, uint64_t sent) {
  std::map<int64_t, uint64_t> nodes; // the group's ranks on each
  for (const auto node : nodes_of(group)) {
    ++nodes[node];
  }
  clock::Traffic traffic{.steps = rounds * (group.size() - 1), .sent = sent, .near = sent};
  if (nodes.size() > 1) {
    traffic.far_steps = rounds * (static_cast<int64_t>(nodes.size()) - 1);
    traffic.far = divided_up(sent, std::ranges::min(std::views::values(nodes)));
  }
  return traffic;
}

// `bytes_to(peer)` from one rank, or to it, to each of the peers at once.
template <typename BytesTo>
clock::Traffic directly(const Group& group, int rank, const std::vector<int>& peers, const BytesTo& bytes_to) {
  clock::Traffic traffic;
  const auto nodes = nodes_of(group);
  for (const int peer : peers) {
    const bool is_far = nodes[static_cast<size_t>(peer)] != nodes[static_cast<size_t>(rank)];
    const uint64_t bytes = bytes_to(peer);
    traffic.steps = 1;
    traffic.far_steps = std::max<int64_t>(traffic.far_steps, is_far ? 1 : 0);
    traffic.sent += bytes;
    (is_far ? traffic.far : traffic.near) += bytes;
  }
  return traffic;
}

} // namespace

clock::Traffic traffic_of(const Call& call, const Group& group) {
  const auto parts = static_cast<uint64_t>(group.size());
  const auto to_all_others = [&](int rank, const auto& bytes_to) {
    std::vector<int> others(parts);
    std::iota(others.begin(), others.end(), 0);
    std::erase(others, rank);
    return directly(group, rank, others, bytes_to);
  };
  const auto part_of = [](const Tensors& tensors) {
    return [&tensors](int peer) { return uint64_t{tensors.at(static_cast<size_t>(peer)).nbytes()}; };
  };
  const auto whole = [](const Tensors& tensors) { return [&tensors](int) { return total(tensors); }; };
  const auto in_ring = [&](const Tensors& tensors) { // an edge carries all parts but one
    const auto nbytes = c10::fmap(tensors, [](const at::Tensor& each) { return uint64_t{each.nbytes()}; });
    auto traffic = around(group, 1, total(tensors) - std::ranges::min(nbytes));
    traffic.sent = total(tensors) - part_of(tensors)(group.rank);
    return traffic;
  };
  const auto through_root = [&](const Tensors& part) { // whose link takes the parts of all others
    auto traffic = to_all_others(call.root, whole(part));
    traffic.sent = call.root == group.rank ? traffic.sent : total(part);
    return traffic;
  };
  switch (call.kind) {
    case OpType::ALLREDUCE: // reduce-scatter, then all-gather, of parts that are rounded up
      return around(group, 2, 2 * (parts - 1) * divided_up(total(call.inputs), parts));
    case OpType::ALLGATHER:
      return in_ring(call.outputs);
    case OpType::REDUCE_SCATTER:
      return in_ring(call.inputs);
    case OpType::BROADCAST: // a chain through which the bytes stream
    case OpType::REDUCE:
      return around(group, 1, parts == 1 ? 0 : total(call.kind == OpType::REDUCE ? call.inputs : call.outputs));
    case OpType::BARRIER: // an all-reduce of one number
      return around(group, 2, 0);
    case OpType::ALLTOALL: { // both ways at once
      auto traffic = to_all_others(group.rank, part_of(call.inputs));
      const auto received = to_all_others(group.rank, part_of(call.outputs));
      traffic.near = std::max(traffic.near, received.near);
      traffic.far = std::max(traffic.far, received.far);
      return traffic;
    }
    case OpType::GATHER:
      return through_root(call.inputs);
    case OpType::SCATTER:
      return through_root(call.outputs);
    case OpType::RECV: { // the send says when the bytes arrive; in a dry run it begins with the receive
      auto traffic = is_dry() ? directly(group, group.rank, {call.root}, whole(call.outputs)) : clock::Traffic{};
      traffic.sent = 0;
      return traffic;
    }
    default:
      return directly(group, group.rank, {call.root}, whole(call.inputs));
  }
}

} // namespace torch_ext::sim
