#include "choice.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../without_gil.h"
#include "fold.h"
#include "gloo.h"
#include "rendezvous.h"
#include "seams.h"
#include "shared_memory.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

std::string setting(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

pybind11::object* gloo_factory = nullptr; // set once, never freed

} // namespace

void set_gloo_factory(const pybind11::function& factory) {
  gloo_factory = new pybind11::object(factory);
}

std::shared_ptr<Transport> make_transport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int64_t>& global_ranks,
    std::chrono::milliseconds timeout, bool any_device) {
  WithoutGil without;
  const auto kind = setting("TORCH_EXT_SIM_TRANSPORT");
  TORCH_CHECK_VALUE(
      kind.empty() || kind == "shared" || kind == "gloo", "TORCH_EXT_SIM_TRANSPORT=", kind,
      ": expected shared or gloo.");
  const auto order = setting("TORCH_EXT_SIM_REDUCE");
  const int size = static_cast<int>(global_ranks.size());
  auto members = meet(store, rank, size, timeout, kind != "gloo", "TORCH_EXT_SIM_REDUCE=" + order);
  if (!members.empty()) {
    return with_seams(
        std::make_shared<SharedMemory>(
            std::move(members), rank, global_ranks, FoldOrder::parse(order), timeout, any_device));
  }
  TORCH_CHECK(
      kind != "shared",
      "TORCH_EXT_SIM_TRANSPORT=shared, but the ranks of this group "
      "cannot map one another's memory: they "
      "run on several hosts, in several containers or as several "
      "users. Unset it to use gloo there.");
  pybind11::gil_scoped_acquire gil;
  auto made = (*gloo_factory)(store, rank, size, timeout);
  return with_seams(
      std::make_shared<Gloo>(made.cast<c10::intrusive_ptr<c10d::Backend>>(), global_ranks, timeout, any_device));
}

} // namespace torch_ext::sim
