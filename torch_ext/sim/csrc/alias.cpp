#include "alias.h"

#include "allocator.h"
#include "blocks.h"
#include "device.h"
#include "dry.h"
#include "std.h"

namespace torch_ext::sim {
namespace {

const c10::Device kHost(c10::DeviceType::CPU);
const c10::Device kMeta(c10::DeviceType::Meta);

// Of the tensors that a host kernel gets: see Note [Dry runs].
c10::DispatchKey host_key() {
  return is_dry() ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
}

void release_storage(void* context) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context));
}

// A DataPtr over the bytes of `storage` that keeps it alive and names `owner` as its device.
c10::DataPtr borrow(const c10::Storage& storage, c10::Device owner) {
  void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().mutable_get();
  c10::raw::intrusive_ptr::incref(storage.unsafeGetStorageImpl());
  return {data, storage.unsafeGetStorageImpl(), &release_storage, owner};
}

// A DataPtr over the bytes of `storage` that keeps their segment mapped, and not the storage alive.
c10::DataPtr borrow_unowned(const c10::Storage& storage, c10::Device owner) {
  void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().mutable_get();
  auto* segment = pin(data);
  if (segment == nullptr) {
    return borrow(storage, owner); // memory of the host
  }
  return {data, segment, [](void* context) { unpin(static_cast<DeviceSegment*>(context)); }, owner};
}

c10::Storage make_storage(c10::DataPtr&& data, size_t nbytes, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data), allocator, /*resizable=*/true);
}

c10::Storage alias_storage(const c10::Storage& storage) {
  if (is_dry()) {
    return make_storage({nullptr, kMeta}, storage.nbytes(), c10::GetAllocator(c10::DeviceType::Meta));
  }
  return make_storage(borrow(storage, kHost), storage.nbytes(), alias_allocator());
}

at::Tensor make_tensor(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

// Relabels the bytes of `host`, a storage that a kernel allocated, as memory of `device`.
c10::Storage adopt_storage(const c10::Storage& host, bool sole_owner, c10::DeviceIndex device) {
  const c10::Device owner(kSim, device);
  const size_t nbytes = host.nbytes();
  if (is_dry()) {
    return make_storage(allocate_on(device, nbytes, owner), nbytes, device_allocator());
  }
  count_result(host.data());
  if (!sole_owner) {
    return make_storage(borrow(host, owner), nbytes, device_allocator());
  }
  c10::DataPtr data = host.set_data_ptr(c10::DataPtr(nullptr, kHost));
  data.unsafe_set_device(owner);
  return make_storage(std::move(data), nbytes, device_allocator());
}

} // namespace

at::Tensor unowned_host_alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto bytes = make_storage(borrow_unowned(storage, kHost), storage.nbytes(), c10::GetCPUAllocator());
  return make_tensor(bytes, c10::DispatchKey::CPU, tensor);
}

c10::Storage unowned_storage(const c10::Storage& storage) {
  return make_storage(borrow_unowned(storage, storage.device()), storage.nbytes(), device_allocator());
}

at::Tensor on_host(const at::Tensor& tensor) {
  const bool on_device = tensor.defined() && tensor.device().type() == kSim;
  return on_device ? make_tensor(alias_storage(tensor.storage()), host_key(), tensor) : tensor;
}

at::Tensor adopt(at::Tensor&& host, c10::DeviceIndex device) {
  if (!host.defined()) {
    return {};
  }
  const bool sole_owner = host.use_count() == 1 && host.storage().use_count() == 1;
  return view_of(adopt_storage(host.storage(), sole_owner, device), host);
}

at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like) {
  return make_tensor(storage, kSimKey, like);
}

c10::Storage AliasSet::host_storage(const c10::Storage& storage) {
  if (const auto* known = find(&StoragePair::device, storage)) {
    return known->host;
  }
  storages_.push_back({storage, alias_storage(storage)});
  return storages_.back().host;
}

at::Tensor AliasSet::alias(const at::Tensor& tensor) {
  // One argument passed twice must stay one tensor: kernels compare identities (`x.add_(x)`).
  for (const auto& pair : tensors_) {
    if (pair.device.is_same(tensor)) {
      return pair.host;
    }
  }
  tensors_.push_back({tensor, make_tensor(host_storage(tensor.storage()), host_key(), tensor)});
  return tensors_.back().host;
}

void AliasSet::publish(c10::DeviceIndex device) {
  for (auto& pair : storages_) {
    auto* host = pair.host.unsafeGetStorageImpl();
    auto* real = pair.device.unsafeGetStorageImpl();
    const auto* data = host->_mutable_data_ptr_no_checks().get();
    if (is_dry()) {
      if (host->nbytes() != real->nbytes()) {
        real->set_data_ptr_noswap(allocate_on(device, host->nbytes(), c10::Device(kSim, device)));
        real->set_nbytes(host->nbytes());
      }
    } else if (data != real->_mutable_data_ptr_no_checks().get() || host->nbytes() != real->nbytes()) {
      const size_t nbytes = host->nbytes();
      c10::DataPtr grown = host->set_data_ptr(c10::DataPtr(nullptr, kHost));
      grown.unsafe_set_device(c10::Device(kSim, device));
      real->set_data_ptr_noswap(std::move(grown));
      real->set_nbytes(nbytes);
      // Aliases of this storage may still be returned; they only need the identity, not the bytes.
    }
  }
  for (auto& pair : tensors_) {
    const auto own = host_storage(pair.device.storage());
    if (own.unsafeGetStorageImpl() != pair.host.storage().unsafeGetStorageImpl()) {
      // The kernel gave an output another storage (`out.set_(...)`).
      pair.device.unsafeGetTensorImpl()->set_storage_keep_dtype(device_storage(pair.host, device));
    }
    if (pair.host.sizes() != pair.device.sizes() || pair.host.strides() != pair.device.strides() ||
        pair.host.storage_offset() != pair.device.storage_offset()) {
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(
          pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
    }
    // Some kernels set the conjugate bit of an output (`linalg.lu_solve`).
    pair.device.unsafeGetTensorImpl()->_set_conj(pair.host.is_conj());
    pair.device.unsafeGetTensorImpl()->_set_neg(pair.host.is_neg());
  }
}

at::Tensor AliasSet::result(at::Tensor&& host, c10::DeviceIndex device) {
  if (!host.defined() || host.device() != (is_dry() ? kMeta : kHost)) {
    return std::move(host);
  }
  for (const auto& pair : tensors_) {
    if (pair.host.is_same(host)) {
      return pair.device;
    }
  }
  if (find(&StoragePair::host, host.storage()) == nullptr && host.storage().use_count() == 1) {
    return adopt(std::move(host), device);
  }
  return view_of(device_storage(host, device), host);
}

const AliasSet::StoragePair* AliasSet::find(c10::Storage StoragePair::* side, const c10::Storage& storage) const {
  const auto found = std::find_if(storages_.begin(), storages_.end(), [&](const StoragePair& pair) {
    return (pair.*side).unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  return found == storages_.end() ? nullptr : &*found;
}

c10::Storage AliasSet::device_storage(const at::Tensor& host, c10::DeviceIndex device) {
  if (const auto* known = find(&StoragePair::host, host.storage())) {
    return known->device;
  }
  if (const auto* data = host.storage().data(); data != nullptr && !device_of_pointer(data).has_value()) {
    // The kernel gave an output its scratch memory.
    c10::DataPtr copy = allocate_on(device, host.storage().nbytes(), c10::Device(kSim, device));
    std::memcpy(copy.get(), data, host.storage().nbytes());
    return make_storage(std::move(copy), host.storage().nbytes(), device_allocator());
  }
  // Results that share memory with each other keep sharing it: the first one brings the storage in.
  storages_.push_back({adopt_storage(host.storage(), /*sole_owner=*/false, device), host.storage()});
  return storages_.back().device;
}

} // namespace torch_ext::sim
