// Host tensors over device memory, and the way back.
//
// Note [Aliasing]
// An alias is a host tensor whose storage points at a device storage's bytes and keeps that storage alive; nothing is
// copied. Tensors that share a device storage share one alias storage, so that overlap checks and in-place kernels see
// what they would see on the host. After the kernel, `AliasSet::publish` carries over what it changed: sizes and
// strides of resized outputs, and a storage it reallocated. Results that the kernel allocated are relabelled (`adopt`).
#pragma once

#include <ATen/core/Tensor.h>

#include "device.h"
#include "std.h"

namespace torch_ext::sim {

// An alias of `tensor`, which lives on a sim device, for kernels that only read or write its elements.
at::Tensor host_alias(const at::Tensor& tensor);

// `tensor` itself when it lives on the host, its alias otherwise.
at::Tensor on_host(const at::Tensor& tensor);

// Returns a device tensor over the memory of `host`: takes the memory over if nothing else holds it, and shares it
// otherwise.
at::Tensor adopt(at::Tensor&& host, c10::DeviceIndex device);

// A device tensor over `storage` with the sizes, strides, offset, type and conjugate and negative bits of `like`.
at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like);

// The aliases of one kernel call.
class AliasSet {
 public:
  at::Tensor alias(const at::Tensor& tensor);

  // Carries metadata and storage changes of every alias over to its device tensor.
  void publish(c10::DeviceIndex device);

  // The device tensor for a kernel's result: the argument it came in as, a view of an argument's storage, or new
  // memory.
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
