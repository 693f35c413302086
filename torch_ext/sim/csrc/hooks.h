// Registration with torch's accelerator hooks, and the storage resize they share with the operators.
#pragma once

#include <c10/core/StorageImpl.h>

namespace torch_ext::sim {

// Gives `storage`, which lives on a sim device, new memory of `nbytes` and keeps what fits; 0 frees it.
void resize_bytes(c10::StorageImpl& storage, size_t nbytes);

void install_hooks();

} // namespace torch_ext::sim
