#include "journal.h"

#include <signal.h>
#include <sys/types.h>

#include "../kernel_observer.h"
#include "../std.h"
#include "../symmetric_memory.h"
#include "../transport/segment.h"

namespace torch_ext::sim::races {
namespace {

constexpr uint64_t kLogged = 512;
constexpr size_t kStampBytes = size_t{16} << 10; // 1,365 lanes; pages that nobody writes do not exist

struct Journal {
  std::atomic<uint32_t> holder; // the process that has the lock; 0: none
  uint64_t count;

  Logged& entry(uint64_t number) {
    auto* entries = reinterpret_cast<Logged*>(reinterpret_cast<char*>(this) + kPage);
    return entries[number % kLogged];
  }
};
static_assert(sizeof(Journal) <= kPage && std::is_trivially_copyable_v<Logged>);

constexpr size_t kStampsBegin = kPage + (kLogged * sizeof(Logged) + kPage - 1) / kPage * kPage;

// Holds the lock of a journal. Takes it from a process that was killed with it, whose last access may be half written.
class JournalLock {
 public:
  explicit JournalLock(Journal& journal) : holder_(journal.holder) {
    const auto mine = static_cast<uint32_t>(getpid());
    uint32_t seen = 0;
    while (!holder_.compare_exchange_strong(seen, mine, std::memory_order_acquire)) {
      const bool has_ended = seen != 0 && ::kill(static_cast<pid_t>(seen), 0) != 0 && errno == ESRCH;
      if (!has_ended) {
        sleep_while(holder_, seen, std::chrono::milliseconds(1));
        seen = 0;
      }
    }
  }
  ~JournalLock() {
    holder_.store(0, std::memory_order_release);
    wake(holder_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(JournalLock);

 private:
  std::atomic<uint32_t>& holder_;
};

char* stamp_at(const symmetric::Memory& memory, size_t place) {
  return memory.journal() + kStampsBegin + place * kStampBytes;
}

} // namespace

size_t journal_bytes(size_t pad_bytes) {
  return kStampsBegin + pad_bytes / sizeof(uint32_t) * kStampBytes;
}

std::string as_stamp(const std::vector<Stamped>& ticks) {
  return {reinterpret_cast<const char*>(ticks.data()), ticks.size() * sizeof(Stamped)};
}

std::vector<Stamped> from_stamp(const std::string& stamp) {
  std::vector<Stamped> ticks(stamp.size() / sizeof(Stamped));
  copy_bytes(ticks.data(), stamp.data(), ticks.size() * sizeof(Stamped));
  return ticks;
}

bool Logged::is_alike(const Logged& other) const {
  return epoch.process == other.epoch.process && epoch.lane == other.epoch.lane && writes == other.writes &&
      begin == other.begin && type == other.type && std::ranges::equal(all_sizes(), other.all_sizes()) &&
      std::ranges::equal(all_strides(), other.all_strides()) && std::strcmp(name, other.name) == 0 &&
      std::strcmp(site, other.site) == 0;
}

void log_access(symmetric::Memory& memory, const Logged& access, const std::function<void(const Logged&)>& visit) {
  auto& journal = *reinterpret_cast<Journal*>(memory.journal());
  const JournalLock lock(journal);
  Logged* place = nullptr;
  for (uint64_t number = 0; number < std::min(journal.count, kLogged); ++number) {
    Logged& each = journal.entry(number);
    visit(each);
    place = each.is_alike(access) ? &each : place;
  }
  *(place != nullptr ? place : &journal.entry(journal.count++)) = access;
}

void write_stamp(symmetric::Memory& memory, size_t place, const std::string& stamp) {
  if (stamp.empty() && !memory.has_stamps) {
    return;
  }
  memory.has_stamps = true;
  const auto bytes = static_cast<uint32_t>(stamp.size() + sizeof(uint32_t) > kStampBytes ? 0 : stamp.size());
  copy_bytes(stamp_at(memory, place) + sizeof bytes, stamp.data(), bytes);
  copy_bytes(stamp_at(memory, place), &bytes, sizeof bytes);
}

std::string read_stamp(symmetric::Memory& memory, size_t place) {
  if (observer() == nullptr) {
    return "";
  }
  const char* from = stamp_at(memory, place);
  uint32_t bytes = 0;
  copy_bytes(&bytes, from, sizeof bytes);
  return {from + sizeof bytes, bytes};
}

} // namespace torch_ext::sim::races
