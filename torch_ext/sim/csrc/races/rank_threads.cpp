#include "rank_threads.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "../device.h"
#include "../kernel.h"
#include "../kernel_observer.h"
#include "../stream.h"
#include "watch.h"

namespace torch_ext::sim::races {
namespace {

using Devices = std::vector<c10::DeviceIndex>;
using Tensors = std::vector<at::Tensor>;

// As if a kernel, named `name`, had used `tensors` on the current stream of the device of each; the host, where they
// are on none.
void use(const std::string& name, const Tensors& tensors, bool write) {
  std::map<c10::DeviceIndex, c10::SmallVector<sim::Access, 8>> by_device; // -1: the host
  for (const auto& tensor : tensors) {
    if (const auto access = access_to(tensor, write)) {
      by_device[access->device.type() == kSim ? access->device.index() : c10::DeviceIndex(-1)].push_back(*access);
    }
  }
  for (const auto& [device, accesses] : by_device) {
    if (device < 0) {
      watch().host_used(name, accesses);
    } else {
      watch().launch_begins(current_stream(device), accesses);
      watch().kernel(name, current_stream(device), accesses);
    }
  }
}

} // namespace

void bind_rank_threads(pybind11::module& m) {
  pybind11::class_<Handover>(m, "RaceHandover")
      .def(pybind11::init())
      .def(
          "give", [](Handover& handover, const Devices& devices) { watch().give(handover, devices); },
          pybind11::arg("devices") = Devices())
      .def(
          "take", [](const Handover& handover, const Devices& devices) { watch().take(handover, devices); },
          pybind11::arg("devices") = Devices());
  m.def("begin_rank_thread", [](int rank) { watch().begin_rank(rank); });
  m.def("end_rank_thread", [] { watch().end_rank(); });
  m.def("rank_of_thread", [] { return watch().rank_of_thread(); });
  m.def("set_unobserved", &set_unobserved);
  m.def("use_tensors", &use);
}

} // namespace torch_ext::sim::races
