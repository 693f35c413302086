#include "movement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fingerprint.h"
#include "fold.h"
#include "futex.h"
#include "group.h"
#include "layout.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

constexpr uint32_t kReduced = ~uint32_t{0};
static_assert(kPieces <= 64, "pieces are remembered in one word");

// Where reducing alone reads more than this many bytes, ranks share the work.
constexpr uint64_t kAloneBytes = uint64_t{256} << 10;
constexpr uint64_t kPieceBytes = uint64_t{128} << 10;

FoldOp fold_op_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      return FoldOp::kProduct;
    case c10d::ReduceOp::MIN:
      return FoldOp::kMin;
    case c10d::ReduceOp::MAX:
      return FoldOp::kMax;
    case c10d::ReduceOp::BAND:
      return FoldOp::kAnd;
    case c10d::ReduceOp::BOR:
      return FoldOp::kOr;
    case c10d::ReduceOp::BXOR:
      return FoldOp::kXor;
    default:
      return FoldOp::kSum; // to which Reduction brings the rest
  }
}

uint32_t pieces_of(uint64_t bytes) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kPieceBytes, 1, kPieces));
}

std::byte* input(Group& group, int peer, uint64_t number, size_t index, uint64_t bytes) {
  auto& memory = group.members[static_cast<size_t>(peer)].memory;
  uint64_t place = 0;
  copy_bytes(&place, memory.heap(memory.slot(number).inputs + index * sizeof place, sizeof place), sizeof place);
  return memory.heap(place, bytes);
}

std::vector<const std::byte*> inputs_of_all(Group& group, uint64_t number, size_t index, uint64_t bytes) {
  std::vector<const std::byte*> found;
  found.reserve(group.members.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    found.push_back(input(group, peer, number, index, bytes));
  }
  return found;
}

Fold fold_of(Group& group, const Pending& front, const at::Tensor& to) {
  return {
      group.order, fold_op_of(front.call.reduction->transport_op()), to.scalar_type(),
      static_cast<uint64_t>(to.numel()), front.number};
}

void move_alone(Group& group, Pending& front) {
  auto& call = front.call;
  const auto mine = static_cast<size_t>(group.rank);
  const auto take = [&](size_t output, int peer, size_t index) {
    const auto& to = call.outputs[output];
    copy_bytes(to.mutable_data_ptr(), input(group, peer, front.number, index, to.nbytes()), to.nbytes());
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
    case OpType::GATHER: // whose outputs are empty but on the root
      for (size_t peer = 0; peer < call.outputs.size(); ++peer) {
        take(peer, static_cast<int>(peer), 0);
      }
      return;
    case OpType::ALLTOALL:
      for (size_t peer = 0; peer < call.outputs.size(); ++peer) {
        take(peer, static_cast<int>(peer), mine);
      }
      return;
    case OpType::ALLREDUCE:
    case OpType::REDUCE: // likewise
    case OpType::REDUCE_SCATTER: {
      if (call.outputs.empty()) {
        return;
      }
      const at::Tensor to = call.reduction->target(call.outputs.front());
      const size_t index = call.kind == OpType::REDUCE_SCATTER ? mine : 0;
      const auto count = static_cast<uint64_t>(to.numel());
      if (count > 0) {
        fold_of(group, front, to)
            .run(
                static_cast<std::byte*>(to.mutable_data_ptr()), inputs_of_all(group, front.number, index, to.nbytes()),
                0, count);
      }
      call.reduction->finish(to, call.outputs.front());
      return;
    }
    default:
      TORCH_INTERNAL_ASSERT(false, call.name, " is no collective of a transport's");
  }
}

std::optional<Wait> reduce_shared(Group& group, Pending& front, bool look) {
  const auto& call = front.call;
  const at::Tensor to = call.reduction->target(call.outputs.front());
  const auto count = static_cast<uint64_t>(to.numel());
  const uint64_t bytes = to.nbytes(), item = bytes / count;
  const uint32_t pieces = pieces_of(bytes);
  const auto from = inputs_of_all(group, front.number, 0, bytes);
  std::byte* result = input(group, 0, front.number, 0, bytes);
  auto& home = group.members[0].memory;
  auto& claims = home.slot(front.number).claims;
  const uint32_t mine = static_cast<uint32_t>(group.rank) + 1;
  const uint32_t seen = home.header().reduced.load(std::memory_order_acquire);
  const Fold fold = fold_of(group, front, to);

  // What this rank has reduced is copied to its output while it is in the cache.
  const auto begin_of = [&](uint32_t piece) { return count * piece / pieces * item; };
  auto* out = static_cast<std::byte*>(to.mutable_data_ptr());
  uint64_t have = to.is_alias_of(call.outputs.front()) ? front.reduced : 0;
  bool did_some = false;
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    uint32_t free = 0;
    if (claims[piece].compare_exchange_strong(free, mine, std::memory_order_acq_rel)) {
      const uint64_t begin = begin_of(piece), end = begin_of(piece + 1);
      fold.run(result + begin, from, begin / item, end / item);
      claims[piece].store(kReduced, std::memory_order_release);
      copy_bytes(out + begin, result + begin, end - begin);
      have |= uint64_t{1} << piece;
      did_some = true;
    }
  }
  front.reduced = have;
  if (did_some) {
    ring(home.header().reduced);
  }
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    const uint32_t claim = claims[piece].load(std::memory_order_acquire);
    if (claim != kReduced) {
      const int peer = static_cast<int>(claim) - 1;
      const auto& process = group.members[static_cast<size_t>(peer)].process;
      if (look && process != nullptr && process->has_ended() &&
          claims[piece].load(std::memory_order_acquire) != kReduced) {
        front.end(failure(
            group, c10::str(group.called(peer), " (process ", process->pid(), ") has ended within ", call.name, ".")));
        return std::nullopt;
      }
      // `seen` is from before the pieces; a ring since then, one's own too, makes the sleeper look again.
      return Wait{&home.header().reduced, seen, peer};
    }
  }
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    if ((have >> piece & 1) == 0) {
      copy_bytes(out + begin_of(piece), result + begin_of(piece), begin_of(piece + 1) - begin_of(piece));
    }
  }
  call.reduction->finish(to, call.outputs.front());
  return std::nullopt;
}

} // namespace

Said said_by(Group& group, int peer, uint64_t number) {
  auto& memory = group.members[static_cast<size_t>(peer)].memory;
  const auto& slot = memory.slot(number);
  Said said{group.called(peer), &slot.fingerprint, Counts(slot.fingerprint.count_size)};
  const uint64_t bytes = said.counts.size() * sizeof(int64_t);
  copy_bytes(said.counts.data(), memory.heap(slot.counts, bytes), bytes);
  return said;
}

std::optional<Wait> move_data(Group& group, Pending& front, bool look) {
  const auto& call = front.call;
  if (call.kind == OpType::ALLREDUCE &&
      call.reduction->source_bytes(call.inputs.front()) * static_cast<uint64_t>(group.size()) > kAloneBytes) {
    return reduce_shared(group, front, look);
  }
  move_alone(group, front);
  return std::nullopt;
}

} // namespace torch_ext::sim
