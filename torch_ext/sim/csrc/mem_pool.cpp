#include "mem_pool.h"

#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "bindings.h"
#include "device.h"
#include "graph.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

namespace py = pybind11;

std::atomic<uint64_t> next_pool{1};
thread_local std::vector<Route> routes;

// As at::cuda::MemPool: a pool of the device that is current when it is made.
class MemPool {
 public:
  MemPool(std::shared_ptr<c10::Allocator> allocator, bool lends, bool is_whole)
      : pool_(pool_of(current_device())), allocator_(std::move(allocator)) {
    pool_.open(id_, lends, is_whole);
  }
  ~MemPool() { pool_.close(id_); } // also in a forked child, which must not use the device
  C10_DISABLE_COPY_AND_ASSIGN(MemPool);

  MempoolId id() const { return id_; }
  int device() const { return pool_.device(); }
  int use_count() const { return pool_.use_count(id_); }

  void begin(c10::DeviceIndex device) const {
    TORCH_CHECK(
        std::ranges::none_of(routes, [&](const Route& each) { return each.mempool == id_; }),
        "use_mem_pool: this thread allocates in the pool already. Leave the first `with` before.");
    const bool is_in_capture = is_capturing() && capture_of(current_stream(device)) != nullptr;
    pool_of(device).begin_capture(id_);
    routes.push_back({device, id_, allocator_, is_in_capture});
  }
  void end(c10::DeviceIndex device) const {
    std::erase_if(routes, [&](const Route& each) { return each.mempool == id_; });
    pool_of(device).end_capture(id_);
    pool_of(device).drop_graph(id_);
  }

 private:
  const MempoolId id_ = new_mempool(/*by_user=*/true);
  BlockPool& pool_;
  const std::shared_ptr<c10::Allocator> allocator_;
};

} // namespace

MempoolId new_mempool(bool by_user) {
  const auto serial = next_pool++;
  return by_user ? MempoolId{0, serial} : MempoolId{serial, 0};
}

const Route* route_on(c10::DeviceIndex device, bool is_captured) {
  const auto found = std::ranges::find_if(routes.rbegin(), routes.rend(), [&](const Route& each) {
    return each.device == device && (!is_captured || each.is_in_capture);
  });
  return found == routes.rend() ? nullptr : &*found;
}

void bind_mem_pools(pybind11::module_& m) {
  if (py::detail::get_type_info(typeid(c10::Allocator)) == nullptr) { // a later torch may have it
    const py::class_<c10::Allocator, std::shared_ptr<c10::Allocator>> allocator(m, "Allocator");
  }
  py::class_<MemPool>(m, "MemPool")
      .def(py::init<std::shared_ptr<c10::Allocator>, bool, bool>())
      .def_property_readonly("id", &MemPool::id)
      .def_property_readonly("device", &MemPool::device)
      .def("use_count", &MemPool::use_count)
      .def("begin", &MemPool::begin)
      .def("end", &MemPool::end);
}

} // namespace torch_ext::sim
