#include "wait_page.h"

#include <sys/mman.h>

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
  char reserved[176];
};

namespace {

constexpr size_t kEntries = 8;
constexpr uint64_t kPageVersion = 1;

struct WaitPage {
  uint64_t version;
  char reserved[56];
  WaitEntry entries[kEntries];
};

static_assert(sizeof(WaitEntry) == 504 && sizeof(WaitPage) <= kPage && offsetof(WaitPage, entries) == 64);
static_assert(offsetof(WaitEntry, since_ns) == 8 && offsetof(WaitEntry, number) == 16);
static_assert(offsetof(WaitEntry, group) == 24 && offsetof(WaitEntry, operation) == 88);
static_assert(offsetof(WaitEntry, site) == 128);

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
int64_t monotonic_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

template <typename Change>
void change(WaitEntry& entry, const Change& how) {
  entry.changes.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  how();
  entry.changes.fetch_add(1, std::memory_order_release);
}

} // namespace

WaitNote::WaitNote(const std::string& group, const std::string& operation, const std::string& site, uint64_t number)
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
        entry.since_ns = monotonic_ns();
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
