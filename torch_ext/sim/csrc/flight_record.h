// What the flight recorder's entries of a transport stand for.
//
// Note [Flight records]
// Torch's recorder accepts entries from torch's own backends only. Of `simccl` over shared memory it sees nothing. Of
// `simccl` over gloo it sees the transport's transfers: an all_reduce where the program called reduce_scatter_tensor,
// or several transfers for one call. This file records what was called and which transfers belong to it;
// _flight_record.py combines the two when the recorder is read.
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
  std::string transport; // what the transport calls itself in entries, empty if it makes none: see next_transport_name
  uint64_t first;        // its transfers, first and last, by the transport's count
  uint64_t last;
  std::string name;
  std::string group;
  std::string description; // of the group
  uint64_t sequence;       // of the operation in its group
  std::vector<Shape> inputs;
  std::vector<Shape> outputs;
  ProgressPtr progress;
};

// A name for a transport, unique in this process. It takes the place of the group's description in the transport's
// entries. The group's own name would not do, because a new default group reuses it.
std::string next_transport_name();

// Keeps as many of the latest operations as the recorder keeps entries. Safe to call from any thread.
void record_operation(RecordedOperation operation);

void bind_flight_record(pybind11::module_& m);

} // namespace torch_ext::sim
