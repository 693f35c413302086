#include "generated.h"

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <string>

#include "kernel.h"

namespace torch_ext::sim {
namespace {

// roles: a letter for each argument: r is read, w written, and anything else a number.
pybind11::object run_generated(
    const pybind11::function& code, const std::string& name, const std::string& roles,
    const pybind11::args& arguments) {
  TORCH_INTERNAL_ASSERT(roles.size() == arguments.size(), name, " was generated with other arguments");
  Kernel kernel(name);
  for (size_t i = 0; i < roles.size(); ++i) {
    if (roles[i] == 'r' || roles[i] == 'w') {
      const auto tensor = arguments[i].cast<at::Tensor>();
      const bool is_number = tensor.device().type() == c10::DeviceType::CPU && tensor.dim() == 0;
      if (!is_number) {
        roles[i] == 'w' ? kernel.writes(tensor) : kernel.reads(tensor);
      }
    }
  }
  kernel.launch();
  return code(*arguments);
}

} // namespace

void bind_generated(pybind11::module_& m) {
  m.def("run_generated", &run_generated);
}

} // namespace torch_ext::sim
