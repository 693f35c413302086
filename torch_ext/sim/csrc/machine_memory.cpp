#include "machine_memory.h"

#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kEntries = 512;
constexpr uint64_t kPidBits = 22; // as many as Linux has
constexpr uint64_t kPidMask = (uint64_t{1} << kPidBits) - 1;

// An entry is claimed by writing its owner, and freed by writing 0: see `name_of`.
struct Entry {
  std::atomic<uint64_t> owner;
  std::atomic<uint64_t> bytes; // counted in the page's total
};
constexpr uint64_t kBeingDropped = 1;

constexpr size_t kSharedBytes = 16384;

struct Page {
  uint64_t cap; // written by the maker of the page
  std::atomic<uint64_t> total;
  std::array<Entry, kEntries> entries;
};
static_assert(sizeof(Page) <= kSharedBytes);

Page* page = nullptr; // mapped once, never unmapped
std::atomic<Entry*> own{nullptr};

// A unique number of a process in the run: its pid, and its start time in clock ticks. 0 for a process that has ended,
// even if its parent has not waited for it.
uint64_t name_of(uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t command_end = text.rfind(')');
  if (command_end == std::string::npos) {
    return 0;
  }
  constexpr int kBirth = 22 - 2; // the 22nd field; the command is the second
  std::istringstream fields(text.substr(command_end + 1));
  std::string field;
  for (int number = 1; number <= kBirth && fields >> field; ++number) {
    if (number == 1 && (field == "Z" || field == "X")) {
      return 0;
    }
  }
  return std::strtoull(field.c_str(), nullptr, 10) << kPidBits | pid;
}

void drop_ended() {
  for (auto& entry : page->entries) {
    uint64_t owner = entry.owner;
    if (owner > kBeingDropped && name_of(owner & kPidMask) != owner &&
        entry.owner.compare_exchange_strong(owner, kBeingDropped)) {
      page->total -= entry.bytes.exchange(0);
      entry.owner = 0;
    }
  }
}

// Claims a free entry for this process, if there is one.
Entry* claim() {
  const uint64_t name = name_of(static_cast<uint64_t>(getpid()));
  auto* const found = std::ranges::find_if(page->entries, [&](Entry& entry) {
    uint64_t nobody = 0;
    return entry.owner.compare_exchange_strong(nobody, name);
  });
  return found == page->entries.end() ? nullptr : found;
}

// The entry of this process; nullptr if all are in use, in which case it is not counted.
Entry* own_entry() {
  static std::mutex mutex; // threads of one process share an entry
  if (own == nullptr) {
    std::lock_guard<std::mutex> lock(mutex);
    own = own != nullptr ? own.load() : claim();
    if (own == nullptr) {
      drop_ended();
      own = claim();
    }
  }
  return own;
}

bool add_to_total(uint64_t nbytes) {
  uint64_t total = page->total;
  while (total <= page->cap && nbytes <= page->cap - total) {
    if (page->total.compare_exchange_weak(total, total + nbytes)) {
      return true;
    }
  }
  return false;
}

} // namespace

void use_memory_page(int descriptor) {
  void* memory = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    return;
  }
  page = static_cast<Page*>(memory);
  // A child gets another entry. It cannot use inherited device memory: see is_in_bad_fork.
  pthread_atfork(nullptr, nullptr, [] { own = nullptr; });
}

bool take_from_machine(size_t nbytes) noexcept {
  Entry* entry = page == nullptr ? nullptr : own_entry();
  if (entry == nullptr) {
    return true;
  }
  if (!add_to_total(nbytes)) {
    drop_ended();
    if (!add_to_total(nbytes)) {
      return false;
    }
  }
  entry->bytes += nbytes;
  return true;
}

void return_to_machine(size_t nbytes) noexcept {
  if (Entry* entry = own.load()) {
    entry->bytes -= nbytes;
    page->total -= nbytes;
  }
}

MachineMemory machine_memory() noexcept {
  if (page == nullptr) {
    return {0, 0, 0};
  }
  const Entry* entry = own.load();
  return {page->cap, page->total, entry == nullptr ? 0 : entry->bytes.load()};
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
