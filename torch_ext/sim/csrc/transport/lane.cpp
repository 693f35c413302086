#include "lane.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../transport_view.h"
#include "fingerprint.h"
#include "futex.h"
#include "group.h"
#include "layout.h"
#include "movement.h"
#include "rendezvous.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

// Peers tell nobody that they are past a collective; whoever needs to know looks again after so long.
constexpr std::chrono::milliseconds kLookAgain{1};

constexpr uint64_t aligned(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* first = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* second = static_cast<const std::byte*>(b.const_data_ptr());
  return first < second + b.nbytes() && second < first + a.nbytes();
}

bool overlap(const Tensors& some, const Tensors& others) {
  for (const auto& one : some) {
    for (const auto& other : others) {
      if (overlap(one, other)) {
        return true;
      }
    }
  }
  return false;
}

// Whether `difference` has nothing to say of two ranks' calls: asked for each call, so without making words of them.
bool agree(Group& group, int one, int other, uint64_t number) {
  auto& first = group.members[static_cast<size_t>(one)].memory;
  auto& second = group.members[static_cast<size_t>(other)].memory;
  const auto &mine = first.slot(number), &theirs = second.slot(number);
  const auto &a = mine.fingerprint, &b = theirs.fingerprint;
  if (a.kind != b.kind || a.reduction != b.reduction || a.root != b.root || a.type != b.type) {
    return false;
  }
  if (a.kind == static_cast<int8_t>(c10d::OpType::ALLTOALL)) {
    return true;
  }
  const uint64_t bytes = a.count_size * sizeof(int64_t);
  return a.count_size == b.count_size &&
      (bytes == 0 || std::memcmp(first.heap(mine.counts, bytes), second.heap(theirs.counts, bytes), bytes) == 0);
}

// Whether `disagreement_of_all` may have something to say.
bool need_a_closer_look(Group& group, uint64_t number) {
  std::bitset<128> used;
  for (const auto& member : group.members) {
    const auto& print = member.memory.slot(number).fingerprint;
    if (print.kind == static_cast<int8_t>(c10d::OpType::ALLTOALL)) {
      return true;
    }
    if (print.device >= 0) {
      if (used.test(static_cast<size_t>(print.device))) {
        return true;
      }
      used.set(static_cast<size_t>(print.device));
    }
  }
  return false;
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

std::shared_ptr<Pending> Lane::last_pending() {
  std::lock_guard<std::mutex> lock(group_->mutex);
  return pending_.empty() ? nullptr : pending_.back();
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
    try {
      writer->finish(kNoTimeout);
    } catch (const c10::Error&) {
      // Whoever waits for that one is told what became of it.
    }
  }
}

void Lane::wait_for_slot(uint64_t number) {
  const auto deadline = std::chrono::steady_clock::now() + group_->timeout;
  while (true) {
    std::shared_ptr<Pending> oldest;
    std::string why;
    bool is_free = true;
    {
      std::lock_guard<std::mutex> lock(group_->mutex);
      if (!pending_.empty() && pending_.front()->number + kSlots <= number) {
        oldest = pending_.front();
      }
      for (int peer = 0; peer < group_->size() && is_free; ++peer) {
        if (peer != group_->rank) {
          is_free = group_->header(peer).finished.load(std::memory_order_acquire) + kSlots >= number;
          why = is_free ? "" : group_->gone(peer, /*look=*/true);
        }
      }
    }
    if (oldest != nullptr) {
      try {
        oldest->finish(kNoTimeout);
      } catch (const c10::Error&) {
        // Whoever waits for that one is told what became of it.
      }
      continue;
    }
    if (is_free) {
      return;
    }
    if (why.empty() && std::chrono::steady_clock::now() >= deadline) {
      why = c10::str("timed out: a peer is ", kSlots, " collectives behind");
    }
    if (!why.empty()) {
      std::rethrow_exception(failure(*group_, why + "."));
    }
    const auto& word = group_->header(group_->rank).complete;
    sleep_while(word, word.load(), kLookAgain);
  }
}

void Lane::publish(const Call& call, uint64_t number) {
  const Counts counts = counts_of(call);
  Tensors sources;
  uint64_t bytes = aligned(sizeof(uint64_t) * (call.inputs.size() + counts.size()));
  std::vector<uint64_t> places;
  for (const auto& input : call.inputs) {
    sources.push_back(call.reduction.has_value() ? call.reduction->source(input) : input);
    places.push_back(bytes);
    bytes += aligned(sources.back().nbytes());
  }
  const uint64_t block = group_->allocate(bytes);
  std::byte* memory = group_->own().heap(block, bytes);
  for (size_t i = 0; i < sources.size(); ++i) {
    copy_bytes(memory + places[i], sources[i].const_data_ptr(), sources[i].nbytes());
    places[i] += block;
  }
  copy_bytes(memory, places.data(), sizeof(uint64_t) * places.size());
  copy_bytes(memory + sizeof(uint64_t) * places.size(), counts.data(), sizeof(int64_t) * counts.size());

  Slot& slot = group_->own().slot(number);
  slot.inputs = block;
  slot.counts = block + sizeof(uint64_t) * places.size();
  slot.fingerprint = fingerprint_of(call, counts);
  for (auto& claim : slot.claims) {
    claim.store(0, std::memory_order_relaxed);
  }
  slot.number.store(number, std::memory_order_seq_cst);
  published_.push_back({number, block});
  // Whoever publishes last sees all others, and alone wakes them: one wake for a collective, and one sleep for a rank.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool is_last = std::all_of(group_->members.begin(), group_->members.end(), [&](const Member& member) {
    return member.memory.slot(number).number.load(std::memory_order_seq_cst) == number;
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
    if (auto wait = gather(front, look); wait.has_value() || front.over()) {
      return wait.value_or(Wait{});
    }
    if (auto wait = move_data(*group_, front, look); wait.has_value() || front.over()) {
      return wait.value_or(Wait{});
    }
    front.end();
  } catch (...) {
    front.end(std::current_exception());
  }
  return {};
}

std::optional<Wait> Lane::gather(Pending& front, bool look) {
  const int size = group_->size();
  if (front.checked) {
    return std::nullopt;
  }
  const auto& complete = group_->header(0).complete;
  const uint32_t seen = complete.load(std::memory_order_seq_cst);
  std::optional<Wait> missing;
  for (int peer = 0; peer < size; ++peer) {
    // First whether the peer has gone: it may have published just before.
    const auto why = group_->gone(peer, look);
    const auto& number = group_->members[static_cast<size_t>(peer)].memory.slot(front.number).number;
    if (number.load(std::memory_order_acquire) != front.number) {
      if (!why.empty()) {
        const Said mine = said_by(*group_, group_->rank, front.number);
        front.end(
            failure(*group_, c10::str(why, " and takes no part in what ", mine.who, " called: ", phrase(mine), ".")));
        return std::nullopt;
      }
      if (!missing.has_value()) {
        missing = Wait{&complete, seen, peer};
      }
      continue;
    }
    if (!agree(*group_, group_->rank, peer, front.number)) {
      const auto told = difference(said_by(*group_, group_->rank, front.number), said_by(*group_, peer, front.number));
      front.end(failure(*group_, c10::str("collective ", front.number, " of group ", group_->name, ": ", told)));
      return std::nullopt;
    }
  }
  if (missing.has_value()) {
    return missing;
  }
  if (need_a_closer_look(*group_, front.number)) {
    std::vector<Said> ranks;
    ranks.reserve(size);
    for (int peer = 0; peer < size; ++peer) {
      ranks.push_back(said_by(*group_, peer, front.number));
    }
    if (const auto told = disagreement_of_all(ranks); !told.empty()) {
      front.end(failure(*group_, told));
      return std::nullopt;
    }
  }
  front.checked = true;
  return std::nullopt;
}

} // namespace torch_ext::sim
