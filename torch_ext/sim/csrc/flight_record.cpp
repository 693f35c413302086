#include "flight_record.h"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "without_gil.h"

namespace torch_ext::sim {
namespace {

struct Record {
  std::mutex mutex;
  std::deque<RecordedOperation> operations;
};

Record& the_record() {
  static auto* made = new Record();
  return *made;
}

// As torch's recorder reads its own size.
size_t capacity() {
  constexpr int kDefault = 2000;
  static const int entries = c10d::getCvarInt({"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, kDefault);
  return static_cast<size_t>(std::max(entries, 0));
}

pybind11::list sizes_of(const std::vector<Shape>& shapes) {
  pybind11::list sizes;
  for (const auto& shape : shapes) {
    sizes.append(shape.sizes);
  }
  return sizes;
}

pybind11::list types_of(const std::vector<Shape>& shapes) {
  pybind11::list types;
  for (const auto& shape : shapes) {
    types.append(c10::toString(shape.type));
  }
  return types;
}

// As keywords of RecordedOperation in _flight_record.py.
pybind11::dict as_dict(const RecordedOperation& operation) {
  using namespace pybind11::literals;
  return pybind11::dict(
      "name"_a = operation.name, "group"_a = operation.group, "description"_a = operation.description,
      "sequence"_a = operation.sequence, "input_sizes"_a = sizes_of(operation.inputs),
      "input_dtypes"_a = types_of(operation.inputs), "output_sizes"_a = sizes_of(operation.outputs),
      "output_dtypes"_a = types_of(operation.outputs), "begun_ns"_a = operation.progress->begun(),
      "finished_ns"_a = operation.progress->finished());
}

int64_t wall_clock() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

} // namespace

Progress::Progress(const std::vector<std::shared_ptr<Transfer>>& transfers)
    : begun_(wall_clock()), transfers_(transfers.begin(), transfers.end()) {}

void Progress::finish() {
  int64_t never = 0;
  finished_.compare_exchange_strong(never, wall_clock());
}

int64_t Progress::finished() {
  const auto is_over = [](const std::weak_ptr<Transfer>& weak) {
    const auto transfer = weak.lock();
    return transfer == nullptr || transfer->advance();
  };
  if (finished_ == 0 && std::all_of(transfers_.begin(), transfers_.end(), is_over)) {
    finish();
  }
  return finished_;
}

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Shape> shapes;
  shapes.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    shapes.push_back({tensor.sizes().vec(), tensor.scalar_type()});
  }
  return shapes;
}

void record_operation(RecordedOperation operation) {
  auto& kept = the_record();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.operations.push_back(std::move(operation));
  while (kept.operations.size() > capacity()) {
    kept.operations.pop_front();
  }
}

void bind_flight_record(pybind11::module_& m) {
  m.def("recorded_operations", [] {
    std::vector<RecordedOperation> operations;
    {
      auto& kept = the_record();
      std::lock_guard<std::mutex> lock(kept.mutex);
      operations.assign(kept.operations.begin(), kept.operations.end());
    }
    {
      WithoutGil without;
      for (const auto& operation : operations) {
        operation.progress->finished();
      }
    }
    pybind11::list dicts;
    for (const auto& operation : operations) {
      dicts.append(as_dict(operation));
    }
    return dicts;
  });
}

} // namespace torch_ext::sim
