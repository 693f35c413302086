// What the flight recorder's entries of a transport stand for.
//
// Note [Flight records]
// Torch's recorder accepts entries from torch's own backends only. Of `simccl` over shared memory it sees nothing. Of
// `simccl` over gloo it sees what gloo is asked for: an all_reduce where the program called reduce_scatter_tensor, and
// several collectives for one call. This file records what was called; _flight_record.py puts that in the place of
// gloo's entries when the recorder is read.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ext::sim {

struct Shape {
  std::vector<int64_t> sizes;
  at::ScalarType type;
};

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& tensors);

class Transfer;

// When an operation began and ended, in nanoseconds since 1970. Any thread.
class Progress {
 public:
  explicit Progress(const std::vector<std::shared_ptr<Transfer>>& transfers);
  void finish();
  int64_t begun() const { return begun_; }

  // 0: not yet. Looks, because nobody may be waiting.
  int64_t finished();

 private:
  int64_t begun_;
  std::atomic<int64_t> finished_{0};
  std::vector<std::weak_ptr<Transfer>> transfers_; // expired: over
};
using ProgressPtr = std::shared_ptr<Progress>;

struct RecordedOperation {
  std::string name;
  std::string group;
  std::string description; // of the group
  uint64_t sequence;       // of the operation in its group
  std::vector<Shape> inputs;
  std::vector<Shape> outputs;
  ProgressPtr progress;
};

// Takes the place of the group's description in the entries of a transport's gloo.
constexpr const char* kTransportDescription = "simccl/transport";

// Keeps as many of the latest operations as the recorder keeps entries. Safe to call from any thread.
void record_operation(RecordedOperation operation);

void bind_flight_record(pybind11::module_& m);

} // namespace torch_ext::sim
