// Makes and compares fingerprints, and finds the line of Python code that calls a collective, for messages.
#include "fingerprint.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/utils/pybind.h>

#include "../clock.h"
#include "../device.h"
#include "../host_tensors.h"
#include "../std.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

const char* reduction_name(int8_t reduction) {
  constexpr std::array<const char*, 9> kNames{
      "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return kNames[static_cast<size_t>(reduction)];
}

bool is_exchange(const Fingerprint& print) {
  return print.kind == static_cast<int8_t>(OpType::ALLTOALL);
}

std::string unequal_exchange(const std::vector<Participant>& ranks) {
  const size_t size = ranks.size();
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const auto sent = ranks[from].counts[to];
      const auto expected = ranks[to].counts[size + from];
      if (sent != expected) {
        return c10::str(
            "ranks disagree in the number of elements: ", ranks[from].who(), " sends ", sent, " to ", ranks[to].who(),
            ", which expects ", expected, ". ", ranks[from].who(), " called ", phrase(ranks[from]), "; ",
            ranks[to].who(), " called ", phrase(ranks[to]), ".");
      }
    }
  }
  return "";
}

std::string shared_device(const std::vector<Participant>& ranks) {
  std::array<const Participant*, 128> user{};
  for (const auto& participant : ranks) {
    if (participant.print->device < 0) {
      continue;
    }
    auto& earlier = user[static_cast<size_t>(participant.print->device)];
    if (earlier != nullptr) {
      return c10::str(
          earlier->who(), " and ", participant.who(), " both use ", kSimName, ":",
          static_cast<int>(participant.print->device), " in ", participant.print->name,
          "; give each rank of a group its own device with "
          "torch.sim.set_device, or, with --cuda-as-sim, by setting CUDA_VISIBLE_DEVICES in the program before its "
          "first use of a device.");
    }
    earlier = &participant;
  }
  return "";
}

constexpr int kFramesAtMost = 60;

std::string folder_of(const char* package) {
  auto path = pybind11::module_::import(package).attr("__file__").cast<std::string>();
  return path.substr(0, path.rfind('/') + 1);
}

// Whether a frame of `file` is torch's, the simulator's or the harness's, and not the user's. Torch's deprecated
// functions are wrapped in typing_extensions.
bool is_between(std::string_view file) {
  if (file.ends_with("/typing_extensions.py")) {
    return true;
  }
  // Never freed.
  static const auto* folders = new std::array{
      folder_of("torch"), folder_of("torch_ext.sim"), folder_of("torch_ext.world"), folder_of("torch_ext.faults")};
  return std::any_of(folders->begin(), folders->end(), [&](const std::string& folder) {
    return file.substr(0, folder.size()) == folder;
  });
}

void write_model(char* to, const Timing& timing) {
  copy_text(to, kNameBytes, timing.ready >= 0 ? clock::model() : "");
}

std::string unlike_models(const std::string& one, const char* model, const std::string& other, const char* its_model) {
  const bool differ = *model != '\0' && *its_model != '\0' && std::string_view(model) != its_model;
  return !differ
      ? ""
      : c10::str(
            "ranks have virtual time by different cost models: ", one, " by ", model, ", ", other, " by ", its_model,
            ". Give all ranks the same one.");
}

} // namespace

Counts counts_of(const Call& call) {
  switch (call.kind) {
    case OpType::ALLGATHER:
    case OpType::BROADCAST:
    case OpType::SCATTER:
      return numels(call.outputs);
    case OpType::ALLTOALL: {
      Counts counts = numels(call.inputs);
      const Counts received = numels(call.outputs);
      counts.insert(counts.end(), received.begin(), received.end());
      return counts;
    }
    default:
      return numels(call.inputs);
  }
}

Fingerprint fingerprint_of(const Call& call, const Counts& counts) {
  const auto& some = call.inputs.empty() ? call.outputs : call.inputs;
  Fingerprint print{};
  print.root = call.root;
  print.kind = static_cast<int8_t>(call.kind);
  print.reduction = call.reduction.has_value() ? static_cast<int8_t>(call.reduction->wanted()) : int8_t{-1};
  print.type = some.empty() ? int8_t{-1} : static_cast<int8_t>(some.front().scalar_type());
  print.device = static_cast<int8_t>(call.device);
  print.count_size = static_cast<uint32_t>(counts.size());
  copy_text(print.name, kNameBytes, call.name);
  copy_text(print.site, kSiteBytes, call.site);
  write_model(print.model, call.timing);
  return print;
}

void copy_text(char* to, size_t bytes, const std::string& text) {
  // The end of a path is more useful than its beginning.
  const size_t kept = std::min(text.size(), bytes - 1);
  std::memcpy(to, text.data() + text.size() - kept, kept);
  to[kept] = '\0';
}

std::string phrase(const Participant& participant) {
  const auto& print = *participant.print;
  std::string text = print.name;
  if (print.reduction >= 0) {
    text += c10::str("(", reduction_name(print.reduction), ")");
  }
  if (print.type >= 0) {
    const bool one = participant.counts.size() == 1;
    text += one
        ? c10::str(" of ", participant.counts.front())
        : c10::str(" of [", c10::Join(", ", participant.counts), "]");
    text += c10::str(" x ", c10::toString(static_cast<at::ScalarType>(print.type)));
  }
  if (print.root >= 0) {
    text += c10::str(", root ", print.root);
  }
  return print.site[0] == '\0' ? text : c10::str(text, " at ", print.site);
}

std::string difference(const Participant& one, const Participant& other) {
  const auto &a = *one.print, &b = *other.print;
  const char* what = a.kind != b.kind ? "the operation"
      : a.reduction != b.reduction    ? "the reduction"
      : a.root != b.root              ? "the root"
      : a.type != b.type              ? "the element type"
      : !is_exchange(a) && !std::ranges::equal(one.counts, other.counts)
      ? "the number of elements"
      : nullptr;
  if (what == nullptr) {
    const bool in_order = one.global_rank < other.global_rank;
    const auto &first = in_order ? one : other, &second = in_order ? other : one;
    return unlike_models(first.who(), first.print->model, second.who(), second.print->model);
  }
  return c10::str(
      "ranks disagree in ", what, ": ", one.who(), " called ", phrase(one), "; ", other.who(), " called ",
      phrase(other), ".");
}

Envelope envelope_of(const Call& send) {
  const auto& tensor = send.inputs.front();
  Envelope envelope{
      tensor.numel(),
      send.timing,
      send.turn,
      static_cast<uint32_t>(send.stamp.size()),
      static_cast<int8_t>(tensor.scalar_type()),
      {},
      {}};
  copy_text(envelope.site, kSiteBytes, send.site);
  write_model(envelope.model, send.timing);
  return envelope;
}

bool fits(const Envelope& sent, const Call& recv) {
  const auto& tensor = recv.outputs.front();
  return sent.elements == tensor.numel() && sent.type == static_cast<int8_t>(tensor.scalar_type());
}

std::exception_ptr fault_of(const Group& group, const Envelope& sent, const Call& recv) {
  const auto at = [](const std::string& place) { return place.empty() ? "" : " at " + place; };
  const std::string sender = group.called(recv.root);
  if (!fits(sent, recv)) {
    const auto& tensor = recv.outputs.front();
    return group.failure(
        c10::str(
            "ranks disagree in what is sent: ", sender, " called send of ", sent.elements, " x ",
            c10::toString(static_cast<at::ScalarType>(sent.type)), at(sent.site), "; ", group.called(group.rank),
            " called recv of ", tensor.numel(), " x ", c10::toString(tensor.scalar_type()), at(recv.site), "."));
  }
  char model[kNameBytes];
  write_model(model, recv.timing);
  if (auto unlike = unlike_models(sender, sent.model, group.called(group.rank), model); !unlike.empty()) {
    return group.failure(unlike);
  }
  const bool after_sends = sent.turn.blocking > 0 && recv.turn.blocking > sent.turn.opposite;
  if (!after_sends && sent.turn.opposite <= recv.turn.opposite) {
    return nullptr;
  }
  const char* first = after_sends ? "send" : "recv";
  const char* second = after_sends ? "recv" : "send";
  return group.failure(
      c10::str(
          "deadlock on a GPU: this rank called ", first, at(after_sends ? recv.blocking_site : recv.site), " before ",
          second, ", and ", sender, " as well, whose send is", at(sent.site),
          ". NCCL runs the transfers of two ranks one after the other, and a send of more than ", kBufferVariable, "=",
          bytes_that_nccl_buffers(),
          " bytes ends only when its recv begins. Pass both to "
          "torch.distributed.batch_isend_irecv, or let one of the two ranks call ",
          second, " first. TORCH_EXT_SIM_P2P=buffered allows it."));
}

std::string disagreement_of_all(const std::vector<Participant>& ranks) {
  auto message = shared_device(ranks);
  return message.empty() && is_exchange(*ranks.front().print) ? unequal_exchange(ranks) : message;
}

std::string site_of_call() {
  if (Py_IsInitialized() == 0) {
    return "";
  }
  pybind11::gil_scoped_acquire gil;
  const auto owned = [](auto* object) {
    return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(object));
  };
  PyFrameObject* frame = PyEval_GetFrame();
  pybind11::object keep; // the frame
  for (int depth = 0; frame != nullptr && depth < kFramesAtMost; ++depth) {
    const auto code = owned(PyFrame_GetCode(frame));
    const char* file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
    if (file == nullptr) {
      PyErr_Clear();
    } else if (!is_between(file)) {
      return std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    frame = PyFrame_GetBack(frame);
    keep = owned(frame);
  }
  return "";
}

} // namespace torch_ext::sim
