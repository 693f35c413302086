// A rank's calls over shared memory, and their waits for peers.
//
// A wait for a peer of more than a few milliseconds has an entry on the page of waits until it is over, so that the
// supervisor can read it even when this process holds the GIL, is stopped, or has died. WaitPage is its layout: see
// Note [The page of waits] in torch_ext/world/operations.py. A thread with an entry continues only when the peer does
// or the time is up, whatever function it is in: any kernel may be the one to wait.
#include "shared_memory.h"

#include "../std.h"
#include "fingerprint.h"
#include "segment.h"
#include "transport.h"
#include "wait_note.h"

namespace torch_ext::sim {

struct WaitEntry {
  std::atomic<uint32_t> changes; // odd while the entry is being changed
  int32_t peer;
  int64_t since_ns;
  uint64_t number;
  char group[64];
  char operation[kNameBytes];
  char site[kSiteBytes];
  int64_t until_ns;
  int32_t thread; // as the kernel numbers it
  char reserved[164];
};

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// The sleep between checks whether peers live: doubled from first to last, so that a wait costs little.
constexpr Milliseconds kFirstSlice{10};
constexpr Milliseconds kLastSlice{160};

// Above this many bytes, freed memory goes back to the kernel.
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

constexpr size_t kEntries = 8;
constexpr uint64_t kWaitPageVersion = 2;

struct WaitPage {
  uint64_t version;
  char reserved[56];
  WaitEntry entries[kEntries];
};

static_assert(sizeof(WaitEntry) == 504 && sizeof(WaitPage) <= kPage && offsetof(WaitPage, entries) == 64);
static_assert(offsetof(WaitEntry, since_ns) == 8 && offsetof(WaitEntry, group) == 24);
static_assert(offsetof(WaitEntry, site) == 128 && offsetof(WaitEntry, thread) == 336);

std::mutex& page_mutex = *new std::mutex(); // never freed: threads may outlive static objects

// Mapped at the first long wait, never unmapped; nullptr without a page.
WaitPage* page() {
  static auto* mapped = []() -> WaitPage* {
    const char* text = std::getenv("TORCH_EXT_WAIT_PAGE");
    if (text == nullptr || *text == '\0') {
      return nullptr;
    }
    void* memory =
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(std::strtol(text, nullptr, 10)), 0);
    if (memory == MAP_FAILED) {
      return nullptr;
    }
    auto* made = static_cast<WaitPage*>(memory);
    made->version = kWaitPageVersion;
    return made;
  }();
  return mapped;
}

// The steady clock is CLOCK_MONOTONIC.
int64_t monotonic_ns(Clock::time_point when) {
  return std::chrono::nanoseconds(when.time_since_epoch()).count();
}

template <typename Change>
void change(WaitEntry& entry, const Change& how) {
  entry.changes.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  how();
  entry.changes.fetch_add(1, std::memory_order_release);
}

} // namespace

WaitNote::WaitNote(
    const std::string& group, const char* operation, const std::string& site, uint64_t number,
    Clock::time_point until) {
  WaitPage* shown = page();
  if (shown == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(page_mutex);
  const auto free = std::ranges::find(shown->entries, 0, &WaitEntry::since_ns);
  if (free == std::end(shown->entries)) {
    return;
  }
  entry_ = free;
  change(*entry_, [&] {
    entry_->peer = -1;
    entry_->number = number;
    copy_text(entry_->group, sizeof entry_->group, group);
    copy_text(entry_->operation, sizeof entry_->operation, operation);
    copy_text(entry_->site, sizeof entry_->site, site);
    entry_->until_ns = monotonic_ns(until);
    entry_->thread = static_cast<int32_t>(gettid());
    entry_->since_ns = monotonic_ns(Clock::now());
  });
}

WaitNote::~WaitNote() {
  if (entry_ != nullptr) {
    std::lock_guard<std::mutex> lock(page_mutex);
    change(*entry_, [&] { entry_->since_ns = 0; });
  }
}

void WaitNote::waits_for(int64_t global_rank) {
  if (entry_ != nullptr && entry_->peer != global_rank) {
    change(*entry_, [&] { entry_->peer = static_cast<int32_t>(global_rank); });
  }
}

std::string SharedGroup::gone(int peer, bool look, const Arrived& arrived) const {
  if (peer == rank) {
    return "";
  }
  const auto state_of = [&](int member) {
    return static_cast<GroupState>(header(member).state.load(std::memory_order_acquire));
  };
  const auto ended = [&](int member) {
    const auto& process = *members[static_cast<size_t>(member)].process;
    return process.has_ended() ? c10::str(called(member), " (process ", process.pid(), ") has ended") : "";
  };
  const auto state = state_of(peer);
  if (state != GroupState::kLeft && state != GroupState::kAborted) {
    return look ? ended(peer) : "";
  }
  // The peer may have left because of the death of another rank; name that one as the cause.
  for (int other = 0; other < size(); ++other) {
    if (other != rank && other != peer && state_of(other) == GroupState::kReady && !(arrived && arrived(other))) {
      if (auto why = ended(other); !why.empty()) {
        return why;
      }
    }
  }
  return called(peer) + (state == GroupState::kLeft ? " has destroyed the group" : " has aborted the group");
}

uint64_t SharedGroup::allocate(uint64_t bytes) {
  const uint64_t offset = arena.allocate(bytes);
  own().grow(arena.high_water());
  return offset;
}

void SharedGroup::free(uint64_t offset) {
  const uint64_t bytes = arena.free(offset);
  if (bytes > kKeptBytes) {
    own().discard(offset, bytes);
  }
}

bool Pending::advance() {
  // A thread outside of inference mode may write views made in it only below autograd.
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::mutex> lock(group_->mutex);
  if (!over_) {
    queue_->progress(*this, /*look=*/true);
  }
  return over_;
}

void Pending::finish(Milliseconds timeout) {
  at::AutoDispatchBelowADInplaceOrView below; // as above
  const auto limit = group_->limit_of(call, timeout);
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
      }
      if (!over_ && Clock::now() >= deadline) {
        end(group_->failure(
            c10::str(
                call.what(), " timed out: it waited ", limit.count(), " ms for ", group_->called(wait.peer),
                ", which has not called it.")));
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
      note->waits_for(group_->global_ranks[static_cast<size_t>(wait.peer)]);
    }
    sleep_while(*wait.word, wait.seen, slice);
    look = wait.word->load(std::memory_order_acquire) == wait.seen;
    if (look) {
      slice = std::min(2 * slice, kLastSlice);
    }
  }
}

void Pending::abort(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  if (!over_) {
    end(why);
  }
}

void Pending::add_stamp(const std::byte* bytes, uint64_t size) {
  stamps_.emplace_back(reinterpret_cast<const char*>(bytes), size);
}

void Pending::end(const std::exception_ptr& why) {
  over_ = true;
  why_ = why;
  call.inputs.clear();
  call.outputs.clear();
}

SharedMemory::SharedMemory(std::shared_ptr<SharedGroup> group)
    : Transport(group),
      shared_(std::move(group)),
      lane_(std::make_shared<Lane>(shared_)),
      mailbox_(std::make_shared<Mailbox>(shared_)) {}

SharedMemory::~SharedMemory() {
  leave(/*broken=*/false);
}

TransferPtr SharedMemory::begin(Call call) {
  at::AutoDispatchBelowADInplaceOrView below; // see Pending::advance
  switch (call.kind) {
    case c10d::OpType::SEND:
      return mailbox_->send(std::move(call));
    case c10d::OpType::RECV:
      return mailbox_->receive(std::move(call));
    default:
      return lane_->start(std::move(call));
  }
}

std::string SharedMemory::gone(int peer, const Arrived& arrived) const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->gone(peer, /*look=*/true, arrived);
}

void SharedMemory::leave(bool broken) {
  auto& header = shared_->header(shared_->rank);
  const auto state = static_cast<GroupState>(header.state.load());
  if (getpid() != shared_->owner || state == GroupState::kLeft || state == GroupState::kAborted) {
    return;
  }
  header.state.store(
      static_cast<uint32_t>(broken ? GroupState::kAborted : GroupState::kLeft), std::memory_order_release);
  // All threads that wait for this rank sleep on one of these.
  ring(shared_->header(0).complete);
  for (int peer = 0; peer < shared_->size(); ++peer) {
    ring(shared_->header(peer).doorbell);
  }
}

} // namespace torch_ext::sim
