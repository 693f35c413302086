// The process group backend `simccl`: collectives on device tensors.
//
// It hands aliases of its tensors to a transport, a gloo backend of the same group, and adds what NCCL offers and gloo
// lacks: reductions (reduction.h), element types, lists of unequal sizes, coalescing, splitting, futures that carry
// devices. Threading: as every c10d backend, one object is driven by one thread at a time; works may be waited for
// anywhere.
#include "simccl.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>

#include "alias.h"
#include "allocator.h"
#include "reduction.h"
#include "sim_work.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

// Torch before 2.13 has no name of its own for this operation.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
constexpr OpType kReduceScatterTensors = OpType::COALESCED;
#else
constexpr OpType kReduceScatterTensors = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

at::Tensor checked_alias(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == kSim, "simccl works on sim tensors, but got a tensor on ", tensor.device(),
      ". Use a group with a backend for that device, such as 'cpu:gloo,sim:simccl'.");
  TORCH_CHECK(tensor.layout() == at::kStrided, "simccl works on dense tensors, but got layout ", tensor.layout(), ".");
  at::Tensor alias = host_alias(tensor.is_conj() ? tensor.conj() : tensor);
  // Dense in another order than row-major is fine as long as every rank has the same order: NCCL allows it too. The
  // transport does not look, and would run past what a tensor with holes covers.
  TORCH_CHECK_VALUE(
      alias.is_non_overlapping_and_dense(), "Tensors must be contiguous, but got sizes ", alias.sizes(), " with strides ",
      alias.strides(), ".");
  return alias.is_contiguous() ? alias : alias.as_strided({alias.numel()}, {1});
}

// For transfers that do not compute, element types that the transport does not know travel as bytes. Keeps dimension 0
// of tensors with more than one, whose rows may be split.
at::Tensor movable_rows(const at::Tensor& tensor) {
  at::Tensor alias = checked_alias(tensor);
  switch (alias.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return alias;
    default:
      return (alias.dim() == 0 ? alias.view({1}) : alias).view(at::kByte);
  }
}

// In one dimension, since only the number of elements has to agree between ranks.
at::Tensor movable(const at::Tensor& tensor) {
  return movable_rows(tensor).view({-1});
}

Tensors movable(const Tensors& tensors) {
  Tensors aliases;
  aliases.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    aliases.push_back(movable(tensor));
  }
  return aliases;
}

TensorLists movable(const TensorLists& lists) {
  TensorLists aliases;
  for (const auto& list : lists) {
    aliases.push_back(movable(list));
  }
  return aliases;
}

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

bool same_sizes(const Tensors& tensors, const at::Tensor& like) {
  for (const auto& tensor : tensors) {
    if (tensor.numel() != like.numel()) {
      return false;
    }
  }
  return true;
}

} // namespace

// Makes a transport for a group that is split off: (store, rank, size, timeout) -> Backend, in Python, where gloo's
// constructor is. Set once, never freed.
pybind11::object* transport_factory = nullptr;

class SimCCL final : public c10d::Backend {
 public:
  // Copied by torch for each group that is split off.
  struct SimOptions final : c10d::Backend::Options {
    explicit SimOptions(std::chrono::milliseconds timeout) : c10d::Backend::Options("simccl", timeout) {}
  };

  SimCCL(c10::intrusive_ptr<c10d::Backend> transport, std::chrono::milliseconds timeout)
      : c10d::Backend(transport->getRank(), transport->getSize()),
        transport_(std::move(transport)),
        options_(c10::make_intrusive<SimOptions>(timeout)) {
    init();
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    transport_->setTimeout(timeout);
  }
  // The flight recorder's entries are the transport's.
  void setGroupUid(const std::string& name) override {
    c10d::Backend::setGroupUid(name);
    transport_->setGroupUid(name);
  }
  // Counts collectives, so that the ranks of a group agree on it: the transport counts what it carries, transfers between
  // two ranks and the parts of a collective among it.
  void setSequenceNumberForGroup() override { sequence_ = 0; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void enableCollectivesTiming() override { transport_->enableCollectivesTiming(); }
  void abort() override { transport_->abort(); }
  void shutdown() override { transport_->shutdown(); }
  c10d::ErrorType getError() override { return transport_->getError(); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    transport_->monitoredBarrier(options, wait_all_ranks);
  }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return at::empty({size}, options.has_device() ? options : options.device(c10::Device(kSim, current_device())));
  }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      return nullptr;
    }
    const auto timeout = options != nullptr ? options->timeout : options_->timeout;
    pybind11::gil_scoped_acquire gil;
    auto part = (*transport_factory)(store, place - ranks.begin(), ranks.size(), timeout);
    return c10::make_intrusive<SimCCL>(part.cast<c10::intrusive_ptr<c10d::Backend>>(), timeout);
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "startCoalescing was called twice without endCoalescing in between.");
    coalescing_ = true;
    ++sequence_;
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "endCoalescing was called without startCoalescing.");
    coalescing_ = false;
    return together(OpType::COALESCED, std::exchange(coalesced_, {}), /*may_transfer=*/true);
  }

  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = std::move(hook);
  }
  void waitForPendingWorks() override {
    for (const auto& work : std::exchange(pending_, {})) {
      work->wait();
    }
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors hosts{movable(single(tensors, "broadcast"))};
    return start(OpType::BROADCAST, {transport_->broadcast(hosts, options)}, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor host = checked_alias(single(tensors, "all_reduce"));
    const Reduction reduction(options.reduceOp, host.scalar_type(), size_);
    const at::Tensor buffer = reduction.prepare(host);
    return start(OpType::ALLREDUCE, {reduce_everywhere(buffer, reduction, options.timeout)}, tensors, [=] {
      reduction.finish(buffer, host);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    const OneCollective one_collective(*this);
    std::vector<WorkPtr> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, options));
    }
    return together(OpType::ALLREDUCE_COALESCED, std::move(works));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor host = checked_alias(single(tensors, "reduce"));
    return reduce_to(host, options.rootRank, options.reduceOp, options.timeout, host, tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const auto& input = single(inputs, "all_gather");
    TORCH_CHECK_VALUE(outputs.size() == 1, "simccl expects one list of outputs, but got ", outputs.size(), ".");
    if (!same_sizes(outputs.front(), input)) {
      return gather_unequal(outputs.front(), input, options.timeout);
    }
    auto host_outputs = movable(outputs);
    auto host_inputs = movable(inputs);
    return start(OpType::ALLGATHER, {transport_->allgather(host_outputs, host_inputs, options)}, flatten(outputs));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(
        output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor, but got ",
        output.scalar_type(), " and ", input.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_,
        "output tensor size must be equal to world_size times input tensor size: got ", output.numel(), ", expected ",
        input.numel() * size_, ".");
    at::Tensor host_output = movable(output);
    at::Tensor host_input = movable(input);
    return start(
        OpType::_ALLGATHER_BASE, {transport_->_allgather_base(host_output, host_input, options)}, {output});
  }

  WorkPtr allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    // outputs[r][i] receives inputs[i] of rank r
    const OneCollective one_collective(*this);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      TensorLists column(1);
      for (const auto& of_rank : outputs) {
        column.front().push_back(of_rank.at(i));
      }
      Tensors one{inputs[i]};
      works.push_back(allgather(column, one, options));
    }
    return together(OpType::ALLGATHER_COALESCED, std::move(works));
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "Expected as many outputs as inputs, but got ", outputs.size(),
                      " and ", inputs.size(), ".");
    const OneCollective one_collective(*this);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(_allgather_base(outputs[i], inputs[i], options));
    }
    return together(OpType::COALESCED, std::move(works));
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host_outputs = movable(outputs);
    auto host_inputs = movable(inputs);
    return start(
        OpType::GATHER, {transport_->gather(host_outputs, host_inputs, options)},
        outputs.empty() ? inputs : flatten(outputs));
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto host_outputs = movable(outputs);
    auto host_inputs = movable(inputs);
    return start(OpType::SCATTER, {transport_->scatter(host_outputs, host_inputs, options)}, outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto& output = single(outputs, "reduce_scatter");
    TORCH_CHECK_VALUE(
        inputs.size() == 1 && inputs.front().size() == static_cast<size_t>(size_),
        "simccl expects one list with a tensor for each of the ", size_, " ranks.");
    const at::Tensor host_output = checked_alias(output);
    const OneCollective one_collective(*this);
    std::vector<WorkPtr> works;
    for (int root = 0; root < size_; ++root) {
      const at::Tensor host_input = checked_alias(inputs.front()[root]);
      TORCH_CHECK_VALUE(
          root != rank_ || host_input.numel() == host_output.numel(), "The output has ", host_output.numel(),
          " elements, but this rank's input has ", host_input.numel(), ".");
      const Tensors result = root == rank_ ? outputs : Tensors();
      works.push_back(reduce_to(host_input, root, options.reduceOp, options.timeout, host_output, result, true));
    }
    return together(OpType::REDUCE_SCATTER, std::move(works));
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const at::Tensor host_input = checked_alias(input);
    const at::Tensor host_output = checked_alias(output);
    TORCH_CHECK_VALUE(
        input.scalar_type() == output.scalar_type(), "input tensor must be the same type as the output tensor, but got ",
        input.scalar_type(), " and ", output.scalar_type(), ".");
    TORCH_CHECK_VALUE(
        host_input.numel() == host_output.numel() * size_,
        "input tensor must be the same size as output size times world size: got ", host_input.numel(), ", expected ",
        host_output.numel() * size_, ".");
    const Reduction reduction(options.reduceOp, host_input.scalar_type(), size_);
    const at::Tensor buffer = reduction.prepare_copy(host_input);
    return start(
        OpType::_REDUCE_SCATTER_BASE, {reduce_everywhere(buffer, reduction, options.timeout)}, {output}, [=, this] {
          const at::Tensor own = buffer.contiguous().view({size_, -1}).select(0, rank_);
          const at::Tensor target = host_output.is_complex() ? at::view_as_real(host_output) : host_output;
          reduction.finish(own.view(target.sizes()), host_output);
        });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "Expected as many outputs as inputs, but got ", outputs.size(),
                      " and ", inputs.size(), ".");
    const OneCollective one_collective(*this);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    }
    return together(kReduceScatterTensors, std::move(works));
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    at::Tensor host_output = movable_rows(output);
    at::Tensor host_input = movable_rows(input);
    return start(
        OpType::ALLTOALL_BASE,
        {transport_->alltoall_base(
            host_output, host_input, scaled(output_splits, output, host_output),
            scaled(input_splits, input, host_input), options)},
        {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto group = static_cast<size_t>(size_);
    TORCH_CHECK_VALUE(
        outputs.size() == group && inputs.size() == group, "all_to_all expects a tensor for each of the ", size_,
        " ranks, but got ", outputs.size(), " outputs and ", inputs.size(), " inputs.");
    Tensors sent, received;
    std::vector<int64_t> sent_sizes, received_sizes;
    for (size_t i = 0; i < group; ++i) {
      sent.push_back(movable(inputs[i]));
      received.push_back(movable(outputs[i]));
      sent_sizes.push_back(sent.back().numel());
      received_sizes.push_back(received.back().numel());
    }
    at::Tensor flat_sent = at::cat(sent);
    int64_t total = 0;
    for (const auto numel : received_sizes) {
      total += numel;
    }
    at::Tensor flat_received = at::empty({total}, flat_sent.options());
    return start(
        OpType::ALLTOALL,
        {transport_->alltoall_base(flat_received, flat_sent, received_sizes, sent_sizes, options)}, outputs, [=] {
          const auto parts = flat_received.split_with_sizes(received_sizes);
          for (size_t i = 0; i < parts.size(); ++i) {
            at::Tensor target = received[i];
            target.copy_(parts[i]);
          }
        });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    Tensors hosts{checked_alias(single(tensors, "send"))};
    return untracked(OpType::SEND, {transport_->send(hosts, destination, tag)}, tensors);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    Tensors hosts{checked_alias(single(tensors, "recv"))};
    return untracked(OpType::RECV, {transport_->recv(hosts, source, tag)}, tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Tensors hosts{checked_alias(single(tensors, "recv"))};
    return untracked(OpType::RECVANYSOURCE, {transport_->recvAnysource(hosts, tag)}, tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(OpType::BARRIER, {transport_->barrier(options)}, {});
  }

 private:
  // While it lives, what is started are parts of one collective, which has one sequence number.
  class OneCollective {
   public:
    explicit OneCollective(SimCCL& group) : group_(group) {
      if (group_.parts_of_one_++ == 0 && !group_.coalescing_) {
        ++group_.sequence_;
      }
    }
    ~OneCollective() { --group_.parts_of_one_; }
    OneCollective(const OneCollective&) = delete;
    OneCollective& operator=(const OneCollective&) = delete;

   private:
    SimCCL& group_;
  };

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
      const at::Tensor& target, const Tensors& outputs, bool keep_input = false) {
    const Reduction reduction(op, host.scalar_type(), size_);
    const bool is_root = root == rank_;
    const at::Tensor buffer = is_root && !keep_input ? reduction.prepare(host) : reduction.prepare_copy(host);
    c10d::ReduceOptions options;
    options.reduceOp = reduction.transport_op();
    options.rootRank = root;
    options.timeout = timeout;
    Tensors hosts{buffer};
    return start(OpType::REDUCE, {transport_->reduce(hosts, options)}, outputs, [=] {
      if (is_root) {
        const at::Tensor shaped = target.is_complex() ? at::view_as_real(target) : target;
        reduction.finish(buffer.view(shaped.sizes()), target);
      }
    });
  }

  // Every rank broadcasts its part, since the transport gathers equal sizes only.
  WorkPtr gather_unequal(Tensors& outputs, const at::Tensor& input, std::chrono::milliseconds timeout) {
    TORCH_CHECK_VALUE(
        outputs.size() == static_cast<size_t>(size_), "all_gather expects an output for each of the ", size_,
        " ranks, but got ", outputs.size(), ".");
    const OneCollective one_collective(*this);
    outputs[rank_].copy_(input);
    std::vector<WorkPtr> works;
    for (int root = 0; root < size_; ++root) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.timeout = timeout;
      Tensors one{outputs[root]};
      works.push_back(broadcast(one, options));
    }
    return together(OpType::ALLGATHER, std::move(works));
  }

  // Splits count rows; where rows travel as bytes of a one-dimensional tensor they count bytes instead.
  std::vector<int64_t>& scaled(std::vector<int64_t>& splits, const at::Tensor& tensor, const at::Tensor& host) {
    if (tensor.dim() > 0 && host.size(0) != tensor.size(0) && tensor.size(0) > 0) {
      for (auto& split : splits) {
        split *= host.size(0) / tensor.size(0);
      }
    }
    return splits;
  }

  WorkPtr start(
      OpType kind, std::vector<WorkPtr> transport, Tensors outputs, std::function<void()> finish = nullptr) {
    if (parts_of_one_ == 0 && !coalescing_) {
      ++sequence_;
    }
    auto work = make(kind, std::move(transport), std::move(outputs), std::move(finish));
    work->set_hook(onCompletionHook_);
    work->track();
    return remember(work);
  }

  WorkPtr untracked(OpType kind, std::vector<WorkPtr> transport, Tensors outputs) {
    auto work = make(kind, std::move(transport), std::move(outputs), nullptr);
    work->set_hook(onCompletionHook_);
    return remember(work);
  }

  // One work for several of ours. It completes when they have; where they may be point-to-point transfers, only when
  // somebody asks: see Note [When a simccl work is done].
  WorkPtr together(OpType kind, std::vector<WorkPtr> works, bool may_transfer = false) {
    Tensors outputs;
    for (const auto& work : works) {
      for (const auto& tensor : work->result()) {
        outputs.push_back(tensor);
      }
    }
    auto work = make(kind, std::move(works), std::move(outputs), nullptr);
    if (!may_transfer) {
      work->track();
    }
    return work;
  }

  c10::intrusive_ptr<SimWork> make(
      OpType kind, std::vector<WorkPtr> transport, Tensors outputs, std::function<void()> finish) {
    return c10::make_intrusive<SimWork>(
        kind, rank_, std::move(transport), std::move(outputs), std::move(finish), sequence_);
  }

  WorkPtr remember(const c10::intrusive_ptr<SimWork>& work) {
    if (coalescing_) {
      coalesced_.push_back(work);
    }
    if (onCompletionHook_) {
      // The hook hears of works, too, that nobody else holds on to.
      std::erase_if(pending_, [](const auto& earlier) { return earlier->is_over(); });
      pending_.push_back(work);
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> transport_;
  c10::intrusive_ptr<SimOptions> options_;
  uint64_t sequence_ = 0;
  int parts_of_one_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  std::vector<c10::intrusive_ptr<SimWork>> pending_; // with a hook only
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
          py::init<c10::intrusive_ptr<c10d::Backend>, std::chrono::milliseconds>(), py::arg("transport"),
          py::arg("timeout"))
      .def_property_readonly("options", &SimCCL::getBackendOptions)
      // Ranks outside a new group take part in its creation with backends that must be split by all; ours need not.
      .def("perform_nocolor_split", [](SimCCL& /*self*/, const c10::Device& /*device*/) {});
}

} // namespace torch_ext::sim
