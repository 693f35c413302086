// The interface of tools that watch the devices of this process. An observer gets every kernel with the memory that it
// reads and writes, every edge between streams, lanes and the host, and the life of memory.
//
// Without one, a kernel pays one compare. Calls come from the thread that does the work, with the GIL or without it,
// and with no lock held.
//
// Note [Moments]
// A moment is a point that streams and the host may wait for: of a stream, when an event is recorded; of a
// communication lane, the end of an operation. The observer makes the moment, the event or the work keeps it, and the
// observer gets it back when a stream or the host has waited for it. Recording an event again makes a new moment.
#pragma once

#include <c10/util/ArrayRef.h>

#include "std.h"

namespace torch_ext::sim {

// Memory that a kernel or an operation uses: elements of `type` at the given sizes and strides, counted in elements,
// from `data` on. Never empty. Valid during the observer's call that gets it.
struct Access {
  const void* data;
  size_t bytes; // from `data` to the end of its last element
  c10::Device device;
  c10::ScalarType type;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  bool write;
};

using Moment = std::shared_ptr<const void>;

// An operation of a process group.
struct Launch {
  std::string_view name;
  std::string_view group; // its unique name in this process
  uint64_t sequence;      // of the operation in its group
  int peer;               // of a transfer: the other rank, in the group; -1 for a collective
  bool asynchronous;      // whether it belongs to the lane of its group; otherwise to the stream
  c10::Stream stream;     // that was current
  c10::ArrayRef<Access> accesses;
  std::string* stamp = nullptr; // for `launched` to fill: see `stamp` below
};

// A call reports everything before it returns. Nothing here may raise.
class Observer {
 public:
  virtual ~Observer() = default;

  // A kernel has run; its writes include its results. If no tensor names a device, `stream` is the current stream of
  // the current device.
  virtual void kernel(std::string_view name, c10::Stream stream, c10::ArrayRef<Access> accesses) noexcept = 0;

  // A kernel or an operation is about to run; its future results are left out. Called if `wants_beginnings`.
  virtual bool wants_beginnings() noexcept { return false; }
  virtual void kernel_begins(
      std::string_view /*name*/, c10::Stream /*stream*/, c10::ArrayRef<Access> /*accesses*/) noexcept {}
  virtual void launch_begins(c10::Stream /*stream*/, c10::ArrayRef<Access> /*accesses*/) noexcept {}

  virtual Moment recorded(c10::Stream stream) noexcept = 0;
  virtual void stream_waits(c10::Stream stream, const Moment& moment) noexcept = 0;

  // The host knows, by waiting or by a query, that something is over.
  virtual void host_knows(const Moment& moment) noexcept = 0;
  virtual void host_knows(c10::Stream stream) noexcept = 0;
  virtual void host_knows(c10::DeviceIndex device) noexcept = 0; // everything on it, lanes included

  virtual void handed_out(c10::Stream /*stream*/) noexcept {}

  // Called before the operation's data moves. Returns the moment of its end. For several operations launched as one,
  // `launched` is called for each, then `joined`, which combines their moments.
  virtual Moment launched(const Launch& launch) noexcept = 0;
  virtual Moment joined(c10::ArrayRef<Moment> moments) noexcept = 0;

  // What other ranks must know of this one: the work before a signal that is put on `stream`, or that the host knows.
  // Empty if there is nothing. `learned` returns the moment that the stamps of other ranks stand for; null if they are
  // empty. See Note [Races between ranks] in races/journal.h.
  virtual std::string stamp(c10::Stream /*stream*/) noexcept { return {}; }
  virtual std::string host_stamp() noexcept { return {}; }
  virtual Moment learned(const std::vector<std::string>& /*stamps*/) noexcept { return nullptr; }

  // `stream` is the current one. Called without the allocator's lock.
  virtual void allocated(const void* /*data*/, size_t /*bytes*/, c10::Stream /*stream*/) noexcept {}
  virtual void freed(const void* /*data*/, c10::DeviceIndex /*device*/) noexcept {} // before it can be used again
  virtual void used_on(const void* /*data*/, c10::Stream /*stream*/) noexcept {}    // record_stream
  // The first of `size` bytes at `data` whose earlier owner's work could race with an owner on `stream`, if any. Called
  // at every free and request, also of threads whose events are suppressed, with the allocator's lock.
  virtual std::optional<size_t> first_danger(const void* /*data*/, size_t /*size*/, c10::Stream /*stream*/) noexcept {
    return std::nullopt;
  }
  // No stream or host waited for the operation that ends at `moment`; its memory is kept until then nevertheless.
  virtual void kept_until(const void* /*data*/, const Moment& /*moment*/) noexcept {}
};

extern std::atomic<Observer*> current_observer;

// True while this thread's events are suppressed because a caller reports them as one.
extern constinit thread_local bool is_unobserved;

// The observer of this thread; nullptr by default.
inline Observer* observer() noexcept {
  auto* watching = current_observer.load(std::memory_order_acquire);
  return watching == nullptr || is_unobserved ? nullptr : watching;
}

template <typename What>
void notify(What what) {
  if (auto* to = observer()) {
    what(*to);
  }
}

// Passes a moment to the observer, if both exist: without an observer or a recording there is no moment.
template <typename What>
void notify(const Moment& moment, What what) {
  if (moment != nullptr) {
    notify(what);
  }
}

// Returns the previous observer, which must stay alive, since other threads may be calling it.
inline Observer* set_observer(Observer* next) noexcept {
  return current_observer.exchange(next, std::memory_order_acq_rel);
}

} // namespace torch_ext::sim
