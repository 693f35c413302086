// Operators that make, view, resize and copy device memory. They cannot use the fallback, because they return the
// device tensor's own storage, or move data between devices. And `Hooks`, which torch's device-neutral code calls on an
// accelerator.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "alias.h"
#include "allocator.h"
#include "bindings.h"
#include "checks.h"
#include "device.h"
#include "dry.h"
#include "generator.h"
#include "graph.h"
#include "kernel.h"
#include "pinned_memory.h"
#include "std.h"
#include "stream.h"
#include "symmetric_memory.h"

namespace torch_ext::sim {
namespace {

const c10::DispatchKeySet kKeys(kSimKey);

void check_factory(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided, "Only strided tensors can be made on a ", kSimName,
      " device, but got ", layout.value_or(c10::kStrided), ".");
  TORCH_CHECK(
      !pin_memory.value_or(false), "Only dense CPU tensors can be pinned, but a ", kSimName, " tensor was asked for.");
}

c10::Device target(std::optional<c10::Device> device) {
  ensure_initialized();
  return {kSim, device.has_value() ? checked_index(*device) : current_device()};
}

// As GPUs, under torch.utils.deterministic.fill_uninitialized_memory: NaN, or the largest number of an integer type.
bool fills_fresh_memory() {
  const auto& context = at::globalContext();
  return C10_UNLIKELY(context.deterministicAlgorithms()) && context.deterministicFillUninitializedMemory();
}

at::Tensor filled_if_deterministic(at::Tensor tensor) {
  return fills_fresh_memory() ? at::native::fill_empty_deterministic_(tensor) : tensor;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard current(target(device));
  return filled_if_deterministic(
      at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard current(target(device));
  return filled_if_deterministic(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype)));
}

// Other devices return a tensor without memory that operators treat as zeros; this one returns real zeros.
at::Tensor efficient_zeros(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return empty(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

// Grows the storage of `tensor` to cover its sizes, strides and offset.
void grow_storage(const at::Tensor& tensor) {
  if (!is_in_bounds(tensor)) {
    resize_bytes(*tensor.storage().unsafeGetStorageImpl(), reach_of(tensor));
  }
}

// Torch refuses a view past the end of the storage. If the storage has shrunk, the error names the line that did it.
at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  try {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  } catch (c10::Error& error) {
    if (const auto why = why_too_small(self.storage()); !why.empty()) {
      error.add_context("The storage was" + why);
    }
    throw;
  }
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    const size_t before = self.storage().nbytes();
    impl->set_sizes_contiguous(size);
    grow_storage(self);
    if (fills_fresh_memory()) {
      at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
    }
  }
  if (format.has_value()) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_strided(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_strided(self, std::move(source), 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (source.device() != self.device()) {
    refuse_devices(self.device(), source.device(), "source", "aten::set_");
  }
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::Storage none = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), device_allocator(), true);
  return set_strided(self, none, 0, {0}, {});
}

void write_values(const at::Tensor& from, const at::Tensor& to) {
  if (is_dry()) {
    from.expand_as(to); // refuses sizes as the copy does
  } else {
    on_host(to).copy_(on_host(from));
  }
}

// Note [Copies between host and device]
// Copies order like CUDA's, which move one run of bytes at a time (copy_kernel_cuda):
//
//   blocking copy         The host waits for the current stream of the device. A device destination that is not one run
//                         gets the bytes through a temporary: the host waits for the copy to the temporary, and the
//                         kernel that scatters them runs after.
//   non-blocking copy     The stream reads or writes the host's memory. If that is not one run, the host gathers or
//                         scatters it itself, at the call.
//
// A copy without elements does nothing.
void copy_on(c10::DeviceIndex device, const at::Tensor& self, const at::Tensor& destination) {
  Stack tensors{self, destination};
  run_kernels(device, tensors.size(), &tensors, [device](Stack* values) {
    const auto &from = values->front().toTensor(), &to = values->back().toTensor();
    Kernel kernel("aten::copy_");
    kernel.on(device).reads(from).writes(to).launch();
    write_values(from, to);
  });
}

// Runs on the source's current stream. It first waits for the destination's current stream, which then waits for it.
void copy_across(const at::Tensor& self, const at::Tensor& destination) {
  const auto here = current_stream(self.device().index()), there = current_stream(destination.device().index());
  wait(here, record(there));
  copy_on(here.device_index(), self, destination);
  wait(there, record(here));
}

// Whether both tensors lie in memory in the same order and without gaps.
bool is_one_run(const at::Tensor& self, const at::Tensor& destination) {
  return self.dtype() == destination.dtype() && self.sizes() == destination.sizes() &&
      self.strides() == destination.strides() && self.is_non_overlapping_and_dense();
}

void copy_to_device(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const auto device = destination.device().index();
  check_bounds("aten::copy_", self); // before expand_as, which refuses a tensor past its storage in other words
  const auto source = self.expand_as(destination);
  const bool straight = is_one_run(source, destination);
  if (non_blocking) {
    copy_on(device, straight ? source : source.contiguous(), destination);
    return;
  }
  const bool spread = !straight && !destination.is_contiguous();
  {
    Kernel transfer("aten::copy_");
    transfer.on(device).reads(source).writes(spread ? at::Tensor() : destination).host_reads().launch();
    if (!spread) {
      write_values(source, destination);
    }
  }
  if (spread) {
    Kernel kernel("aten::copy_");
    kernel.on(device).writes(destination).launch();
    write_values(source, destination);
  }
}

void copy_to_host(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const auto device = self.device().index();
  if (!non_blocking) {
    // The host reads the values, which the stream must have produced by then.
    Kernel kernel("aten::copy_");
    kernel.on(device).reads(self).writes(destination).host_reads().launch();
    if (!is_dry()) {
      destination.copy_(on_host(self));
    } else if (const auto value = assumed("aten::copy_")) {
      destination.fill_(*value);
    }
  } else if (destination.is_contiguous() || is_one_run(self, destination)) {
    copy_on(device, self, destination);
  } else {
    const auto temporary = at::empty_like(destination, at::MemoryFormat::Contiguous);
    copy_on(device, self, temporary);
    destination.copy_(temporary);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const bool from_device = self.device().type() == kSim, to_device = destination.device().type() == kSim;
  if (from_device && to_device && self.device() != destination.device()) {
    copy_across(self, destination);
  } else if (
      (from_device && to_device) || destination.numel() == 0 ||
      !at::is_expandable_to(self.sizes(), destination.sizes())) { // the host's kernel refuses this
    copy_on((from_device ? self : destination).device().index(), self, destination);
  } else if (to_device) {
    copy_to_device(self, destination, non_blocking);
  } else {
    copy_to_host(self, destination, non_blocking);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) {
    destination.resize_(self.sizes());
  }
  return copy_from(self, destination, /*non_blocking=*/false);
}

c10::Scalar local_scalar_dense(const at::Tensor& self) {
  Kernel kernel("aten::_local_scalar_dense");
  kernel.reads(self).host_reads().launch();
  if (is_dry()) {
    return at::scalar_tensor(assumed("aten::_local_scalar_dense").value_or(0), at::dtype(self.scalar_type())).item();
  }
  return at::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// For CUDA: torch's own does not call `_copy_from`.
at::Tensor& copy_into(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.is_same(source)) {
    copy_from(source, self, non_blocking);
  }
  return self;
}

bool is_dense(const at::Tensor& tensor) {
  const auto type = tensor.device().type();
  return tensor.layout() == c10::kStrided && (type == kSim || type == c10::DeviceType::CPU);
}

// `tensor.data = other` may move a parameter between host and device: FSDP offloads parameters that way. Torch's own
// kernel allows it for CUDA. Wrapper subclasses do not see the operator in __torch_dispatch__, because autograd's key
// comes before it and has a kernel.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return is_dense(self) && is_dense(from);
}

template <typename Interface>
struct Hooks : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return is_initialized(); }
  void init() const override { ensure_initialized(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(checked_index(device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device();
    set_current_device(checked_index(device));
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(checked_index(device));
  }

  bool isPinnedPtr(const void* data) const override { return pinned_block_at(data).has_value(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    auto device = device_of_pointer(data);
    if (const auto memory = symmetric::memory_at(data)) {
      device = memory->device;
    }
    TORCH_CHECK(device.has_value(), "The pointer ", data, " is not memory of a ", kSimName, " device.");
    return {kSim, *device};
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return sim::current_device(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  int getNumGPUs() const override { return device_count(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(checked_index(device)); }
  std::string showConfig() const override { return "simulated on the host"; }
};

struct SimHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_bytes(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

} // namespace

void resize_bytes(c10::StorageImpl& storage, size_t nbytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const auto device = storage.device();
  c10::DataPtr fresh = allocate_on(device.index(), nbytes, device);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0 && storage.data() != nullptr) {
    Stack nothing;
    run_kernels(device.index(), 0, &nothing, [device, kept, from = storage.data(), to = fresh.mutable_get()](Stack*) {
      Kernel kernel("aten::resize_");
      kernel.on(device.index()).reads(from, kept).writes(to, kept).launch();
      if (!is_dry()) {
        std::memcpy(to, from, kept);
      }
    });
  }
  storage.set_data_ptr_noswap(nbytes < storage.nbytes() ? note_shrinking(std::move(fresh)) : std::move(fresh));
  storage.set_nbytes(nbytes);
}

SIM_LIBRARY_IMPL(aten, kSimKey, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_strided));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  if (kIsCuda) {
    m.impl("copy_", TORCH_FN(copy_into));
  }
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// Aliases carry conjugate and negative bits, and the host's copy resolves them. Without these lines torch would resolve
// them before the copy, by another copy, in an endless recursion.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  if (!kIsCuda) {
    m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  }
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  if (!kIsCuda) {
    m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  }
}

void install_hooks() {
  if (!kIsCuda) {
    at::RegisterPrivateUse1HooksInterface(new SimHooks());
    return;
  }
  // Torch makes the hooks of a build without CUDA once, before our code runs. They have no members, so ours can replace
  // them in place.
  static_assert(sizeof(CudaHooks) == sizeof(at::CUDAHooksInterface) && sizeof(CudaHooks) == sizeof(void*));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) CudaHooks();
}

} // namespace torch_ext::sim
