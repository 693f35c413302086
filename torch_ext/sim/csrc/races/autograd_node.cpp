#include "autograd_node.h"

#include <torch/csrc/autograd/function.h>

#include <mutex>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>

namespace torch_ext::sim::races {

const std::string* current_autograd_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return nullptr;
  }
  const auto& evaluated = *node;
  const std::type_index type = typeid(evaluated);
  if (std::string_view(type.name()).find("PyNode") != std::string_view::npos) {
    return nullptr; // and its name takes the GIL
  }
  static auto* mutex = new std::mutex();
  static auto* names = new std::unordered_map<std::type_index, std::string>();
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = names->find(type);
  return found != names->end() ? &found->second : &names->emplace(type, node->name()).first->second;
}

} // namespace torch_ext::sim::races
