#include "futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace torch_ext::sim {
namespace {

// About 2 us: ranks outnumber cores, so the one that is waited for may need this core.
constexpr int kLooks = 50;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace

void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds slice) {
  for (int look = 0; look < kLooks; ++look) {
    if (word.load(std::memory_order_acquire) != seen) {
      return;
    }
    pause_core();
  }
  timespec left{};
  left.tv_sec = static_cast<time_t>(slice.count() / 1000);
  left.tv_nsec = static_cast<long>(slice.count() % 1000) * 1000000;
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &left, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ring(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_release);
  wake(word);
}

} // namespace torch_ext::sim
