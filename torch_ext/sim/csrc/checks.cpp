// Note [Strict devices]
// Since device memory is host memory, a kernel would mix host and device tensors, and hide the bugs that tests look
// for. So every operator that reaches the fallback checks its devices first, with the exceptions of GPUs: a
// zero-dimensional host tensor may be read (it is a number), and index tensors may live on the host.
#include "checks.h"

#include <ATen/core/enum_tag.h>

#include "device.h"
#include "memory_history.h"
#include "std.h"
#include "symmetric_memory.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kFramesOfShrinking = 12;
constexpr int kIllegalAddress = 700; // cudaErrorIllegalAddress

struct Shrunk {
  c10::DataPtr memory; // null if the storage was freed
  CallStack by;
};

void drop_shrunk(void* context) {
  delete static_cast<Shrunk*>(context);
}

const Shrunk* shrunk_of(const c10::Storage& storage) {
  const auto& memory = storage.data_ptr();
  return memory.get_deleter() == &drop_shrunk ? static_cast<const Shrunk*>(memory.get_context()) : nullptr;
}

// Operators whose tensor lists are indices or lengths, which GPUs accept from the host.
constexpr std::array<std::string_view, 8> kHostIndexOperators{
    "aten::index",     "aten::_unsafe_index",      "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_",   "aten::_unsafe_index_put",
    "aten::_ctc_loss", "aten::_ctc_loss_backward",
};

// Operators whose CUDA kernel reads on the host whether it has failed, or values; others do so by an operator that
// their kernels for CUDA and sim call alike. See the notes on synchronization in the documentation of torch.linalg.
constexpr std::array<std::string_view, 11> kReadingOperators{
    "aten::_linalg_eigh",      "aten::_linalg_eigvals", "aten::_linalg_svd",       "aten::cholesky",
    "aten::cholesky_inverse",  "aten::linalg_eig",      "aten::linalg_eigvals",    "aten::linalg_pinv",
    "aten::embedding_renorm_", "aten::linalg_lstsq",    "aten::linalg_matrix_exp",
};

// Operators that read values on the host if an argument is a tensor of the device, or false. `histc` looks for the
// extremes where both bounds are equal.
struct Conditional {
  std::string_view name;
  size_t position;
};
constexpr std::array<Conditional, 7> kConditional{{
    {"aten::histc", 2},       // min
    {"aten::index_fill_", 3}, // value
    {"aten::masked_fill_", 2},
    {"aten::multinomial", 2},    // replacement
    {"aten::normal", 1},         // std
    {"aten::searchsorted", 5},   // sorter
    {"aten::segment_reduce", 6}, // unsafe
}};

bool reads_by(const c10::IValue& argument, const c10::IValue& next) {
  if (argument.isTensor()) {
    return argument.toTensor().defined() && argument.toTensor().device().type() == kSim;
  }
  return argument.isBool() ? !argument.toBool() : argument.isScalar() && next.isScalar() && argument == next;
}

bool holds_tensors(const c10::Argument& value) {
  return value.real_type()->str().find("Tensor") != std::string::npos;
}

OperatorFacts work_out(const c10::OperatorHandle& op) {
  OperatorFacts facts;
  const auto& schema = op.schema();
  facts.name = schema.operator_name().name;
  facts.refusals = refusals_of(facts.name);
  facts.host_indices = std::ranges::count(kHostIndexOperators, facts.name) > 0;
  facts.is_indexing = facts.host_indices && facts.name.find("index") != std::string::npos;
  // Code for every device gets here only if it is registered for this device by name.
  facts.has_host_kernel = op.hasKernelForAnyDispatchKey(c10::DispatchKeySet(c10::DispatchKey::CPU)) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    facts.written.push_back(alias != nullptr && alias->isWrite());
    facts.is_view = facts.is_view || (alias != nullptr && !alias->isWrite());
    if (arguments[i].real_type()->str().find("Generator") != std::string::npos) {
      facts.generator = static_cast<int>(i);
    }
    facts.may_convert = facts.may_convert || arguments[i].name() == "dtype";
    if (arguments[i].name() == "check_errors") {
      facts.check_errors = static_cast<int>(i);
    }
  }
  if (const auto* found = std::ranges::find(kConditional, facts.name, &Conditional::name);
      found != kConditional.end()) {
    facts.reads_by = static_cast<int>(found->position);
  }
  facts.is_view = facts.is_view || op.hasTag(at::Tag::inplace_view) || facts.name == "aten::is_set_to";
  const auto& returns = schema.returns();
  for (const auto& value : returns) {
    facts.fresh.push_back(value.alias_info() == nullptr);
    facts.makes_results = facts.makes_results || (value.alias_info() == nullptr && holds_tensors(value));
  }
  facts.host_reads = (op.hasTag(at::Tag::dynamic_output_shape) && !facts.is_indexing) ||
      op.hasTag(at::Tag::data_dependent_output) || std::ranges::count(kReadingOperators, facts.name) > 0 ||
      (!returns.empty() && std::none_of(returns.begin(), returns.end(), &holds_tensors));
  return facts;
}

// Whether the operator is an optimizer's fused step, which reads its learning rate, of one element, on the host.
bool is_fused_step(std::string_view name) {
  return name.rfind("aten::_fused_", 0) == 0 && name.back() == '_';
}

// Whether `tensor` may be on the host.
bool may_stay(const OperatorFacts& facts, const at::Tensor& tensor, size_t position, bool in_list) {
  return tensor.is_cpu() && !facts.written[position] &&
      (tensor.dim() == 0 || (facts.host_indices && (in_list || !facts.is_indexing)) ||
       (tensor.numel() == 1 && !in_list && is_fused_step(facts.name)));
}

} // namespace

std::string why_too_small(const c10::Storage& storage) {
  const auto* shrunk = shrunk_of(storage);
  if (shrunk == nullptr) {
    return "";
  }
  const auto lines = lines_of(shrunk->by, kFramesOfShrinking);
  return (storage.nbytes() == 0 ? " freed by resize_(0)" : " made smaller by resize_") +
      (lines.empty() ? "" : " at" + lines);
}

void refuse_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument) {
  const auto why = why_too_small(tensor.storage());
  const auto gone = symmetric::why_gone(tensor.storage().data());
  const auto named = argument.empty() ? std::string() : c10::str("argument '", argument, "', ");
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kIllegalAddress,
      c10::str(
          tensor.device().type(), " error: an illegal memory access was encountered: ", kernel, " uses ", named,
          c10::getDtypeNames(tensor.scalar_type()).first, " ", tensor.sizes(), " on ", tensor.device(),
          gone.empty()
              ? c10::str(
                    ", which reaches byte ", reach_of(tensor), " of a storage of ", tensor.storage().nbytes(), " bytes",
                    why.empty() ? "" : ",", why)
              : c10::str(", which lies in ", gone)));
}

c10::DataPtr note_shrinking(c10::DataPtr memory) {
  auto stack = current_call_stack();
  if (stack == nullptr) {
    return memory;
  }
  void* data = memory.get();
  const auto device = memory.device();
  auto note = std::make_unique<Shrunk>(Shrunk{std::move(memory), std::move(stack)});
  return {data, note.release(), &drop_shrunk, device};
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  // Per thread, so that operators need no lock. A schema may be freed and another one made at the same address
  // (libraries defined in Python are destroyed), hence the comparison of names.
  thread_local std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorFacts>> known;
  const auto& schema = op.schema();
  auto& slot = known[&schema];
  const bool stale = slot == nullptr || slot->name != schema.operator_name().name ||
      slot->written.size() != schema.arguments().size() || !slot->has_host_kernel;
  if (stale) {
    slot = std::make_unique<OperatorFacts>(work_out(op));
  }
  return *slot;
}

c10::DeviceIndex common_device(
    const OperatorFacts& facts, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> common;
  std::optional<std::pair<c10::Device, size_t>> foreign;
  std::optional<c10::DeviceIndex> named;
  bool has_tensor = false;
  const auto refuse = [&](c10::Device other, size_t position) {
    const auto& argument = schema.arguments()[position].name();
    refuse_devices(*common, other, argument, facts.name);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      has_tensor = true;
      if (!tensor.defined()) {
        return;
      }
      if (!facts.is_view) {
        check_bounds(facts.name, tensor, schema.arguments()[i].name());
      }
      const auto device = tensor.device();
      if (device.type() != kSim) {
        if (!foreign.has_value() && !may_stay(facts, tensor, i, /*in_list=*/!value.isTensor())) {
          foreign = {device, i};
        }
      } else if (!common.has_value()) {
        common = device;
      } else if (device != *common) {
        refuse(device, i);
      }
    });
    if (value.isDevice() && value.toDevice().type() == kSim) {
      named = checked_index(value.toDevice());
    }
  }
  if (common.has_value()) {
    if (foreign.has_value()) {
      refuse(foreign->first, foreign->second);
    }
    return common->index();
  }
  // Without tensors, only the device's generator leads the dispatcher here.
  TORCH_CHECK(
      !has_tensor || facts.generator < 0, "Expected a 'cpu' device type for generator but found '", kSimName,
      "'"); // as host kernels say
  return named.value_or(current_device());
}

// As on GPUs, an indexing operator waits only for a mask, whose true elements the host counts, and for host indices,
// which it copies to the device. Neither happens when one mask selects the elements to fill with one number.
bool host_waits(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  constexpr size_t kIndices = 1, kValues = 2, kAccumulate = 3;
  if (facts.name == "aten::repeat_interleave") {
    return arguments.size() < 2 || !arguments[1].isInt(); // with that, the size of the output is known
  }
  if (!facts.is_indexing) {
    const auto at = static_cast<size_t>(facts.reads_by);
    return facts.host_reads || (facts.check_errors >= 0 && arguments[facts.check_errors].toBool()) ||
        (facts.reads_by >= 0 && reads_by(arguments[at], at + 1 < arguments.size() ? arguments[at + 1] : c10::IValue()));
  }
  size_t masks = 0, others = 0;
  bool moves = false;
  for (const c10::IValue& element : arguments[kIndices].toListRef()) {
    if (element.isTensor() && element.toTensor().defined()) {
      const auto& index = element.toTensor();
      const bool is_mask = index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte;
      ++(is_mask ? masks : others);
      moves = moves || index.is_cpu();
    }
  }
  const bool writes = arguments.size() > kAccumulate;
  const bool fills = writes && masks == 1 && others == 0 && !arguments[kAccumulate].toBool() &&
      arguments[kValues].toTensor().numel() == 1;
  // Torch leaves a number of the program on the host only where the device's name is CUDA's.
  const bool reads_number = fills && kIsCuda && !arguments[kValues].toTensor().is_cpu();
  return moves || reads_number || (!fills && (masks > 0 || (writes && arguments[kValues].toTensor().is_cpu())));
}

void refuse_devices(c10::Device common, c10::Device other, std::string_view argument, std::string_view name) {
  C10_THROW_ERROR(
      Error,
      c10::str(
          "Expected all tensors to be on the same device, but got ", argument, " is on ", other,
          ", different from other tensors on ", common, " (when checking argument in method ", name, ")"));
}

void refuse_sparse(const c10::OperatorHandle& op) {
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str(
          "The operator '", toString(op.operator_name()), "' is not implemented for tensors of a sparse layout on the ",
          "device sim. Use dense ones (.to_dense()), or compute on the host (.cpu())."));
}

} // namespace torch_ext::sim
