// Makes host tensors over device memory, and device tensors over host memory.
//
// Note [Aliasing]
// An alias is a host tensor whose storage points at a device storage's bytes and keeps that storage alive. Tensors that
// share a device storage share one alias storage, so that overlap checks and in-place kernels work as on the host.
// After the kernel, `AliasSet::publish` carries its changes over to the device tensors: sizes and strides of resized
// outputs, and reallocated storages. `adopt` relabels results that the kernel allocated.
#pragma once

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// An alias of `tensor` for an operation that may end after its storage is freed. Does not keep the storage alive: its
// bytes stay mapped, but may get another owner.
at::Tensor unowned_host_alias(const at::Tensor& tensor);

// The bytes of a device storage as another one, which keeps them mapped as that of `unowned_host_alias` does.
c10::Storage unowned_storage(const c10::Storage& storage);

// `tensor` itself when it lives on the host; otherwise an alias, for kernels that only read or write its elements. In a
// dry run the alias has no memory: see Note [Dry runs] in dry.h.
at::Tensor on_host(const at::Tensor& tensor);

// Returns a device tensor over the memory of `host`: moves the memory if nothing else holds it, else shares it.
at::Tensor adopt(at::Tensor&& host, c10::DeviceIndex device);

// A device tensor over `storage` with the sizes, strides, offset, type and conjugate and negative bits of `like`.
at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like);

// The aliases of one kernel call.
class AliasSet {
 public:
  at::Tensor alias(const at::Tensor& tensor);

  // Carries metadata and storage changes of every alias over to its device tensor.
  void publish(c10::DeviceIndex device);

  // The device tensor for a kernel's result: one of its arguments, a view of an argument's storage, or new memory.
  at::Tensor result(at::Tensor&& host, c10::DeviceIndex device);

 private:
  struct StoragePair {
    c10::Storage device;
    c10::Storage host;
  };
  struct TensorPair {
    at::Tensor device;
    at::Tensor host;
  };
  c10::Storage host_storage(const c10::Storage& storage);
  c10::Storage device_storage(const at::Tensor& host, c10::DeviceIndex device);
  const StoragePair* find(c10::Storage StoragePair::* side, const c10::Storage& storage) const;

  std::vector<StoragePair> storages_;
  std::vector<TensorPair> tensors_;
};

} // namespace torch_ext::sim
