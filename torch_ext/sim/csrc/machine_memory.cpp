#include "machine_memory.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kEntries = 512;
constexpr int kAttempts = 2000;

struct Entry {
  int32_t pid;                 // 0: not in use
  uint64_t born;               // when the process started, which tells it from a later one with the same number
  std::atomic<uint64_t> bytes; // changed by its process, dropped by any
};

constexpr size_t kSharedBytes = 16384;

enum class MutexState : uint8_t { kNew, kBeingMade, kMade }; // of the page's mutex

struct Page {
  uint64_t cap; // written by the maker of the page
  std::atomic<MutexState> state;
  pthread_mutex_t mutex; // guards entries, except `bytes`
  uint64_t used;         // entries from here on have never been in use
  std::array<Entry, kEntries> entries;
};
static_assert(sizeof(Page) <= kSharedBytes);

Page* page = nullptr; // mapped once, never unmapped
std::atomic<Entry*> own{nullptr};

// A process that dies with the lock passes it on.
class PageLock {
 public:
  PageLock() {
    if (pthread_mutex_lock(&page->mutex) == EOWNERDEAD) {
      pthread_mutex_consistent(&page->mutex);
    }
  }
  ~PageLock() { pthread_mutex_unlock(&page->mutex); }
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;
};

// In ticks of the system's clock; 0 for a process that has ended, be it waited for or not.
uint64_t birth_of(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) {
    return 0;
  }
  constexpr int kBirth = 22 - 2; // the 22nd field; the name is the second
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int number = 1; number <= kBirth && fields >> field; ++number) {
    if (number == 1 && (field == "Z" || field == "X")) {
      return 0;
    }
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

uint64_t held_by_run() {
  uint64_t sum = 0;
  for (size_t i = 0; i < page->used; ++i) {
    sum += page->entries.at(i).bytes.load(std::memory_order_relaxed);
  }
  return sum;
}

// The first process that maps the page makes its mutex. False if that one died over it.
bool make_mutex(Page& mapped) {
  auto state = MutexState::kNew;
  if (mapped.state.compare_exchange_strong(state, MutexState::kBeingMade)) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mapped.mutex, &attributes);
    mapped.state = MutexState::kMade;
  }
  for (int attempt = 0; attempt < kAttempts && mapped.state != MutexState::kMade; ++attempt) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return mapped.state == MutexState::kMade;
}

// Call these two with the lock.
void drop_ended() {
  for (size_t i = 0; i < page->used; ++i) {
    Entry& entry = page->entries.at(i);
    if (entry.pid != 0 && (birth_of(entry.pid) != entry.born)) {
      entry.bytes = 0;
      entry.pid = 0;
    }
  }
}

// The entry of this process; nullptr if all are in use, in which case it is not counted.
Entry* own_entry() {
  Entry* entry = own.load();
  for (int attempt = 0; entry == nullptr && attempt < 2; ++attempt) {
    const auto end = page->entries.end();
    const auto found = std::find_if(page->entries.begin(), end, [](const Entry& each) { return each.pid == 0; });
    if (found == end) {
      drop_ended();
      continue;
    }
    entry = &*found;
    entry->pid = static_cast<int32_t>(getpid());
    entry->born = birth_of(entry->pid);
    entry->bytes = 0;
    page->used = std::max<uint64_t>(page->used, static_cast<uint64_t>(found - page->entries.begin()) + 1);
    own = entry;
  }
  return entry;
}

} // namespace

void use_memory_page(int descriptor) {
  void* memory = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED || !make_mutex(*static_cast<Page*>(memory))) {
    return;
  }
  page = static_cast<Page*>(memory);
  // A child has its own entry. What it inherited, it cannot use: see is_in_bad_fork.
  pthread_atfork(nullptr, nullptr, [] { own = nullptr; });
}

bool take_from_machine(size_t nbytes) noexcept {
  if (page == nullptr) {
    return true;
  }
  const PageLock lock;
  Entry* entry = own_entry();
  if (entry == nullptr) {
    return true;
  }
  const auto fits = [&] {
    const uint64_t held = held_by_run();
    return held <= page->cap && nbytes <= page->cap - held;
  };
  if (!fits()) {
    drop_ended();
    if (!fits()) {
      return false;
    }
  }
  entry->bytes += nbytes;
  return true;
}

void return_to_machine(size_t nbytes) noexcept {
  if (Entry* entry = own.load()) {
    entry->bytes -= nbytes;
  }
}

MachineMemory machine_memory() noexcept {
  if (page == nullptr) {
    return {0, 0, 0};
  }
  const PageLock lock;
  Entry* entry = own.load();
  return {page->cap, held_by_run(), entry == nullptr ? 0 : entry->bytes.load()};
}

size_t bytes_of_variable(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return otherwise;
  }
  char* end = nullptr;
  const auto value = std::strtoull(text, &end, 10);
  TORCH_CHECK_VALUE(
      *end == '\0' && *text != '-' && value > 0, name, "=", text, ": expected a number of bytes above 0.");
  return value;
}

} // namespace torch_ext::sim
