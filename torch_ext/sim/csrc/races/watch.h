// Feeds the checker with what the devices of this process do.
//
// Note [What is host work]
// The host is a lane whose accesses to pinned memory count, for only there can
// streams and the host meet. Host operators are seen through torch's
// RecordFunction, while there is pinned memory. What bypasses the dispatcher
// (`numpy()`, `data_ptr()`) is not seen.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../block_pool.h"
#include "../device.h"
#include "../kernel_observer.h"
#include "../stream.h"
#include "checker.h"
#include "clock.h"
#include "history.h"
#include "operation.h"
#include "schedule.h"

namespace torch_ext::sim::races {

// Streams, and the one that stands for the end of an operation.
constexpr c10::StreamId kStreamIds = kStreamCount + 1;

// How a report names a lane.
struct LaneFacts {
  std::string name;
  c10::DeviceIndex device = -1; // -1: the host
  bool is_stream = false;
  Stack handed_out;        // where a stream was asked for last; none for a default
                           // stream
  std::optional<int> rank; // of a host lane that is a rank's thread
};

// Everything about one race that a report needs.
struct Finding {
  Race race;
  LaneFacts earlier_lane;
  LaneFacts later_lane;
  std::optional<int> earlier_rank; // whose thread asked for it, where ranks are threads
  std::optional<int> later_rank;
};

// What one thread hands to another, by a lock, a queue or a collective.
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
  void allocated(const void* data, size_t bytes, c10::Stream stream) noexcept override;
  void freed(const void* data, c10::DeviceIndex device) noexcept override;
  void used_on(const void* data, c10::Stream stream) noexcept override;
  void kept_until(const void* data, const Moment& moment) noexcept override;

  // A host operator has read or written pinned memory.
  void host_used(std::string_view name, c10::ArrayRef<sim::Access> accesses) noexcept;

  // Whether work of an earlier owner of the block at `data` could meet an
  // owner's on `stream`.
  bool is_dangerous(const void* data, c10::Stream stream) noexcept;

  // The thread that calls is a rank from now on, and knows what the host knows; and is not any more, and whoever waited
  // for it knows what it knew. See Note [Ranks that are threads] in lanes.h.
  void begin_rank(int rank);
  void end_rank();
  std::optional<int> rank_of_thread();

  // This thread passes on what it knows, and what its current streams on `devices` have come to; and another thread,
  // and its current streams, learn it.
  void give(Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices);
  void take(const Handover& handover, c10::ArrayRef<c10::DeviceIndex> devices);

  // See Note [Late results] in schedule.h.
  void set_schedule(Schedule::Kind kind, uint64_t seed);
  uint64_t trace();

  // Forgets all accesses, but no edge: what is checked from now on is complete
  // in itself.
  void forget();

  // The races found since the last call, and how many more there were like
  // them.
  std::pair<std::vector<Finding>, uint64_t> take();

 private:
  struct Owned {
    Memory memory;
    std::vector<Lane> users;
    Clock kept; // the ends of operations that were dropped without a wait
  };

  // All of these require the lock.
  Lane host(); // that this thread is
  void host_learns(const Clock& clock);
  std::optional<int> rank_of(const Access& access) const;
  Lane lane_of(c10::Stream stream);
  Lane lane_of(const Launch& launch);
  Lane new_lane(LaneFacts facts);
  // What is known of the memory that `access` is to, and where that starts;
  // nullptr for ordinary memory of the host.
  std::pair<Memory*, const void*> memory_of(const sim::Access& access);
  // Publishes what `lane` is ordered after of the blocks that it is about to touch.
  void publish(Lane lane, c10::ArrayRef<sim::Access> accesses);
  std::shared_ptr<Operation> operation(std::string_view name, Lane lane, Stack stack);
  void access_all(Lane lane, c10::ArrayRef<sim::Access> accesses, const std::shared_ptr<Operation>& by);
  void access_one(Lane lane, const sim::Access& access, uint32_t operand, const OriginPtr& by);

  std::mutex mutex_;
  std::atomic<bool> is_early_{true};
  Schedule schedule_;
  Checker checker_;
  std::array<std::array<Lane, kStreamIds>, kMaxDevices> streams_{}; // 0 (the host): not met yet
  std::map<std::tuple<std::string, int, c10::DeviceIndex>, Lane> communication_;
  std::map<int, Lane> ranks_;                                                    // that have ever been threads
  std::vector<Lane> rank_hosts_;                                                 // of those that are now
  std::vector<LaneFacts> facts_{{"the host", -1, false, nullptr, std::nullopt}}; // by lane
  std::unordered_map<uint64_t, Owned> blocks_;                                   // by serial
  std::unordered_map<uint64_t, Memory> pinned_;                                  // by serial
  std::map<std::string, uint64_t, std::less<>> names_;
};

// The one of this process. Never freed: threads may be telling it something.
Watch& watch();

} // namespace torch_ext::sim::races
