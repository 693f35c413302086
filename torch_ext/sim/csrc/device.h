// The simulated devices, and the current one.
//
// Glossary of this folder:
//   device   one of the simulated accelerators, `sim:0` to `sim:N-1`; its memory is host memory taken from its own pool
//   alias    a host tensor over a device tensor's memory, made for the length of one kernel
//   fallback the boxed kernel that runs host kernels on aliases
//   pool     the allocator of one device; serves all allocations of the device's kernels
//
// Threading: the current device is per thread. Loading the library starts no thread and initialises nothing; the first
// use of a device freezes the device count and marks the process, so that its forks raise (see is_in_bad_fork).
//
// Note [Visible devices]
// A program for which CUDA means the device may set CUDA_VISIBLE_DEVICES before the first use. The process then numbers
// the devices that the value names from 0; comparisons between ranks and device identifiers use the numbers that all
// processes of a job share. The choice counts where TORCH_EXT_SIM_VISIBLE_OUTSIDE is set: cuda_as_sim/visible.py hides
// a value from before the program began, because it was meant for GPUs.
#pragma once

#include <c10/core/impl/GPUTrace.h>
#include <torch/library.h>

#include "std.h"

namespace torch_ext::sim {

// See Note [Two personalities] in build.py. As torch_ext/personality.py.
inline const bool kIsCuda = [] {
  const char* text = std::getenv("TORCH_EXT_SIM");
  return text != nullptr && std::string_view(text) == "cuda";
}();
inline const auto kSim = kIsCuda ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
inline const auto kSimKey = kIsCuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
inline const auto kSimSparseKey = kIsCuda ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparsePrivateUse1;
inline const auto kSimSparseCsrKey = kIsCuda ? c10::DispatchKey::SparseCsrCUDA : c10::DispatchKey::SparseCsrPrivateUse1;
inline const auto kSimNestedKey =
    kIsCuda ? c10::DispatchKey::NestedTensorCUDA : c10::DispatchKey::NestedTensorPrivateUse1;
inline const char* const kSimName = kIsCuda ? "cuda" : "sim";
inline const char* const kSimTitle = kIsCuda ? "CUDA" : "sim"; // in messages
inline const char* const kSimBackend = kIsCuda ? "nccl" : "simccl";

// As TORCH_LIBRARY_IMPL, for a dispatch key that is no constant.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define SIM_LIBRARY_IMPL(ns, key, m) SIM_LIBRARY_IMPL_(ns, key, m, C10_UID)
#define SIM_LIBRARY_IMPL_(ns, key, m, uid)                                                      \
  static void C10_CONCATENATE(sim_library_, uid)(torch::Library&);                              \
  static const torch::detail::TorchLibraryInit C10_CONCATENATE(sim_library_init_, uid)(         \
      torch::Library::IMPL, &C10_CONCATENATE(sim_library_, uid), #ns, key, __FILE__, __LINE__); \
  void C10_CONCATENATE(sim_library_, uid)(torch::Library & m)
// NOLINTEND(bugprone-macro-parentheses)

constexpr c10::DeviceIndex kMaxDevices = 64;

// Fires the callbacks of `torch.cuda._gpu_trace` where torch's CUDA half fires them, so that torch's CUDA stream
// sanitizer (TORCH_CUDA_SANITIZER=1) runs on simulated devices. Callbacks take the GIL.
template <typename Fire>
void trace(Fire fire) {
  if (kIsCuda) {
    if (const auto* interpreter = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(interpreter != nullptr)) {
      fire(**interpreter);
    }
  }
}

inline uintptr_t address_of(const void* object) {
  return reinterpret_cast<uintptr_t>(object);
}

// How many devices are simulated: TORCH_EXT_SIM_DEVICES if it is set (0 if that is not a number from 1 to kMaxDevices),
// otherwise as many as were requested, and at least 4.
c10::DeviceIndex device_count_of_all() noexcept;

// The number of devices that the program sees: all unless it chose some.
c10::DeviceIndex device_count() noexcept;

// The number by which all processes of a job know the device `index`, which must exist. See Note [Visible devices].
c10::DeviceIndex index_among_all(c10::DeviceIndex index) noexcept;

// Asks for at least `count` devices. Has no effect if TORCH_EXT_SIM_DEVICES is set or a device has been used.
void request_devices(int count);

c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// Turns -1 into the current device; raises for an index that does not exist.
c10::DeviceIndex checked_index(c10::DeviceIndex index);
c10::DeviceIndex checked_index(c10::Device device);

// Initializes the devices on their first use in this process. Raises in a child of a process that had used one.
void ensure_initialized();
bool is_initialized() noexcept;
bool is_in_bad_fork() noexcept;

} // namespace torch_ext::sim
