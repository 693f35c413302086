// Note [Reads by Python methods]
// These methods are C functions in torch's method tables, and call no operator that a RecordFunction would see. While a
// check runs, wrappers that report to the check replace them in the tables. So Python's objects
// (`torch.Tensor.tolist`) stay the same, there is no cost without a check, and no way of calling is missed.
//
// `numpy` and DLPack export memory, whose later accesses cannot be observed. An export counts as a read of all of it.
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../allocator.h"
#include "../checks.h"
#include "../device.h"
#include "../kernel.h"
#include "../kernel_observer.h"
#include "../pinned_memory.h"
#include "../std.h"
#include "watch.h"

namespace torch_ext::sim::races {
namespace {

using Accesses = c10::SmallVector<sim::Access, 4>;

at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// Whether the operator itself touches memory. An operator composed of others has no host kernel.
bool is_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.operator_name().name == "aten::copy_";
}

// Whether the operator's stream, and not the host, reads its host inputs.
bool transfers(std::string_view name) {
  return name.find("copy") != std::string_view::npos || name.starts_with("c10d::");
}

// The access to `tensor`; none if its memory is not pinned.
std::optional<sim::Access> pinned_access(const at::Tensor& tensor, bool write) {
  const bool may_be = tensor.is_cpu() && tensor.has_storage();
  return may_be && pinned_block_at(tensor.storage().data()) ? access_to(tensor, write) : std::nullopt;
}

// Whether resize_ with these arguments moves the tensor to larger memory.
bool outgrows_its_memory(c10::ArrayRef<const c10::IValue> arguments) {
  const at::Tensor& tensor = arguments[0].toTensor();
  const auto elements = tensor.storage_offset() + c10::multiply_integers(arguments[1].toIntVector());
  return static_cast<size_t>(elements) * tensor.itemsize() > tensor.storage().nbytes();
}

std::unique_ptr<at::ObserverContext> entering(const at::RecordFunction& function) {
  if (pinned_blocks_made() == 0 || running_kernel.device >= 0 || is_unobserved) {
    return nullptr;
  }
  const auto inputs = function.inputs();
  const auto schema = function.operator_schema();
  if (!schema.has_value() || inputs.size() != schema->arguments().size()) {
    return nullptr;
  }
  Accesses accesses;
  bool is_of_device = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (alias != nullptr && !write) {
      continue; // the result is a view of this input
    }
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      is_of_device = is_of_device || (tensor.defined() && tensor.device().type() == kSim);
      if (const auto access = tensor.defined() ? pinned_access(tensor, write) : std::nullopt) {
        accesses.push_back(*access);
      }
    });
  }
  const auto name = function.operator_name();
  if (accesses.empty() || !name.has_value() || (is_of_device && transfers(name->name))) {
    return nullptr;
  }
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  if (!op.has_value() || !is_kernel(*op)) {
    return nullptr;
  }
  if (op->hasTag(at::Tag::inplace_view)) {
    // It writes to the tensor, and not to its memory: a schema does not tell them apart.
    if (name->name != "aten::resize_" || !outgrows_its_memory(inputs)) {
      return nullptr;
    }
    accesses.front().write = false;
  }
  watch().host_used(name->name, accesses);
  return nullptr;
}

struct Method {
  const char* name;
  bool of_tensor; // otherwise a function of torch._C, whose first argument is the tensor
  PyMethodDef* place = nullptr;
  PyCFunction original = nullptr;
};

std::array<Method, 4> methods{
    {{"tolist", true}, {"numpy", true}, {"_to_dlpack", false}, {"_to_dlpack_versioned", false}}};

// The calls of these methods in this thread: __torch_function__ calls a subclass's method again. Only the outermost one
// reports.
thread_local int depth = 0;

void report_read(std::string_view name, PyObject* object) try {
  if (pinned_blocks_made() == 0 || depth > 0 || object == nullptr || !THPVariable_Check(object)) {
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (const auto access = pinned_access(tensor, /*write=*/false)) {
    watch().host_used(name, *access);
  }
} catch (const c10::Error&) {
  // Wrapper tensors have no memory, and raise when asked for its address.
  return;
}

template <typename Function, typename... Rest>
PyObject* call_and_report(const Method& method, PyObject* first, PyObject* self, Rest... arguments) {
  ++depth;
  PyObject* result = reinterpret_cast<Function>(reinterpret_cast<void (*)()>(method.original))(self, arguments...);
  --depth;
  if (result != nullptr) {
    report_read(method.name, method.of_tensor ? self : first);
  }
  return result;
}

template <size_t which>
PyObject* call_with_two(PyObject* self, PyObject* argument) {
  return call_and_report<PyCFunction>(methods[which], argument, self, argument);
}

template <size_t which>
PyObject* call_with_keywords(PyObject* self, PyObject* arguments, PyObject* keywords) {
  PyObject* first = PyTuple_GET_SIZE(arguments) > 0 ? PyTuple_GET_ITEM(arguments, 0) : nullptr;
  return call_and_report<PyCFunctionWithKeywords>(methods[which], first, self, arguments, keywords);
}

// The method's entry in torch's table; nullptr if this release has no such method.
PyMethodDef* place_of(const Method& method) {
  PyObject* owner = method.of_tensor ? THPVariableClass : PyImport_AddModule("torch._C");
  PyObject* found = owner == nullptr ? nullptr : PyObject_GetAttrString(owner, method.name);
  PyErr_Clear();
  PyMethodDef* place = nullptr;
  if (found != nullptr && method.of_tensor && Py_IS_TYPE(found, &PyMethodDescr_Type)) {
    place = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
  } else if (found != nullptr && !method.of_tensor && PyCFunction_Check(found)) {
    place = reinterpret_cast<PyCFunctionObject*>(found)->m_ml;
  }
  Py_XDECREF(found); // torch keeps it
  return place;
}

template <size_t which>
void exchange() {
  Method& method = methods[which];
  method.place = place_of(method);
  if (method.place == nullptr) {
    return;
  }
  method.original = method.place->ml_meth;
  switch (method.place->ml_flags & ~(METH_CLASS | METH_STATIC | METH_COEXIST)) {
    case METH_NOARGS:
    case METH_O:
      method.place->ml_meth = &call_with_two<which>;
      break;
    case METH_VARARGS | METH_KEYWORDS:
      method.place->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_with_keywords<which>));
      break;
    default:
      method.place = nullptr;
  }
}

} // namespace

void begin_host_reads() {
  callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&entering).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  exchange<0>();
  exchange<1>();
  exchange<2>();
  exchange<3>();
}

void end_host_reads() {
  for (Method& method : methods) {
    if (method.place != nullptr) {
      method.place->ml_meth = method.original;
    }
    method.place = nullptr;
  }
  at::removeCallback(callback);
}

} // namespace torch_ext::sim::races
