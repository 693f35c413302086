// Pools of device memory apart from the rest: those of graphs, and torch.cuda.MemPool.
#pragma once

#include "block_pool.h"
#include "std.h"

namespace torch_ext::sim {

// The name of a new pool: of a graph's own, or of one that a user makes and may give to graphs.
MempoolId new_mempool(bool by_user);

// Where allocations of a thread on a device go while it uses a pool.
struct Route {
  c10::DeviceIndex device;
  MempoolId mempool;
  std::shared_ptr<c10::Allocator> allocator; // serves each request by itself; null: the pool of the device does
  bool is_in_capture;                        // it began after a capture, and goes before the capture's pool
};

// The innermost route of this thread on `device`; nullptr without one.
const Route* route_on(c10::DeviceIndex device, bool is_captured);

} // namespace torch_ext::sim
