#include "device.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

namespace torch_ext::sim {
namespace {

constexpr const char* kCountVariable = "TORCH_EXT_SIM_DEVICES";
constexpr c10::DeviceIndex kDefaultCount = 4;

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> initialized{false};
std::atomic<bool> bad_fork{false};
std::atomic<int> frozen_count{-1};
std::atomic<int> requested_count{kDefaultCount};

int count_from_environment() noexcept {
  const char* text = std::getenv(kCountVariable);
  if (text == nullptr || *text == '\0') {
    return requested_count;
  }
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  const bool usable = *end == '\0' && value >= 1 && value <= kMaxDevices;
  return usable ? static_cast<int>(value) : 0;
}

void mark_child() noexcept {
  bad_fork = initialized.load();
}

void initialize_slow() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(
      !bad_fork,
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' start "
      "method, or fork before the parent uses a sim device.");
  if (initialized) {
    return;
  }
  const int count = count_from_environment();
  TORCH_CHECK_VALUE(
      count > 0, kCountVariable, "=", std::getenv(kCountVariable), ": expected a whole number of devices from 1 to ",
      static_cast<int>(kMaxDevices), ".");
  pthread_atfork(nullptr, nullptr, mark_child);
  frozen_count = count;
  initialized = true;
}

} // namespace

c10::DeviceIndex device_count() noexcept {
  const int frozen = frozen_count.load(std::memory_order_relaxed);
  return static_cast<c10::DeviceIndex>(frozen >= 0 ? frozen : count_from_environment());
}

void request_devices(int count) {
  TORCH_CHECK_VALUE(
      count >= 1 && count <= kMaxDevices, "request_devices(): expected a number of devices from 1 to ",
      static_cast<int>(kMaxDevices), ", got ", count, ".");
  int known = requested_count;
  while (known < count && !requested_count.compare_exchange_weak(known, count)) {
  }
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

void set_current_device(c10::DeviceIndex index) noexcept {
  current = index;
}

c10::DeviceIndex checked_index(c10::DeviceIndex index) {
  if (index == -1) {
    return current;
  }
  ensure_initialized();
  const int count = device_count();
  TORCH_CHECK(
      index >= 0 && index < count, "sim error: invalid device ordinal: got sim:", static_cast<int>(index),
      ", expected one of the ", count, " devices sim:0 to sim:", count - 1, ". Set ", kCountVariable,
      " before the first use to have more.");
  return index;
}

c10::DeviceIndex checked_index(c10::Device device) {
  TORCH_CHECK(device.type() == kSim, "Expected a sim device, but got ", device, ".");
  return checked_index(device.index());
}

void ensure_initialized() {
  if (!initialized.load(std::memory_order_relaxed) || bad_fork.load(std::memory_order_relaxed)) {
    initialize_slow();
  }
}

bool is_initialized() noexcept {
  return initialized && !bad_fork;
}

bool is_in_bad_fork() noexcept {
  return bad_fork;
}

} // namespace torch_ext::sim
