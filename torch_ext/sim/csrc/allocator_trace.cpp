// A pool for tests, which compare it with CUDA's: it belongs to no device, and the test says when streams are busy.

#include "bindings.h"
#include "block_pool.h"
#include "blocks.h"
#include "device.h"
#include "std.h"
#include "stream.h"

namespace torch_ext::sim {
namespace {

class TracedPool final : public BlockPool {
 public:
  using BlockPool::BlockPool;

  void make_busy(c10::StreamId stream) { ends_[stream] = now_ + 1; }
  void finish() { ++now_; }

 protected:
  int64_t now() const override { return now_; }
  int64_t end_of(c10::Stream stream) const override {
    const auto found = ends_.find(stream.id());
    return found == ends_.end() ? 0 : found->second;
  }
  void sleep_until(int64_t /*moment*/) const override {}

 private:
  int64_t now_ = 0;
  std::map<c10::StreamId, int64_t> ends_;
};

class AllocatorTrace {
 public:
  explicit AllocatorTrace(size_t limit) : pool_(0, limit) {}
  ~AllocatorTrace() { // NOLINT(bugprone-exception-escape): for tests only
    for (const auto& [data, block] : held_) {
      pool_.give_back(block);
    }
    pool_.empty();
  }
  C10_DISABLE_COPY_AND_ASSIGN(AllocatorTrace);

  TracedPool& pool() { return pool_; }

  // The block's address, and its segment's number and its place there; None without memory.
  std::optional<std::tuple<uint64_t, size_t, size_t>> take(size_t nbytes, c10::StreamId stream) {
    try {
      Block* block = pool_.take(nbytes, stream_of(0, stream));
      const auto address = address_of(block->start);
      held_[address] = block;
      const auto segment = segments_.try_emplace(block->segment->serial, segments_.size()).first->second;
      return std::tuple(address, segment, static_cast<size_t>(block->start - block->segment->start));
    } catch (const c10::OutOfMemoryError&) {
      return std::nullopt;
    }
  }
  void give_back(uint64_t address) { pool_.give_back(held_.extract(address).mapped()); }
  void add_user(uint64_t address, c10::StreamId stream) { pool_.add_user(held_.at(address), stream_of(0, stream)); }

  std::vector<int64_t> stats() {
    std::vector<int64_t> numbers;
    const auto stats = pool_.stats();
    for_each_stat(stats, [&](const c10::CachingAllocator::Stat& stat) {
      numbers.insert(numbers.end(), {stat.current, stat.peak, stat.allocated, stat.freed});
    });
    numbers.insert(
        numbers.end(),
        {stats.num_alloc_retries, stats.num_ooms, stats.num_sync_all_streams, stats.num_device_alloc,
         stats.num_device_free, stats.max_split_size});
    return numbers;
  }

  // For each block by address: its size, whether it is allocated, whether it is in use, whether its pool is the large
  // one.
  std::vector<std::tuple<size_t, bool, bool, bool>> blocks() {
    std::vector<std::tuple<size_t, bool, bool, bool>> all;
    for (const auto& segment : pool_.segments()) {
      for (const auto& block : segment.blocks) {
        const bool active = block.state != Block::State::kIdle;
        all.emplace_back(block.size, block.state == Block::State::kLive, active, !segment.is_small);
      }
    }
    return all;
  }

 private:
  TracedPool pool_;
  std::map<uint64_t, Block*> held_;
  std::map<uint64_t, size_t> segments_; // the number by serial
};

} // namespace

void bind_allocator_trace(pybind11::module_& m) {
  pybind11::class_<AllocatorTrace>(m, "AllocatorTrace")
      .def(pybind11::init<size_t>())
      .def("take", &AllocatorTrace::take)
      .def("give_back", &AllocatorTrace::give_back)
      .def("add_user", &AllocatorTrace::add_user)
      .def("make_busy", [](AllocatorTrace& trace, c10::StreamId stream) { trace.pool().make_busy(stream); })
      .def("finish", [](AllocatorTrace& trace) { trace.pool().finish(); })
      .def("empty", [](AllocatorTrace& trace) { trace.pool().empty(); })
      .def("set_fraction", [](AllocatorTrace& trace, double fraction) { trace.pool().set_fraction(fraction); })
      .def("stats", &AllocatorTrace::stats)
      .def("blocks", &AllocatorTrace::blocks);
}

} // namespace torch_ext::sim
