// Sleeping on a word of memory that processes share. Any thread; no state.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace torch_ext::sim {

// Returns when `word` is no longer `seen`, at the latest after `slice`; may return early. Looks for a few microseconds
// before it sleeps, because the peers of a small collective are seldom further apart.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds slice);

// Wakes all who sleep on `word`, in every process.
void wake(const std::atomic<uint32_t>& word);

// Adds one to `word` and wakes all who sleep on it.
void ring(std::atomic<uint32_t>& word);

} // namespace torch_ext::sim
