#include "wait_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>

#include "fingerprint.h"
#include "layout.h"

namespace torch_ext::sim {

struct WaitEntry {
  std::atomic<uint32_t> changes;
  int32_t peer;
  int64_t since_ns;
  uint64_t number;
  char group[64];
  char operation[kNameBytes];
  char site[kSiteBytes];
  int64_t until_ns;
  int32_t thread;
  char reserved[164];
};

namespace {

constexpr size_t kEntries = 8;
constexpr uint64_t kPageVersion = 2;

struct WaitPage {
  uint64_t version;
  char reserved[56];
  WaitEntry entries[kEntries];
};

static_assert(sizeof(WaitEntry) == 504 && sizeof(WaitPage) <= kPage && offsetof(WaitPage, entries) == 64);
static_assert(offsetof(WaitEntry, since_ns) == 8 && offsetof(WaitEntry, number) == 16);
static_assert(offsetof(WaitEntry, group) == 24 && offsetof(WaitEntry, operation) == 88);
static_assert(offsetof(WaitEntry, site) == 128);
static_assert(offsetof(WaitEntry, until_ns) == 328 && offsetof(WaitEntry, thread) == 336);

std::mutex& page_mutex() {
  static auto* made = new std::mutex();
  return *made;
}

// Mapped at the first wait that is long, never unmapped; nullptr without a page.
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
    made->version = kPageVersion;
    return made;
  }();
  return mapped;
}

// The steady clock is CLOCK_MONOTONIC.
int64_t monotonic_ns(std::chrono::steady_clock::time_point when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
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
    const std::string& group, const std::string& operation, const std::string& site, uint64_t number,
    std::chrono::steady_clock::time_point until)
    : entry_(nullptr) {
  WaitPage* shown = page();
  if (shown == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(page_mutex());
  for (auto& entry : shown->entries) {
    if (entry.since_ns == 0) {
      entry_ = &entry;
      change(entry, [&] {
        entry.peer = -1;
        entry.number = number;
        copy_text(entry.group, sizeof entry.group, group);
        copy_text(entry.operation, sizeof entry.operation, operation);
        copy_text(entry.site, sizeof entry.site, site);
        entry.until_ns = monotonic_ns(until);
        entry.thread = static_cast<int32_t>(gettid());
        entry.since_ns = monotonic_ns(std::chrono::steady_clock::now());
      });
      return;
    }
  }
}

void WaitNote::waits_for(int64_t global_rank) {
  if (entry_ != nullptr && entry_->peer != global_rank) {
    change(*entry_, [&] { entry_->peer = static_cast<int32_t>(global_rank); });
  }
}

WaitNote::~WaitNote() {
  if (entry_ != nullptr) {
    std::lock_guard<std::mutex> lock(page_mutex());
    change(*entry_, [&] { entry_->since_ns = 0; });
  }
}

} // namespace torch_ext::sim
