// Which transport a group gets, and what it is wrapped in.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport.h"

namespace torch_ext::sim {

// The one that the ranks agree on (Note [Agreeing on a transport]) and TORCH_EXT_SIM_TRANSPORT allows, behind the seams
// of seams.h. Blocks until all ranks are there. any_device: whether several ranks may use one device.
std::shared_ptr<Transport> make_transport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int64_t>& global_ranks,
    std::chrono::milliseconds timeout, bool any_device);

// Makes the gloo backend of a group: (store, rank, size, timeout) -> Backend, in Python, where gloo's constructor is.
void set_gloo_factory(const pybind11::function& factory);

} // namespace torch_ext::sim
