// The collectives of a group over shared memory, in order.
//
// Note [States of a collective]
//
//   published ---> checked ---> over       data was moved
//       |            |
//       |            `--------> sharing ---> over        an all-reduce too large for each to do alone: see
//                                                      Note [Who reduces]
//       `---------------------> over       with an error: ranks disagree, a peer has gone, time limit, abort
//
//   published   this rank has copied its inputs and its fingerprint to its memory; peers read them there whatever this
//               rank does next, so no peer depends on when it waits
//   checked     every peer has published the same number, and all fingerprints agree
//   sharing     ranks that wait reduce pieces of the result
//
// A collective leaves a state only in a thread that waits for it or polls. The collectives of a group end in order, so
// a wait for one does the earlier ones first.
//
// Note [Who reduces]
// Each rank computes the result of a small all-reduce for itself, which saves a second round. The result of a large one
// is cut into pieces, which lie in order over the input of the group's first rank, in its memory. A rank that waits
// claims the next free piece (compare and swap on Slot::claims), reduces it, and marks it as done; then every rank
// copies the whole. So a rank that has launched but does not wait delays no peer, and the claim on a piece shows that
// its rank died within it.
//
//   claim: 0 free -> 1 + rank: being reduced -> kReduced | 1 + rank

#include "../clock.h"
#include "../host_tensors.h"
#include "../std.h"
#include "fingerprint.h"
#include "fold.h"
#include "segment.h"
#include "shared_memory.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

constexpr uint32_t kReduced = uint32_t{1} << 31;

// If a rank alone would read more than this many bytes, ranks share the work.
constexpr uint64_t kAloneBytes = uint64_t{256} << 10;
constexpr uint64_t kPieceBytes = uint64_t{128} << 10;

std::byte* input(SharedGroup& group, int peer, uint64_t number, size_t index, uint64_t bytes) {
  auto& memory = group.memory(peer);
  uint64_t place = 0;
  copy_bytes(&place, memory.heap(memory.slot(number).inputs + index * sizeof place, sizeof place), sizeof place);
  return memory.heap(place, bytes);
}

// Moves the data of a collective on which all ranks agree. Returns the event to wait for while peers reduce pieces of
// it; raises if one of them died in a piece.
Wait move_data(SharedGroup& group, Pending& front, bool look) {
  const auto& call = front.call;
  const bool is_shared = call.kind == OpType::ALLREDUCE &&
      call.reduction->source_bytes(call.inputs.front()) * static_cast<uint64_t>(group.size()) > kAloneBytes;
  if (!is_shared) {
    write_outputs(call, group, group.order, front.number, [&](int peer, size_t index, uint64_t bytes) {
      return input(group, peer, front.number, index, bytes);
    });
    return {};
  }
  const at::Tensor to = call.reduction->target(call.outputs.front());
  const auto count = static_cast<uint64_t>(to.numel());
  const uint64_t bytes = to.nbytes(), item = bytes / count;
  const auto pieces = static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kPieceBytes, 1, kPieces));
  std::vector<const std::byte*> from;
  from.reserve(group.members.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    from.push_back(input(group, peer, front.number, 0, bytes));
  }
  std::byte* result = input(group, 0, front.number, 0, bytes);
  auto& home = group.memory(0);
  auto& claims = home.slot(front.number).claims;
  const uint32_t mine = static_cast<uint32_t>(group.rank) + 1;
  const uint32_t seen = home.header().reduced.load(std::memory_order_acquire);
  const Fold fold{group.order, call.reduction->transport_op(), to.scalar_type(), count, front.number};

  const auto begin_of = [&](uint32_t piece) { return count * piece / pieces; };
  const auto copy = [&](uint32_t piece) {
    const uint64_t begin = begin_of(piece) * item;
    copy_bytes(
        static_cast<std::byte*>(to.mutable_data_ptr()) + begin, result + begin, begin_of(piece + 1) * item - begin);
  };
  bool did_some = false;
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    uint32_t free = 0;
    if (claims[piece].compare_exchange_strong(free, mine, std::memory_order_acq_rel)) {
      fold.run(result + begin_of(piece) * item, from, begin_of(piece), begin_of(piece + 1));
      copy(piece); // while it is in the cache
      claims[piece].store(kReduced | mine, std::memory_order_release);
      did_some = true;
    }
  }
  if (did_some) {
    ring(home.header().reduced);
  }
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    const uint32_t claim = claims[piece].load(std::memory_order_acquire);
    if ((claim & kReduced) == 0) {
      const int peer = static_cast<int>(claim) - 1;
      const auto& process = group.members[static_cast<size_t>(peer)].process;
      if (look && process != nullptr && process->has_ended() &&
          (claims[piece].load(std::memory_order_acquire) & kReduced) == 0) {
        std::rethrow_exception(group.failure(
            c10::str(group.called(peer), " (process ", process->pid(), ") has ended within ", call.name, ".")));
      }
      // `seen` was read before the pieces; a ring since then, even this rank's, wakes the sleeper to check again.
      return {&home.header().reduced, seen, peer};
    }
  }
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    if (claims[piece].load(std::memory_order_relaxed) != (kReduced | mine) || !to.is_alias_of(call.outputs.front())) {
      copy(piece); // unless an earlier pass has done so
    }
  }
  call.reduction->finish(to, call.outputs.front());
  return {};
}

// No event announces that peers are past a collective: poll at this interval.
constexpr std::chrono::milliseconds kLookAgain{1};

// Whether a rank's result depends on the peer's call.
bool gives_data(const Call& call, int peer, int rank) {
  const bool is_to_root = call.kind == OpType::REDUCE || call.kind == OpType::GATHER;
  return is_from_root(call) ? peer == call.root : !is_to_root || rank == call.root;
}

bool overlap(const Tensors& some, const Tensors& others) {
  return std::ranges::any_of(some, [&](const at::Tensor& one) {
    const auto* begin = static_cast<const std::byte*>(one.const_data_ptr());
    return std::ranges::any_of(others, [&](const at::Tensor& other) {
      const auto* first = static_cast<const std::byte*>(other.const_data_ptr());
      return begin < first + other.nbytes() && first < begin + one.nbytes();
    });
  });
}

// The call of a rank that has published its collective `number`.
Participant participant_of(SharedGroup& group, int peer, uint64_t number) {
  auto& memory = group.memory(peer);
  const auto& slot = memory.slot(number);
  const size_t counts = slot.fingerprint.count_size;
  const auto* first = reinterpret_cast<const int64_t*>(memory.heap(slot.counts, counts * sizeof(int64_t)));
  return {group.global_ranks[static_cast<size_t>(peer)], &slot.fingerprint, {first, counts}};
}

} // namespace

TransferPtr Lane::start(Call call) {
  wait_for_writers(call);
  const uint64_t number = started_ + 1;
  if (number > kSlots) {
    wait_for_slot(number);
  }
  std::lock_guard<std::mutex> lock(group_->mutex);
  release_published();
  publish(call, number);
  started_ = number;
  auto made = std::make_shared<Pending>(group_, shared_from_this(), std::move(call), number);
  pending_.push_back(made);
  return made;
}

void Lane::wait_for_writers(const Call& call) {
  std::shared_ptr<Pending> writer;
  {
    std::lock_guard<std::mutex> lock(group_->mutex);
    for (const auto& earlier : pending_) {
      if (!earlier->over() && overlap(earlier->call.outputs, call.inputs)) {
        writer = earlier;
      }
    }
  }
  if (writer != nullptr) {
    settle(*writer);
  }
}

void Lane::wait_for_slot(uint64_t number) {
  const auto deadline = std::chrono::steady_clock::now() + group_->timeout.load();
  const auto is_behind = [&](int peer) {
    return peer != group_->rank && group_->header(peer).finished.load(std::memory_order_acquire) + kSlots < number;
  };
  while (true) {
    std::unique_lock<std::mutex> lock(group_->mutex);
    if (!pending_.empty() && pending_.front()->number + kSlots <= number) {
      const auto oldest = pending_.front();
      lock.unlock();
      settle(*oldest);
      continue;
    }
    int peer = 0;
    while (peer < group_->size() && !is_behind(peer)) {
      ++peer;
    }
    if (peer == group_->size()) {
      return;
    }
    auto why = group_->gone(peer, /*look=*/true);
    lock.unlock();
    if (why.empty() && std::chrono::steady_clock::now() >= deadline) {
      why = c10::str("timed out: a peer is ", kSlots, " collectives behind");
    }
    if (!why.empty()) {
      std::rethrow_exception(group_->failure(why + "."));
    }
    const auto& word = group_->header(group_->rank).complete;
    sleep_while(word, word.load(), kLookAgain);
  }
}

void Lane::publish(const Call& call, uint64_t number) {
  const Counts counts = counts_of(call);
  Tensors sources;
  uint64_t bytes = rounded_up(sizeof(uint64_t) * (call.inputs.size() + counts.size()), kCacheLine);
  std::vector<uint64_t> places;
  for (const auto& input : call.inputs) {
    sources.push_back(call.reduction.has_value() ? call.reduction->source(input) : input);
    places.push_back(bytes);
    bytes += rounded_up(sources.back().nbytes(), kCacheLine);
  }
  const uint64_t stamp = bytes;
  bytes += call.stamp.size();
  const uint64_t block = group_->allocate(bytes);
  std::byte* memory = group_->own().heap(block, bytes);
  for (size_t i = 0; i < sources.size(); ++i) {
    copy_bytes(memory + places[i], sources[i].const_data_ptr(), sources[i].nbytes());
    places[i] += block;
  }
  copy_bytes(memory, places.data(), sizeof(uint64_t) * places.size());
  copy_bytes(memory + sizeof(uint64_t) * places.size(), counts.data(), sizeof(int64_t) * counts.size());

  copy_bytes(memory + stamp, call.stamp.data(), call.stamp.size());

  Slot& slot = group_->own().slot(number);
  slot.inputs = block;
  slot.stamp = block + stamp;
  slot.stamp_bytes = call.stamp.size();
  slot.counts = block + sizeof(uint64_t) * places.size();
  slot.timing = call.timing;
  slot.fingerprint = fingerprint_of(call, counts);
  for (auto& claim : slot.claims) {
    claim.store(0, std::memory_order_relaxed);
  }
  slot.number.store(number, std::memory_order_seq_cst);
  published_.push_back({number, block});
  // Only the last rank to publish sees all others and wakes them: one wake for a collective, one sleep for a rank.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool is_last = std::all_of(group_->members.begin(), group_->members.end(), [&](const Member& member) {
    return member.memory->slot(number).number.load(std::memory_order_seq_cst) == number;
  });
  if (is_last) {
    ring(group_->header(0).complete);
  }
}

void Lane::release_published() {
  uint64_t finished = ~uint64_t{0};
  for (int peer = 0; peer < group_->size(); ++peer) {
    finished = std::min(finished, group_->header(peer).finished.load(std::memory_order_acquire));
  }
  while (!published_.empty() && published_.front().number <= finished) {
    group_->free(published_.front().block);
    published_.pop_front();
  }
}

Wait Lane::progress(Pending& wanted, bool look) {
  while (!pending_.empty()) {
    auto& front = *pending_.front();
    if (!front.over()) {
      const Wait wait = step(front, look);
      if (!front.over()) {
        return wait;
      }
    }
    group_->own().header().finished.store(front.number, std::memory_order_release);
    pending_.pop_front();
    if (wanted.over()) {
      break;
    }
  }
  return {};
}

Wait Lane::step(Pending& front, bool look) {
  try {
    Wait wait = gather(front, look);
    if (wait.word == nullptr) {
      wait = move_data(*group_, front, look);
    }
    if (wait.word == nullptr) {
      front.end();
    }
    return wait;
  } catch (...) {
    front.end(std::current_exception());
  }
  return {};
}

Wait Lane::gather(Pending& front, bool look) {
  const int size = group_->size();
  if (front.checked) {
    return {};
  }
  const auto& complete = group_->header(0).complete;
  const uint32_t seen = complete.load(std::memory_order_seq_cst);
  const Participant mine = participant_of(*group_, group_->rank, front.number);
  Wait missing;
  std::vector<Participant> ranks;
  ranks.reserve(static_cast<size_t>(size));
  const auto arrived = [&](int peer) {
    return group_->memory(peer).slot(front.number).number.load(std::memory_order_acquire) == front.number;
  };
  for (int peer = 0; peer < size; ++peer) {
    // Check first whether the peer has gone: it may have published just before.
    const auto why = group_->gone(peer, look, arrived);
    if (!arrived(peer)) {
      if (!why.empty()) {
        std::rethrow_exception(
            group_->failure(c10::str(why, " and takes no part in what ", mine.who(), " called: ", phrase(mine), ".")));
      }
      if (missing.word == nullptr) {
        missing = {&complete, seen, peer};
      }
      continue;
    }
    ranks.push_back(participant_of(*group_, peer, front.number));
    if (const auto message = difference(mine, ranks.back()); !message.empty()) {
      std::rethrow_exception(group_->disagreement(front.number, message));
    }
  }
  if (missing.word != nullptr) {
    return missing;
  }
  if (const auto message = disagreement_of_all(ranks); !message.empty()) {
    std::rethrow_exception(group_->failure(message));
  }
  front.checked = true;
  for (int peer = 0; peer < size; ++peer) {
    const auto& slot = group_->memory(peer).slot(front.number);
    if (slot.stamp_bytes > 0 && gives_data(front.call, peer, group_->rank)) {
      front.add_stamp(group_->memory(peer).heap(slot.stamp, slot.stamp_bytes), slot.stamp_bytes);
    }
  }
  if (front.call.timing.ready >= 0) {
    time(front);
  }
  return {};
}

void Lane::time(Pending& front) {
  Timing all{.launched = front.call.timing.launched};
  int first = group_->rank, last = group_->rank;
  for (int peer = 0; peer < group_->size(); ++peer) {
    const Timing& timing = group_->memory(peer).slot(front.number).timing;
    last = timing.ready > all.ready ? peer : last;
    first = timing.launched < all.launched ? peer : first;
    all = {
        std::max(all.ready, timing.ready), std::max(all.lasts, timing.lasts), std::min(all.launched, timing.launched)};
  }
  const int64_t ready = clock::epoch() + all.ready;
  const int64_t start = std::max(ready, free_at_);
  free_at_ = start + all.lasts;
  front.times = {start, free_at_, static_cast<int>(group_->global_ranks[static_cast<size_t>(last)])};
  group_->check_limit(front.call, all.launched, free_at_ - clock::epoch(), first, last);
}

} // namespace torch_ext::sim
