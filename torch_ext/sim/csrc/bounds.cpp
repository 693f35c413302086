#include "bounds.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "call_stack.h"

namespace torch_ext::sim {
namespace {

constexpr size_t kMostFrames = 12;
constexpr int kIllegalAddress = 700; // cudaErrorIllegalAddress

struct Shrunk {
  c10::DataPtr memory; // without any where the storage was freed
  CallStack by;
};

void drop_shrunk(void* context) {
  delete static_cast<Shrunk*>(context);
}

const Shrunk* shrunk_of(const c10::Storage& storage) {
  const auto& memory = storage.data_ptr();
  return memory.get_deleter() == &drop_shrunk ? static_cast<const Shrunk*>(memory.get_context()) : nullptr;
}

} // namespace

std::string why_too_small(const c10::Storage& storage) {
  const auto* shrunk = shrunk_of(storage);
  if (shrunk == nullptr) {
    return "";
  }
  const auto lines = lines_of(shrunk->by, kMostFrames);
  return (storage.nbytes() == 0 ? " freed by resize_(0)" : " made smaller by resize_") +
      (lines.empty() ? "" : " at" + lines);
}

void refuse_bounds(std::string_view kernel, const at::Tensor& tensor, std::string_view argument) {
  const auto why = why_too_small(tensor.storage());
  const auto named = argument.empty() ? std::string() : c10::str("argument '", argument, "', ");
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kIllegalAddress,
      c10::str(
          tensor.device().type(), " error: an illegal memory access was encountered: ", kernel, " uses ", named,
          c10::getDtypeNames(tensor.scalar_type()).first, " ", tensor.sizes(), " on ", tensor.device(),
          ", which reaches byte ", reach_of(tensor), " of a storage of ", tensor.storage().nbytes(), " bytes",
          why.empty() ? "" : ",", why));
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

} // namespace torch_ext::sim
