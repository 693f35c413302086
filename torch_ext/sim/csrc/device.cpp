#include "device.h"

#include "std.h"

namespace torch_ext::sim {
namespace {

constexpr const char* kCountVariable = "TORCH_EXT_SIM_DEVICES";
constexpr c10::DeviceIndex kDefaultCount = 4;
constexpr int kInvalidDevice = 101; // cudaErrorInvalidDevice
constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
// Set in processes where this choice counts.
constexpr const char* kVisibleOutside = "TORCH_EXT_SIM_VISIBLE_OUTSIDE";

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> initialized{false};
std::atomic<bool> bad_fork{false};
std::atomic<c10::DeviceIndex> requested_count{kDefaultCount};

c10::DeviceIndex count_from_environment() noexcept {
  const char* text = std::getenv(kCountVariable);
  if (text == nullptr || *text == '\0') {
    return requested_count;
  }
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  const bool usable = *end == '\0' && value >= 1 && value <= kMaxDevices;
  return usable ? static_cast<c10::DeviceIndex>(value) : c10::DeviceIndex(0);
}

// See Note [Visible devices].
struct Devices {
  c10::DeviceIndex all = 0;
  c10::DeviceIndex visible = 0;
  std::array<c10::DeviceIndex, kMaxDevices> among_all{}; // number of each visible device
};

// The value by which the program chose its devices; null if it did not.
const char* choice_of_program() noexcept {
  return std::getenv(kVisibleOutside) == nullptr ? nullptr : std::getenv(kVisible);
}

// Parses as CUDA does: numbers between commas, up to the first that names no device; no devices if one is named twice.
void choose(Devices& devices, const char* text) noexcept {
  for (char* end = nullptr;; text = end + 1) {
    const long number = std::strtol(text, &end, 10);
    if (end == text || number < 0 || number >= devices.all) {
      return;
    }
    auto* const next = devices.among_all.begin() + devices.visible;
    if (std::find(devices.among_all.begin(), next, number) != next) {
      devices.visible = 0;
      return;
    }
    *next = static_cast<c10::DeviceIndex>(number);
    ++devices.visible;
    end += std::strcspn(end, ",");
    if (*end == '\0') {
      return;
    }
  }
}

Devices devices_from_environment() noexcept {
  Devices devices;
  devices.all = count_from_environment();
  if (const char* choice = choice_of_program()) {
    choose(devices, choice);
    return devices;
  }
  devices.visible = devices.all;
  std::iota(devices.among_all.begin(), devices.among_all.end(), c10::DeviceIndex(0));
  return devices;
}

Devices frozen; // valid once `initialized` is set

Devices devices() noexcept {
  return initialized.load(std::memory_order_acquire) ? frozen : devices_from_environment();
}

void mark_child() noexcept {
  bad_fork = initialized.load();
}

void initialize_slow() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(
      !bad_fork, "Cannot re-initialize ", kSimTitle, " in forked subprocess. To use ", kSimTitle,
      " with multiprocessing, you must use the "
      "'spawn' start method, or fork before the parent uses a device.");
  if (initialized) {
    return;
  }
  frozen = devices_from_environment();
  TORCH_CHECK_VALUE(
      frozen.all > 0, kCountVariable, "=", std::getenv(kCountVariable),
      ": expected a whole number of devices from 1 to ", static_cast<int>(kMaxDevices), ".");
  TORCH_CHECK(
      frozen.visible > 0, kSimTitle, " error: no device is visible: the program set ", kVisible, "='",
      std::getenv(kVisible), "', which names none of the ", static_cast<int>(frozen.all), " devices 0 to ",
      frozen.all - 1, ".");
  pthread_atfork(nullptr, nullptr, mark_child);
  initialized = true;
}

} // namespace

c10::DeviceIndex device_count() noexcept {
  return devices().visible;
}

c10::DeviceIndex device_count_of_all() noexcept {
  return devices().all;
}

c10::DeviceIndex index_among_all(c10::DeviceIndex index) noexcept {
  return devices().among_all[static_cast<size_t>(index)];
}

void request_devices(int count) {
  TORCH_CHECK_VALUE(
      count >= 1 && count <= kMaxDevices, "request_devices(): expected a number of devices from 1 to ",
      static_cast<int>(kMaxDevices), ", got ", count, ".");
  auto known = requested_count.load();
  while (known < count && !requested_count.compare_exchange_weak(known, static_cast<c10::DeviceIndex>(count))) {
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
  const int hidden = device_count_of_all() - count;
  if (index >= 0 && index < count) {
    return index;
  }
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kInvalidDevice,
      c10::str(
          kSimTitle, " error: invalid device ordinal\nGot ", kSimName, ":", static_cast<int>(index),
          ", expected one of the ", count, " devices ", kSimName, ":0 to ", kSimName, ":", count - 1, ". ",
          hidden > 0 ? c10::str("The program hid ", hidden, " by setting ", kVisible, ".")
                     : c10::str("Set ", kCountVariable, " before the first use to have more.")));
}

c10::DeviceIndex checked_index(c10::Device device) {
  TORCH_CHECK(device.type() == kSim, "Expected a ", kSimName, " device, but got ", device, ".");
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
