// The process group backend `simccl`: collectives on device tensors.
//
// Each operation checks its tensors when it is called and describes itself as one or more Calls (transport/transport.h)
// on aliases of their memory. They start in one place, see Note [Where operations start]; a transport carries them.
#include "simccl.h"

#include <cstddef>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "launcher.h"
#include "reduction.h"
#include "sim_work.h"
#include "stream.h"
#include "transport/choice.h"
#include "transport/seams.h"
#include "transport/transport.h"
#include "transport_view.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

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

} // namespace

class SimCCL final : public Launcher {
 public:
  // Copied by torch for each group that is split off.
  struct SimOptions final : c10d::Backend::Options {
    explicit SimOptions(std::chrono::milliseconds timeout, bool any_device)
        : c10d::Backend::Options("simccl", timeout), any_device(any_device) {}
    const bool any_device;
  };

  // store: the group's, which its ranks share. any_device: whether several ranks may use one device. Blocks until all
  // ranks are there.
  SimCCL(
      c10::intrusive_ptr<c10d::Store> store, int rank, const std::vector<int64_t>& global_ranks,
      std::chrono::milliseconds timeout, bool any_device)
      : Launcher(
            make_transport(store, rank, global_ranks, timeout, any_device), rank,
            static_cast<int>(global_ranks.size())),
        store_(std::move(store)),
        options_(c10::make_intrusive<SimOptions>(timeout, any_device)) {
    options_->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
    init();
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  std::string transport_kind() const { return transport_->kind(); }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    transport_->set_timeout(timeout);
  }
  void setGroupUid(const std::string& name) override {
    c10d::Backend::setGroupUid(name);
    transport_->set_name(name);
  }
  void enableCollectivesTiming() override {}

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
    std::vector<int64_t> global_ranks;
    global_ranks.reserve(ranks.size());
    for (const int member : ranks) {
      global_ranks.push_back(static_cast<int64_t>(options_->global_ranks_in_group[static_cast<size_t>(member)]));
    }
    return c10::make_intrusive<SimCCL>(
        c10::make_intrusive<c10d::PrefixStore>(prefix, store_), static_cast<int>(place - ranks.begin()), global_ranks,
        timeout, options_->any_device);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Call call{OpType::BROADCAST, "broadcast"};
    call.outputs = {transport_view(single(tensors, "broadcast"), call.name)};
    call.root = checked_root(options.rootRank);
    if (call.root == rank_) {
      call.inputs = call.outputs;
    }
    return launch_one(std::move(call), "broadcast", tensors, tensors, options);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch_one(
        all_reduce_of(single(tensors, "all_reduce"), "all_reduce", options), "all_reduce", tensors, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    constexpr const char* kName = "allreduce_coalesced";
    std::vector<Call> calls;
    calls.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      calls.push_back(all_reduce_of(tensor, kName, options));
    }
    return launch({OpType::ALLREDUCE_COALESCED, kName, tensors, tensors, options.asyncOp, std::move(calls)});
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Call call{OpType::REDUCE, "reduce"};
    call.inputs = {transport_view(single(tensors, "reduce"), call.name)};
    call.root = checked_root(options.rootRank);
    if (call.root == rank_) {
      call.outputs = call.inputs;
    }
    call.reduction = reduction_of(options.reduceOp, tensors.front());
    return launch_one(std::move(call), "reduce", tensors, tensors, options);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == 1, "simccl expects one list of outputs, but got ", outputs.size(), ".");
    return launch_one(
        all_gather_of(outputs.front(), single(inputs, "all_gather"), "all_gather"), "all_gather", inputs,
        outputs.front(), options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch_one(
        whole_gather_of(output, input, "_all_gather_base"), "_all_gather_base", {input}, {output}, options,
        OpType::_ALLGATHER_BASE);
  }

  // outputs[r][i] receives inputs[i] of rank r.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    constexpr const char* kName = "all_gather_coalesced";
    std::vector<Call> calls;
    calls.reserve(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors column;
      for (const auto& of_rank : outputs) {
        column.push_back(of_rank.at(i));
      }
      calls.push_back(all_gather_of(column, inputs[i], kName));
    }
    return launch(
        {OpType::ALLGATHER_COALESCED, kName, inputs, flatten(outputs), options.asyncOp,
         with_timeout(std::move(calls), options.timeout)});
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    constexpr const char* kName = "all_gather_into_tensor_coalesced";
    check_pairs(outputs, inputs);
    std::vector<Call> calls;
    calls.reserve(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(whole_gather_of(outputs[i], inputs[i], kName));
    }
    return launch(
        {OpType::COALESCED, kName, inputs, outputs, options.asyncOp, with_timeout(std::move(calls), options.timeout)});
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Call call{OpType::GATHER, "gather"};
    call.inputs = {transport_view(single(inputs, "gather"), call.name)};
    call.root = checked_root(options.rootRank);
    check_list(outputs, call.root, "gather", "output", inputs.front());
    call.outputs = transport_view(flatten(outputs), call.name);
    return launch_one(std::move(call), "gather", inputs, outputs.empty() ? inputs : flatten(outputs), options);
  }

  // Torch 2.15 calls it, and older releases do not declare it.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
    constexpr const char* kName = "gather_single";
    const int root = checked_root(options.rootRank);
    Call call = root == rank_ ? whole_gather_of(output, input, kName) : Call{OpType::GATHER, kName};
    call.kind = OpType::GATHER;
    call.inputs = {transport_view(input, call.name)};
    call.root = root;
    const Tensors outputs = root == rank_ ? Tensors{output} : Tensors{input};
    return launch_one(std::move(call), kName, {input}, outputs, options);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    Call call{OpType::SCATTER, "scatter"};
    call.outputs = {transport_view(single(outputs, "scatter"), call.name)};
    call.root = checked_root(options.rootRank);
    check_list(inputs, call.root, "scatter", "input", outputs.front());
    call.inputs = transport_view(flatten(inputs), call.name);
    return launch_one(std::move(call), "scatter", flatten(inputs), outputs, options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto& output = single(outputs, "reduce_scatter");
    TORCH_CHECK_VALUE(
        inputs.size() == 1 && inputs.front().size() == static_cast<size_t>(size_),
        "simccl expects one list with a tensor for each of the ", size_, " ranks.");
    const Tensors& parts = inputs.front();
    check_types(parts, output);
    TORCH_CHECK_VALUE(
        parts[rank_].numel() == output.numel(), "The output has ", output.numel(),
        " elements, but this rank's input has ", parts[rank_].numel(), ".");
    Call call{OpType::REDUCE_SCATTER, "reduce_scatter"};
    call.inputs = transport_view(parts, call.name);
    call.outputs = {transport_view(output, call.name)};
    call.reduction = reduction_of(options.reduceOp, output);
    return launch_one(std::move(call), "reduce_scatter", parts, outputs, options);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    constexpr const char* kName = "_reduce_scatter_base";
    return launch_one(whole_scatter_of(output, input, kName, options), kName, {input}, {output}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    constexpr const char* kName = "reduce_scatter_tensor_coalesced";
    check_pairs(outputs, inputs);
    std::vector<Call> calls;
    calls.reserve(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(whole_scatter_of(outputs[i], inputs[i], kName, options));
    }
    return launch(
        {OpType::REDUCE_SCATTER_TENSOR_COALESCED, kName, inputs, outputs, options.asyncOp,
         with_timeout(std::move(calls), options.timeout)});
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check_types({input}, output);
    Call call{OpType::ALLTOALL, "all_to_all"};
    call.inputs = transport_rows(input, input_splits, size_, call.name);
    call.outputs = transport_rows(output, output_splits, size_, call.name);
    return launch_one(std::move(call), "all_to_all", {input}, {output}, options, OpType::ALLTOALL_BASE);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto group = static_cast<size_t>(size_);
    TORCH_CHECK_VALUE(
        outputs.size() == group && inputs.size() == group, "all_to_all expects a tensor for each of the ", size_,
        " ranks, but got ", outputs.size(), " outputs and ", inputs.size(), " inputs.");
    check_types(inputs, outputs.front());
    check_types(outputs, outputs.front());
    Call call{OpType::ALLTOALL, "all_to_all"};
    call.inputs = transport_view(inputs, call.name);
    call.outputs = transport_view(outputs, call.name);
    return launch_one(std::move(call), "all_to_all", inputs, outputs, options);
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    Call call{OpType::SEND, "send"};
    call.inputs = {transport_view(single(tensors, "send"), call.name)};
    return launch_transfer(std::move(call), "send", tensors, tensors, checked_root(destination), tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    Call call{OpType::RECV, "recv"};
    call.outputs = {transport_view(single(tensors, "recv"), call.name)};
    return launch_transfer(std::move(call), "recv", {}, tensors, checked_root(source), tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Call call{OpType::RECVANYSOURCE, "recv"};
    call.outputs = {transport_view(single(tensors, "recv"), call.name)};
    return launch_transfer(std::move(call), "recv", {}, tensors, -1, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return launch_one({OpType::BARRIER, "barrier"}, "barrier", {}, {}, options);
  }

 private:
  template <typename Options>
  WorkPtr launch_one(
      Call call, const char* name, const Tensors& inputs, const Tensors& outputs, const Options& options,
      std::optional<OpType> kind = std::nullopt) {
    call.timeout = options.timeout;
    const OpType known_as = kind.value_or(call.kind);
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    return launch({known_as, name, inputs, outputs, options.asyncOp, std::move(calls)});
  }

  WorkPtr launch_transfer(
      Call call, const char* name, const Tensors& inputs, const Tensors& outputs, int peer, int tag) {
    call.root = peer;
    call.tag = tag;
    const OpType kind = call.kind;
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    return launch({kind, name, inputs, outputs, /*asynchronous=*/true, std::move(calls)});
  }

  static std::vector<Call> with_timeout(std::vector<Call> calls, std::chrono::milliseconds timeout) {
    for (auto& call : calls) {
      call.timeout = timeout;
    }
    return calls;
  }

  int checked_root(int64_t rank) const {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < size_, "Invalid rank ", rank, ": expected one of the ", size_, " ranks of the group.");
    return static_cast<int>(rank);
  }

  Reduction reduction_of(const c10d::ReduceOp& wanted, const at::Tensor& tensor) const {
    return {wanted, tensor.scalar_type(), size_};
  }

  Call all_reduce_of(const at::Tensor& tensor, const char* name, const c10d::AllreduceOptions& options) const {
    Call call{OpType::ALLREDUCE, name};
    call.inputs = {transport_view(tensor, call.name)};
    call.outputs = call.inputs;
    call.reduction = reduction_of(options.reduceOp, tensor);
    call.timeout = options.timeout;
    return call;
  }

  Call all_gather_of(const Tensors& outputs, const at::Tensor& input, const char* name) const {
    TORCH_CHECK_VALUE(
        outputs.size() == static_cast<size_t>(size_), "all_gather expects an output for each of the ", size_,
        " ranks, but got ", outputs.size(), ".");
    check_types(outputs, input);
    TORCH_CHECK_VALUE(
        outputs[rank_].numel() == input.numel(), "The input has ", input.numel(),
        " elements, but the output for this rank has ", outputs[rank_].numel(), ".");
    Call call{OpType::ALLGATHER, name};
    call.inputs = {transport_view(input, call.name)};
    call.outputs = transport_view(outputs, call.name);
    return call;
  }

  Call whole_gather_of(const at::Tensor& output, const at::Tensor& input, const char* name) const {
    TORCH_CHECK_VALUE(
        output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor, but got ",
        output.scalar_type(), " and ", input.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_,
        "output tensor size must be equal to world_size times input tensor size: got ", output.numel(), ", expected ",
        input.numel() * size_, ".");
    Call call{OpType::ALLGATHER, name};
    call.inputs = {transport_view(input, call.name)};
    call.outputs = transport_parts(output, size_, call.name);
    return call;
  }

  Call whole_scatter_of(
      const at::Tensor& output, const at::Tensor& input, const char* name,
      const c10d::ReduceScatterOptions& options) const {
    TORCH_CHECK_VALUE(
        input.scalar_type() == output.scalar_type(),
        "input tensor must be the same type as the output tensor, but got ", input.scalar_type(), " and ",
        output.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        input.numel() == output.numel() * size_,
        "input tensor must be the same size as output size times world size: got ", input.numel(), ", expected ",
        output.numel() * size_, ".");
    Call call{OpType::REDUCE_SCATTER, name};
    call.inputs = transport_parts(input, size_, call.name);
    call.outputs = {transport_view(output, call.name)};
    call.reduction = reduction_of(options.reduceOp, output);
    call.timeout = options.timeout;
    return call;
  }

  static void check_types(const Tensors& tensors, const at::Tensor& like) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(
          tensor.scalar_type() == like.scalar_type(), "Tensors of one call must have one type, but got ",
          tensor.scalar_type(), " and ", like.scalar_type(), ".");
    }
  }

  // What the root of a gather or scatter has and nobody else: a tensor for each rank, alike in type and size.
  void check_list(
      const TensorLists& lists, int root, const char* name, const char* what, const at::Tensor& like) const {
    const bool is_root = root == rank_;
    const size_t expected = is_root ? static_cast<size_t>(size_) : 0;
    const size_t given = lists.empty() ? 0 : lists.front().size();
    TORCH_CHECK_VALUE(
        lists.size() <= 1 && given == expected, name, " expects ", expected, " ", what, " tensors on rank ", rank_,
        is_root ? ", the root," : ", which is not the root,", " but got ", given, ".");
    for (size_t i = 0; i < given; ++i) {
      const auto& tensor = lists.front()[i];
      TORCH_CHECK(
          tensor.numel() == like.numel(), name, ": invalid tensor size at index ", i, " (expected (",
          c10::Join(", ", like.sizes()), "), got (", c10::Join(", ", tensor.sizes()), "))");
    }
    if (given > 0) {
      check_types(lists.front(), like);
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<SimOptions> options_;
  int splits_ = 0;
};

void bind_simccl(pybind11::module_& m) {
  namespace py = pybind11;
  set_settle(settle_collectives);
  m.def("set_gloo_factory", [](const py::function& factory) { set_gloo_factory(factory); });
  m.def("operations_launched_on_devices", &operations_launched_on_devices);
  bind_seams(m);
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>> backend(m, "ProcessGroupSimCCL");
  py::class_<SimCCL::SimOptions, c10d::Backend::Options, c10::intrusive_ptr<SimCCL::SimOptions>>(backend, "Options")
      .def("__deepcopy__", [](const SimCCL::SimOptions& self, const py::dict& /*memo*/) {
        return c10::make_intrusive<SimCCL::SimOptions>(self);
      });
  backend
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, const std::vector<int64_t>& global_ranks,
                      std::chrono::milliseconds timeout, bool any_device) {
            return c10::make_intrusive<SimCCL>(std::move(store), rank, global_ranks, timeout, any_device);
          }),
          py::arg("store"), py::arg("rank"), py::arg("global_ranks"), py::arg("timeout"), py::arg("any_device") = false,
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &SimCCL::getBackendOptions)
      .def_property_readonly("transport", &SimCCL::transport_kind)
      // Ranks outside a new group take part in its creation with backends that must be split by all; ours need not.
      .def("perform_nocolor_split", [](SimCCL& /*self*/, const c10::Device& /*device*/) {});
}

} // namespace torch_ext::sim
