// What Python tells the checker where ranks are threads of one process.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_ext::sim::races {

void bind_rank_threads(pybind11::module& m);

} // namespace torch_ext::sim::races
