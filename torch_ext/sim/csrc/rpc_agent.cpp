// The RPC agent that carries device tensors.
//
// TensorPipe moves host and CUDA memory, and refuses any other device. This agent passes host tensors only:
//
//   sender    copies device tensors to the host, on its current streams, and appends a Trailer to the payload
//   receiver  removes the trailer and copies each tensor to the device that it names, on the streams of the request
//
// Both copies end before the message proceeds, so it holds the results of all work launched before the call. As with
// TensorPipe's own agent, the sender picks a tensor's destination: by its device map for a request, by the reverse of
// the caller's map for a response. TensorPipe's agent never sees the maps, but gives each request separate streams on
// the devices, and futures wait for those.
//
// Only requests to workers that the map names, which surely have this agent, carry a trailer, and their responses.
#include "bindings.h"

#ifdef SIM_HAS_RPC
// Torch's header is empty without it.
#define USE_TENSORPIPE

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "std.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

namespace rpc = torch::distributed::rpc;

using rpc::DeviceMap;
using rpc::JitFuture;
using rpc::Message;
using DeviceMaps = std::unordered_map<std::string, DeviceMap>;
using MessagePtr = c10::intrusive_ptr<Message>;
using MessageFuture = c10::intrusive_ptr<JitFuture>;

constexpr int16_t kHost = -1;

// Ends a payload, after an int16_t for each tensor: its destination device, or kHost.
struct Trailer {
  static constexpr uint64_t kMark = 0x6d69735f74786574;
  int64_t sender = 0;
  uint64_t mark = kMark;
};

// Replaces the tensors of `message` by host tensors and adds a trailer. Raises if the map lacks a device.
void pack(Message& message, const DeviceMap& map, const std::string& worker, int64_t sender) {
  auto& tensors = message.tensors();
  std::vector<int16_t> targets;
  targets.reserve(tensors.size());
  for (auto& tensor : tensors) {
    const auto place = map.find(tensor.device());
    TORCH_CHECK(
        tensor.is_cpu() || place != map.end(),
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending "
        "them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device "
        "mapping. ",
        message.isRequest() ? "Request" : "Response", " device mapping is not available for destination ", worker,
        " for device ", tensor.device(), " but received a tensor on that device.");
    const bool stays = place == map.end() || place->second.is_cpu();
    targets.push_back(stays ? kHost : static_cast<int16_t>(place->second.index()));
    tensor = tensor.to(at::kCPU);
  }
  auto& payload = message.payload();
  const auto append = [&payload](const void* data, size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    payload.insert(payload.end(), bytes, bytes + size);
  };
  append(targets.data(), targets.size() * sizeof(int16_t));
  const Trailer trailer{sender};
  append(&trailer, sizeof(trailer));
}

DeviceMap map_of(const DeviceMaps& maps, const std::string& worker) {
  const auto found = maps.find(worker);
  return found == maps.end() ? DeviceMap() : found->second;
}

// Reverses pack() at the receiver, on the current streams. Returns the sender; nothing if there is no trailer.
std::optional<int64_t> unpack(Message& message) {
  auto& payload = message.payload();
  auto& tensors = message.tensors();
  std::vector<int16_t> targets(tensors.size());
  const size_t listed = targets.size() * sizeof(int16_t);
  if (payload.size() < listed + sizeof(Trailer)) {
    return std::nullopt;
  }
  const size_t own = payload.size() - listed - sizeof(Trailer);
  Trailer trailer;
  std::memcpy(&trailer, payload.data() + own + listed, sizeof(Trailer));
  if (trailer.mark != Trailer::kMark) {
    return std::nullopt;
  }
  std::memcpy(targets.data(), payload.data() + own, listed);
  payload.resize(own);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (targets[i] != kHost) {
      tensors[i] = tensors[i].to(c10::Device(kSim, static_cast<c10::DeviceIndex>(targets[i])));
    }
  }
  return trailer.sender;
}

// Calls `act` with the message of a finished future, and passes it on; errors pass through.
template <typename Act>
MessageFuture then_with(const MessageFuture& future, Act act) {
  return future->then(
      [act = std::move(act)](JitFuture& done) {
        if (done.hasError()) {
          std::rethrow_exception(done.exception_ptr());
        }
        auto message = done.value().toCustomClass<Message>();
        act(*message);
        auto [value, storages] = rpc::withStorages(std::move(message));
        return std::make_tuple(c10::IValue(std::move(value)), std::move(storages));
      },
      at::AnyClassType::get());
}

// Torch's distributed engine would find a stream in the metadata of the node that gets the gradients of `request`, and
// treat it as CUDA's. The gradients are complete already.
void forget_streams(Message& request) {
  namespace autograd = torch::distributed::autograd;
  if (request.type() == rpc::MessageType::BACKWARD_AUTOGRAD_REQ) {
    const auto metadata = autograd::PropagateGradientsReq::fromMessage(request)->getAutogradMetadata();
    auto context = autograd::DistAutogradContainer::getInstance().retrieveContext(metadata.autogradContextId);
    context->retrieveSendFunction(metadata.autogradMessageId)->clear_input_metadata();
  }
}

// Answers requests: unpacks device tensors for torch's own callback, and packs those of the response.
class Callback final : public rpc::RequestCallbackImpl {
 public:
  explicit Callback(DeviceMaps reverse) : reverse_(std::move(reverse)) {}

  MessageFuture processMessage(Message& request, std::vector<c10::Stream> streams) const override {
    std::optional<int64_t> sender;
    {
      const c10::MultiStreamGuard guard(streams);
      sender = unpack(request);
      forget_streams(request);
    }
    auto response = RequestCallbackImpl::processMessage(request, std::move(streams));
    if (!sender.has_value()) {
      return response;
    }
    return then_with(response, [this, worker = *sender](Message& message) {
      if (message.tensors().empty()) {
        return;
      }
      const auto id = static_cast<rpc::worker_id_t>(worker);
      const auto name = rpc::RpcAgent::getCurrentRpcAgent()->getWorkerInfo(id).name_;
      pack(message, map_of(reverse_, name), name, /*sender=*/-1);
    });
  }

 private:
  const DeviceMaps reverse_; // by caller
};

class Agent final : public rpc::TensorPipeAgent {
 public:
  Agent(
      const c10::intrusive_ptr<c10d::Store>& store, std::string name, rpc::worker_id_t id, int world_size,
      const rpc::TensorPipeRpcBackendOptions& options, DeviceMaps reverse, std::vector<c10::Device> devices)
      : TensorPipeAgent(
            store, std::move(name), id, world_size, without_maps(options), {}, std::move(devices),
            std::make_unique<Callback>(std::move(reverse))),
        id_(id),
        maps_(options.deviceMaps) {}

  MessageFuture send(const rpc::WorkerInfo& to, MessagePtr message, float timeout, const DeviceMap& given) override {
    const bool has_map = !given.empty() || maps_.count(to.name_) != 0;
    if (has_map) {
      pack(*message, given.empty() ? map_of(maps_, to.name_) : given, to.name_, id_);
    }
    auto response = TensorPipeAgent::send(to, std::move(message), timeout, {});
    return has_map ? then_with(response, [](Message& answer) { unpack(answer); }) : response;
  }

  DeviceMap getDeviceMap(const rpc::WorkerInfo& to) const override { return map_of(maps_, to.name_); }

 private:
  static rpc::TensorPipeRpcBackendOptions without_maps(rpc::TensorPipeRpcBackendOptions options) {
    options.deviceMaps.clear();
    return options;
  }

  const rpc::worker_id_t id_;
  const DeviceMaps maps_; // by callee
};

} // namespace

void bind_rpc_agent(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("define_rpc_agent", [m]() mutable {
    py::class_<Agent, rpc::TensorPipeAgent, std::shared_ptr<Agent>>(m, "RpcAgent")
        .def(
            py::init([](const c10::intrusive_ptr<c10d::Store>& store, std::string name, rpc::worker_id_t id,
                        int world_size, const rpc::TensorPipeRpcBackendOptions& options, DeviceMaps reverse,
                        std::vector<c10::Device> devices) {
              const WithoutGil without;
              // The agent's threads may need the GIL to end.
              return std::shared_ptr<Agent>(
                  new Agent(store, std::move(name), id, world_size, options, std::move(reverse), std::move(devices)),
                  [](Agent* agent) {
                    const WithoutGil without;
                    delete agent;
                  });
            }));
  });
}

} // namespace torch_ext::sim

#else

namespace torch_ext::sim {

void bind_rpc_agent(pybind11::module_& /*m*/) {}

} // namespace torch_ext::sim
#endif
