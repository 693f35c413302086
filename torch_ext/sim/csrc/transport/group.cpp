#include "group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include "fingerprint.h"
#include "futex.h"
#include "layout.h"
#include "wait_page.h"

namespace torch_ext::sim {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// How long a rank sleeps before it looks whether peers live: doubled from first to last, so that a wait costs little.
constexpr Milliseconds kFirstSlice{10};
constexpr Milliseconds kLastSlice{160};

// Above this many bytes, memory that is free again goes back to the kernel.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

} // namespace

GroupState Group::state(int peer) const {
  return static_cast<GroupState>(header(peer).state.load(std::memory_order_acquire));
}

std::string Group::gone(int peer, bool look) const {
  if (peer == rank) {
    return "";
  }
  switch (state(peer)) {
    case GroupState::kLeft:
      return called(peer) + " has destroyed the group";
    case GroupState::kAborted:
      return called(peer) + " has aborted the group";
    default:
      break;
  }
  const auto& process = *members[static_cast<size_t>(peer)].process;
  return look && process.has_ended() ? c10::str(called(peer), " (process ", process.pid(), ") has ended") : "";
}

uint64_t Group::allocate(uint64_t bytes) {
  const uint64_t offset = arena.allocate(bytes);
  own().grow(arena.high_water());
  return offset;
}

void Group::free(uint64_t offset) {
  const uint64_t bytes = arena.free(offset);
  if (bytes > kKeptBytes) {
    own().discard(offset, bytes);
  }
}

std::exception_ptr failure(const Group& group, const std::string& what) {
  return failure(group.called(group.rank), what);
}

bool Pending::advance() {
  // Views made in inference mode may not be written by a thread that is not in it, unless below autograd.
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::mutex> lock(group_->mutex);
  if (!over_) {
    queue_->progress(*this, /*look=*/true);
  }
  return over_;
}

void Pending::finish(Milliseconds timeout) {
  at::AutoDispatchBelowADInplaceOrView below; // as above
  const auto limit = timeout != kNoTimeout ? timeout : call.timeout > Milliseconds(0) ? call.timeout : group_->timeout;
  const auto deadline = Clock::now() + limit;
  auto slice = kFirstSlice;
  bool look = false;
  std::optional<WaitNote> note;
  while (true) {
    Wait wait{};
    {
      std::lock_guard<std::mutex> lock(group_->mutex);
      if (!over_) {
        wait = queue_->progress(*this, look);
        if (!over_ && Clock::now() >= deadline) {
          end(timed_out(wait, limit));
        }
      }
      if (over_) {
        if (why_) {
          std::rethrow_exception(why_);
        }
        return;
      }
    }
    if (look) {
      if (!note.has_value()) {
        note.emplace(group_->name, call.name, call.site, number, deadline);
      }
      note->waits_for(wait.peer < 0 ? -1 : group_->global_ranks[static_cast<size_t>(wait.peer)]);
    }
    sleep_while(*wait.word, wait.seen, slice);
    look = wait.word->load(std::memory_order_acquire) == wait.seen;
    if (look) {
      slice = std::min(2 * slice, kLastSlice);
    }
  }
}

std::exception_ptr Pending::timed_out(const Wait& wait, Milliseconds limit) const {
  const auto whom = wait.peer < 0 ? std::string("any rank") : group_->called(wait.peer);
  return failure(
      *group_,
      c10::str(
          call.name, call.site.empty() ? "" : " at " + call.site, " timed out: it waited ", limit.count(), " ms for ",
          whom, ", which has not called it."));
}

void Pending::abort(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  if (!over_) {
    end(why);
  }
}

void Pending::end(const std::exception_ptr& why) {
  over_ = true;
  why_ = why;
  call.inputs.clear();
  call.outputs.clear();
}

} // namespace torch_ext::sim
