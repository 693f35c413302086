// The process group backend `simccl`: collectives on device tensors.
//
// It hands aliases of its tensors (transport_view.h) to a transport, a gloo backend of the same group, and adds what
// NCCL offers and gloo lacks: reductions (reduction.h), element types, lists of unequal sizes, coalescing, splitting,
// futures that carry devices (sim_work.h). Each operation below checks its tensors when it is called and says how it
// starts; it does start in one place, see Note [Where operations start].
#include "simccl.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "device.h"
#include "launcher.h"
#include "reduction.h"
#include "sim_work.h"
#include "transport_view.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

// Torch before 2.13 has no name of its own for this operation.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
constexpr OpType kReduceScatterTensors = OpType::COALESCED;
#else
constexpr OpType kReduceScatterTensors = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

Tensors flatten(const TensorLists& lists) {
  Tensors flat;
  for (const auto& list : lists) {
    flat.insert(flat.end(), list.begin(), list.end());
  }
  return flat;
}

const at::Tensor& single(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "simccl expects one tensor for ", what, ", but got ", tensors.size(), ".");
  return tensors.front();
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "Expected as many outputs as inputs, but got ", outputs.size(), " and ",
      inputs.size(), ".");
}

bool same_sizes(const Tensors& tensors, const at::Tensor& like) {
  for (const auto& tensor : tensors) {
    if (tensor.numel() != like.numel()) {
      return false;
    }
  }
  return true;
}

std::vector<int64_t> numels(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.numel());
  }
  return sizes;
}

} // namespace

// Makes a transport for a group that is split off: (store, rank, size, timeout) -> Backend, in Python, where gloo's
// constructor is. Set once, never freed.
pybind11::object* transport_factory = nullptr;

class SimCCL final : public Launcher {
 public:
  // Copied by torch for each group that is split off.
  struct SimOptions final : c10d::Backend::Options {
    explicit SimOptions(std::chrono::milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}
  };

  // store: the group's, which its ranks share.
  SimCCL(
      c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Store> store,
      std::chrono::milliseconds timeout)
      : Launcher(std::move(transport)), store_(std::move(store)), options_(c10::make_intrusive<SimOptions>(timeout)) {
    init();
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    transport_->setTimeout(timeout);
  }
  void setGroupUid(const std::string& name) override {
    c10d::Backend::setGroupUid(name);
    transport_->setGroupUid(name);
  }
  void enableCollectivesTiming() override { transport_->enableCollectivesTiming(); }
  void shutdown() override { transport_->shutdown(); }
  c10d::ErrorType getError() override { return transport_->getError(); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    transport_->monitoredBarrier(options, wait_all_ranks);
  }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return at::empty({size}, options.has_device() ? options : options.device(c10::Device(kSim, current_device())));
  }

  // Called on every rank of this group, with the ranks of one part: a rank's own, or the first where it has none.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    // The store that torch hands over is named after the number of groups that this rank has, in which ranks may
    // differ. The number of splits of one group is the same on all of its ranks.
    const auto prefix = c10::str("split/", splits_++, "/", c10::Join("_", ranks), "/");
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      return nullptr;
    }
    const auto timeout = options != nullptr ? options->timeout : options_->timeout;
    auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
    pybind11::gil_scoped_acquire gil;
    auto part =
        (*transport_factory)(c10::intrusive_ptr<c10d::Store>(store), place - ranks.begin(), ranks.size(), timeout);
    return c10::make_intrusive<SimCCL>(part.cast<c10::intrusive_ptr<c10d::Backend>>(), store, timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(
        {OpType::BROADCAST, "broadcast", tensors, tensors,
         [=, this, hosts = Tensors{transport_view(single(tensors, "broadcast"))}]() mutable {
           return Started{{transport_->broadcast(hosts, options)}};
         }});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor host = checked_alias(single(tensors, "all_reduce"));
    const Reduction reduction(options.reduceOp, host.scalar_type(), size_);
    return launch(
        {OpType::ALLREDUCE, "all_reduce", tensors, tensors, [=, this] {
           const at::Tensor buffer = reduction.prepare(host);
           return Started{
               {reduce_everywhere(buffer, reduction, options.timeout)}, [=] { reduction.finish(buffer, host); }};
         }});
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return launch_parts(
        OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", tensors, tensors, tensors.size(), [=, this](size_t i) {
          Tensors one{tensors[i]};
          return allreduce(one, options);
        });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor host = checked_alias(single(tensors, "reduce"));
    return reduce_to(host, options.rootRank, options.reduceOp, options.timeout, host, tensors, tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const auto& input = single(inputs, "all_gather");
    TORCH_CHECK_VALUE(outputs.size() == 1, "simccl expects one list of outputs, but got ", outputs.size(), ".");
    if (!same_sizes(outputs.front(), input)) {
      return gather_unequal(outputs.front(), inputs, options.timeout);
    }
    return launch(
        {OpType::ALLGATHER, "all_gather", inputs, outputs.front(),
         [=, this, to = transport_view(outputs), from = transport_view(inputs)]() mutable {
           return Started{{transport_->allgather(to, from, options)}};
         }});
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(
        output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor, but got ",
        output.scalar_type(), " and ", input.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_,
        "output tensor size must be equal to world_size times input tensor size: got ", output.numel(), ", expected ",
        input.numel() * size_, ".");
    return launch(
        {OpType::_ALLGATHER_BASE,
         "_all_gather_base",
         {input},
         {output},
         [=, this, to = transport_view(output), from = transport_view(input)]() mutable {
           return Started{{transport_->_allgather_base(to, from, options)}};
         }});
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    // outputs[r][i] receives inputs[i] of rank r
    return launch_parts(
        OpType::ALLGATHER_COALESCED, "all_gather_coalesced", inputs, flatten(outputs), inputs.size(),
        [=, this](size_t i) {
          TensorLists column(1);
          for (const auto& of_rank : outputs) {
            column.front().push_back(of_rank.at(i));
          }
          Tensors one{inputs[i]};
          return allgather(column, one, options);
        });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check_pairs(outputs, inputs);
    return launch_parts(
        OpType::COALESCED, "all_gather_into_tensor_coalesced", inputs, outputs, inputs.size(), [=, this](size_t i) {
          at::Tensor output = outputs[i], input = inputs[i];
          return _allgather_base(output, input, options);
        });
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch(
        {OpType::GATHER, "gather", inputs, outputs.empty() ? inputs : flatten(outputs),
         [=, this, to = transport_view(outputs), from = transport_view(inputs)]() mutable {
           return Started{{transport_->gather(to, from, options)}};
         }});
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return launch(
        {OpType::SCATTER, "scatter", flatten(inputs), outputs,
         [=, this, to = transport_view(outputs), from = transport_view(inputs)]() mutable {
           return Started{{transport_->scatter(to, from, options)}};
         }});
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    const at::Tensor host_output = checked_alias(single(outputs, "reduce_scatter"));
    TORCH_CHECK_VALUE(
        inputs.size() == 1 && inputs.front().size() == static_cast<size_t>(size_),
        "simccl expects one list with a tensor for each of the ", size_, " ranks.");
    const Tensors& parts = inputs.front();
    TORCH_CHECK_VALUE(
        parts[rank_].numel() == host_output.numel(), "The output has ", host_output.numel(),
        " elements, but this rank's input has ", parts[rank_].numel(), ".");
    return launch_parts(OpType::REDUCE_SCATTER, "reduce_scatter", parts, outputs, parts.size(), [=, this](size_t root) {
      const Tensors result = root == static_cast<size_t>(rank_) ? outputs : Tensors();
      return reduce_to(
          checked_alias(parts[root]), static_cast<int64_t>(root), options.reduceOp, options.timeout, host_output,
          {parts[root]}, result, /*keep_input=*/true);
    });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const at::Tensor host_input = checked_alias(input);
    const at::Tensor host_output = checked_alias(output);
    TORCH_CHECK_VALUE(
        input.scalar_type() == output.scalar_type(),
        "input tensor must be the same type as the output tensor, but got ", input.scalar_type(), " and ",
        output.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        host_input.numel() == host_output.numel() * size_,
        "input tensor must be the same size as output size times world size: got ", host_input.numel(), ", expected ",
        host_output.numel() * size_, ".");
    const Reduction reduction(options.reduceOp, host_input.scalar_type(), size_);
    return launch(
        {OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base", {input}, {output}, [=, this] {
           const at::Tensor buffer = reduction.prepare_copy(host_input);
           return Started{
               {reduce_everywhere(buffer, reduction, options.timeout)}, [=, this] {
                 const at::Tensor own = buffer.contiguous().view({size_, -1}).select(0, rank_);
                 finish_into(host_output, own, reduction);
               }};
         }});
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check_pairs(outputs, inputs);
    return launch_parts(
        kReduceScatterTensors, "reduce_scatter_tensor_coalesced", inputs, outputs, inputs.size(), [=, this](size_t i) {
          at::Tensor output = outputs[i], input = inputs[i];
          return _reduce_scatter_base(output, input, options);
        });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    return launch(
        {OpType::ALLTOALL_BASE,
         "all_to_all",
         {input},
         {output},
         [=, this, to = transport_rows(output), from = transport_rows(input)]() mutable {
           auto to_splits = transport_splits(output_splits, output, to);
           auto from_splits = transport_splits(input_splits, input, from);
           return Started{{transport_->alltoall_base(to, from, to_splits, from_splits, options)}};
         }});
  }

  // The transport takes one tensor a side, which is cut by element counts.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto group = static_cast<size_t>(size_);
    TORCH_CHECK_VALUE(
        outputs.size() == group && inputs.size() == group, "all_to_all expects a tensor for each of the ", size_,
        " ranks, but got ", outputs.size(), " outputs and ", inputs.size(), " inputs.");
    return launch(
        {OpType::ALLTOALL, "all_to_all", inputs, outputs,
         [=, this, to = transport_view(outputs), from = transport_view(inputs)] {
           auto to_splits = numels(to);
           auto from_splits = numels(from);
           at::Tensor flat_from = at::cat(from);
           at::Tensor flat_to =
               at::empty({std::accumulate(to_splits.begin(), to_splits.end(), int64_t{0})}, flat_from.options());
           return Started{
               {transport_->alltoall_base(flat_to, flat_from, to_splits, from_splits, options)}, [=] {
                 const auto parts = flat_to.split_with_sizes(numels(to));
                 for (size_t i = 0; i < parts.size(); ++i) {
                   to[i].copy_(parts[i]);
                 }
               }};
         }});
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return launch(
        {OpType::SEND, "send", tensors, tensors, [=, this, hosts = one_alias(tensors, "send")]() mutable {
           return Started{{transport_->send(hosts, destination, tag)}};
         }});
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return launch(
        {OpType::RECV, "recv", {}, tensors, [=, this, hosts = one_alias(tensors, "recv")]() mutable {
           return Started{{transport_->recv(hosts, source, tag)}};
         }});
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return launch(
        {OpType::RECVANYSOURCE, "recv", {}, tensors, [=, this, hosts = one_alias(tensors, "recv")]() mutable {
           return Started{{transport_->recvAnysource(hosts, tag)}};
         }});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return launch({OpType::BARRIER, "barrier", {}, {}, [=, this] { return Started{{transport_->barrier(options)}}; }});
  }

 private:
  static Tensors one_alias(const Tensors& tensors, const char* what) { return {checked_alias(single(tensors, what))}; }

  WorkPtr reduce_everywhere(const at::Tensor& buffer, const Reduction& reduction, std::chrono::milliseconds timeout) {
    c10d::AllreduceOptions options;
    options.reduceOp = reduction.transport_op();
    options.timeout = timeout;
    Tensors hosts{buffer};
    return transport_->allreduce(hosts, options);
  }

  // Reduces `host` over the group into `target` of rank `root`. Elsewhere nothing is written: the transport uses other
  // ranks' buffers for partial results, so they get a copy.
  WorkPtr reduce_to(
      const at::Tensor& host, int64_t root, const c10d::ReduceOp& op, std::chrono::milliseconds timeout,
      const at::Tensor& target, const Tensors& inputs, const Tensors& outputs, bool keep_input = false) {
    const Reduction reduction(op, host.scalar_type(), size_);
    return launch(
        {OpType::REDUCE, "reduce", inputs, outputs, [=, this] {
           const bool is_root = root == rank_;
           const at::Tensor buffer = is_root && !keep_input ? reduction.prepare(host) : reduction.prepare_copy(host);
           c10d::ReduceOptions options;
           options.reduceOp = reduction.transport_op();
           options.rootRank = root;
           options.timeout = timeout;
           Tensors hosts{buffer};
           return Started{
               {transport_->reduce(hosts, options)}, [=] {
                 if (is_root) {
                   finish_into(target, buffer, reduction);
                 }
               }};
         }});
  }

  static void finish_into(const at::Tensor& target, const at::Tensor& reduced, const Reduction& reduction) {
    const at::Tensor shaped = target.is_complex() ? at::view_as_real(target) : target;
    reduction.finish(reduced.view(shaped.sizes()), target);
  }

  // Every rank broadcasts its part, since the transport gathers equal sizes only.
  WorkPtr gather_unequal(Tensors& outputs, const Tensors& inputs, std::chrono::milliseconds timeout) {
    TORCH_CHECK_VALUE(
        outputs.size() == static_cast<size_t>(size_), "all_gather expects an output for each of the ", size_,
        " ranks, but got ", outputs.size(), ".");
    return launch_parts(OpType::ALLGATHER, "all_gather", inputs, outputs, outputs.size(), [=, this](size_t root) {
      Tensors one{outputs[root]};
      if (root == static_cast<size_t>(rank_)) {
        one.front().copy_(inputs.front());
      }
      c10d::BroadcastOptions options;
      options.rootRank = static_cast<int64_t>(root);
      options.timeout = timeout;
      return broadcast(one, options);
    });
  }

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<SimOptions> options_;
  int splits_ = 0;
};

void bind_simccl(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("set_transport_factory", [](const py::function& factory) { transport_factory = new py::object(factory); });
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>> backend(m, "ProcessGroupSimCCL");
  py::class_<SimCCL::SimOptions, c10d::Backend::Options, c10::intrusive_ptr<SimCCL::SimOptions>>(backend, "Options")
      .def("__deepcopy__", [](const SimCCL::SimOptions& self, const py::dict& /*memo*/) {
        return c10::make_intrusive<SimCCL::SimOptions>(self);
      });
  backend
      .def(
          py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>, std::chrono::milliseconds>(),
          py::arg("transport"), py::arg("store"), py::arg("timeout"))
      .def_property_readonly("options", &SimCCL::getBackendOptions)
      // Ranks outside a new group take part in its creation with backends that must be split by all; ours need not.
      .def("perform_nocolor_split", [](SimCCL& /*self*/, const c10::Device& /*device*/) {});
}

} // namespace torch_ext::sim
