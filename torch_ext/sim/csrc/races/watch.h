// Feeds the checker with the work of this process's devices.
//
// Note [What is host work]
// The host is a lane. Its accesses to pinned memory count, because only there can streams and the host race. While
// there is pinned memory, torch's RecordFunction reports host operators, and patched method tables report the methods
// of torch's Python API that call no operator (Note [Reads by Python methods] in host_reads.cpp). Reads through
// `data_ptr()` are missed.
//
// Note [Late results]
// Kernels run when they are launched, so a lane that lacks a wait still reads the right numbers. After a late kernel
// has run, its results are withdrawn: memory holds its previous bytes, or poison if it was fresh. The results are
// published when a lane that is ordered after the kernel accesses the block, and when the host learns that the kernel
// is over. Any other lane reads the old bytes: the wrong number that the race can cause. The edges permit that
// execution, of a kernel that reads at once and writes slowly, so an ordered program computes the same.
//
// Only results are late: a kernel whose inputs are overwritten too early has read them already. Results in several runs
// (a column of a matrix), in pinned memory, and those of collectives are never late.
#pragma once

#include <c10/util/SmallVector.h>

#include "../allocator.h"
#include "../device.h"
#include "../kernel_observer.h"
#include "../memory_history.h"
#include "../std.h"
#include "../stream.h"
#include "checker.h"
#include "journal.h"

namespace torch_ext::sim::races {

// A stretch of one block of device memory.
struct Bytes {
  const void* block; // its start
  char* at;
  size_t size;
};

// When lanes see the writes of kernels: at once, or as late as the edges permit.
class Schedule {
 public:
  enum class Kind : uint8_t { kEarly, kLate, kRandom };

  // Publishes held results, and starts over.
  void set(Kind kind, uint64_t seed);

  bool is_early() const { return kind_ == Kind::kEarly; }

  // Whether the next kernel on `lane` is late. Equal calls in equal order get equal answers.
  bool next_is_late(Lane lane, std::string_view kernel);

  // A hash of the answers so far: equal for runs that made the same choices for the same kernels.
  uint64_t trace() const { return trace_; }

  // Withdraws a kernel's writes. `before` has the previous bytes of the written stretches that existed at its begin.
  using Saved = std::vector<std::pair<Bytes, std::vector<char>>>;
  void hold(const std::vector<Bytes>& written, const Saved& before, Epoch epoch);

  // Publishes results that are over by `clock`: of one block, or of all.
  void publish(const void* block, const Clock& clock);
  void publish(const Clock& clock);

  // The block was freed: drop its unpublished results.
  void drop(const void* block) { held_.erase(block); }

 private:
  struct Held {
    Bytes where;
    std::vector<char> bytes;
    Epoch epoch;
  };

  static void publish(std::vector<Held>& held, const Clock* clock);

  Kind kind_ = Kind::kEarly;
  uint64_t seed_ = 0;
  uint64_t trace_ = 0;
  std::vector<uint64_t> counts_;                            // of kernels, by lane
  std::unordered_map<const void*, std::vector<Held>> held_; // by block, in order
};

struct Operand {
  c10::ScalarType type;
  c10::SmallVector<int64_t, 4> sizes;
};

// The origin of an access: an operator, a collective, a host operator, an allocation or a free, and its call stack.
struct Operation final : Origin {
  Operation(uint64_t alike, const std::string& called, CallStack from)
      : Origin(alike), name(called), stack(std::move(from)) {}

  const std::string& name; // lives as long as the process
  const CallStack stack;
  Lane host = kHost;                 // the thread that launched it
  const std::string* node = nullptr; // the autograd node that is being evaluated; lives as long as the process
  std::optional<uint64_t> sequence;  // of a collective in its group
  std::optional<int64_t> rank;       // of a race between ranks that are processes
  std::string site;                  // of the call, where symmetric memory is accessed; another rank's has no stack
  c10::SmallVector<Operand, 4> operands;
};

// The ids of streams, and the id that stands for the end of an operation.
constexpr c10::StreamId kStreamIds = kStreamCount + 1;

// A lane, for reports.
struct LaneFacts {
  std::string name;
  c10::DeviceIndex device = -1; // -1: the host
  bool is_stream = false;
  CallStack handed_out;    // the last request for a stream; none for a default stream
  std::optional<int> rank; // of a host lane that is a rank's thread
};

// The clocks that one thread hands to another, by a lock, a queue or a collective.
struct Handover {
  Clock host;
  Clock streams;
};

class Watch final : public Observer {
 public:
  void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept override;
  bool wants_beginnings() noexcept override { return !is_early_.load(std::memory_order_relaxed); }
  void kernel_begins(std::string_view name, c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept override;
  void launch_begins(c10::Stream stream, c10::ArrayRef<sim::Access> accesses) noexcept override;
  Moment recorded(c10::Stream stream) noexcept override;
  void stream_waits(c10::Stream stream, const Moment& moment) noexcept override;
  void host_knows(const Moment& moment) noexcept override;
  void host_knows(c10::Stream stream) noexcept override;
  void host_knows(c10::DeviceIndex device) noexcept override;
  void handed_out(c10::Stream stream) noexcept override;
  Moment launched(const Launch& launch) noexcept override;
  Moment joined(c10::ArrayRef<Moment> moments) noexcept override;
  std::string stamp(c10::Stream stream) noexcept override;
  std::string host_stamp() noexcept override;
  Moment learned(const std::vector<std::string>& stamps) noexcept override;
  void allocated(const void* data, size_t bytes, c10::Stream stream) noexcept override;
  void freed(const void* data, c10::DeviceIndex device) noexcept override;
  void used_on(const void* data, c10::Stream stream) noexcept override;
  std::optional<size_t> first_danger(const void* data, size_t size, c10::Stream stream) noexcept override;
  void kept_until(const void* data, const Moment& moment) noexcept override;

  // A host operator has read or written pinned memory.
  void host_used(std::string_view name, c10::ArrayRef<sim::Access> accesses) noexcept;

  // `begin_rank` registers the calling thread as a rank; its clock starts as a copy of the host's. `end_rank` merges
  // its clock into the host's. See Note [Ranks that are threads] in checker.h.
  void begin_rank(int rank);
  void end_rank();
  std::optional<int> rank_of_thread();

  // `give` merges the clocks of this thread and of its current streams on `devices` into `handover`; `take` merges
  // those into the clocks of another thread and its current streams.
  void give(Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices);
  void take(const Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices);

  // See Note [Late results].
  void set_schedule(Schedule::Kind kind, uint64_t seed);
  uint64_t trace();

  // Forgets all accesses, but no edge: later checks need no earlier access.
  void forget();

  // The races found since the last call.
  std::vector<Race> take();

  LaneFacts facts_of(Lane lane);
  std::optional<int> rank_of(const Access& access); // the rank that launched it, where ranks are threads

 private:
  // A live block.
  struct Owned {
    Owner owner;
    bool is_unnamed = false; // allocated by a kernel, which its first access will name
    std::vector<Lane> users{};
    Clock kept{}; // the ends of operations that were dropped without a wait
  };

  // All of these require the lock.
  Lane host(); // the lane of this thread
  void host_learns(const Clock& clock);
  Lane lane_of(c10::Stream stream);
  Lane lane_of(const Launch& launch);
  Lane new_lane(LaneFacts facts);
  // The state and the start of the memory that `access` touches; nullptr for ordinary host memory.
  std::pair<Memory*, const void*> memory_of(const sim::Access& access);
  // The live block that contains `pointer`; nullptr if it was allocated before the check.
  Owned* owned_at(const void* pointer);
  Owned& owned(const Block& block); // creates it
  // Publishes the late results in the blocks that `lane` is about to access and that it is ordered after.
  void publish(Lane lane, c10::ArrayRef<sim::Access> accesses);
  std::shared_ptr<Operation> operation(std::string_view name, Lane lane, CallStack stack);
  // stamp: if given, gets what is over for ranks that have the operation's result.
  void access_all(
      Lane lane, c10::ArrayRef<sim::Access> accesses, const std::shared_ptr<Operation>& by,
      std::string* stamp = nullptr);
  void access_one(Lane lane, const sim::Access& access, uint32_t operand, const OriginPtr& by);

  // Of races between ranks, in across_ranks.cpp.
  void access_shared(Lane lane, const sim::Access& access, uint32_t operand, const OriginPtr& by);
  bool knows_other_ranks() const;
  std::string stamp_of(const Clock& clock) const;
  Lane lane_of(const Stamped& epoch); // of this process or another

  std::mutex mutex_;
  std::atomic<bool> is_early_{true};
  Schedule schedule_;
  Checker checker_;
  std::array<std::array<Lane, kStreamIds>, kMaxDevices> streams_{}; // 0 (the host): no lane yet
  std::map<std::tuple<std::string, int, c10::DeviceIndex>, Lane> communication_;
  std::map<int, Lane> ranks_;                                                    // of all rank threads so far
  std::vector<Lane> rank_hosts_;                                                 // of the current rank threads
  std::vector<LaneFacts> facts_{{"the host", -1, false, nullptr, std::nullopt}}; // by lane
  std::unordered_map<uint64_t, Memory> segments_;                                // by serial
  std::map<const char*, Owned> blocks_;                                          // by start; live ones
  uint32_t lives_ = 0;                                                           // number of allocations
  std::unordered_map<uint64_t, Memory> pinned_;                                  // by serial
  std::map<std::string, uint64_t, std::less<>> names_;
  std::map<std::pair<uint32_t, uint32_t>, Lane> foreign_; // lanes of other processes, by process and lane there
  std::unordered_map<Lane, Stamped> origins_;             // the other way round
  uint32_t checks_ = 0;
};

// The line of the user's program that calls, if one of `accesses` is to symmetric memory; empty where no line of it
// does. Call it with no lock held.
std::optional<std::string> site_of_shared(c10::ArrayRef<sim::Access> accesses);

// The watch of this process. Never freed: threads may be calling it.
Watch& watch();

// Start and stop reporting the host's reads and writes of pinned memory to the watch. Call with the GIL, in turn.
void begin_host_reads();
void end_host_reads();

// The name of the autograd node that this thread evaluates, which lives as long as the process; nullptr without a node,
// and for a node written in Python, whose frames tell more. The engine's threads have no Python frames.
const std::string* current_autograd_node();

} // namespace torch_ext::sim::races
