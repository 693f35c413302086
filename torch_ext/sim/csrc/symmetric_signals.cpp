// The signals of symmetric memory: see Note [Signals] in symmetric_memory.h.
#include <c10/util/StringUtil.h>

#include "device.h"
#include "graph.h"
#include "kernel_observer.h"
#include "races/journal.h"
#include "std.h"
#include "stream.h"
#include "symmetric_memory.h"
#include "transport/fingerprint.h"
#include "transport/segment.h"
#include "transport/wait_note.h"
#include "without_gil.h"

namespace torch_ext::sim::symmetric {
namespace {

// How long a waiter sleeps before it looks whether its peer has ended, or a kernel has written the slot.
constexpr std::chrono::milliseconds kLook{20};

constexpr std::chrono::hours kForever{24 * 365};

// Puts a signal into a slot of a peer's pad, or waits for one in a slot of our own.
struct Step {
  bool puts;
  const Peer* peer;
  Memory* memory; // that has the slot
  size_t place;
  bool is_over = false;

  std::atomic<uint32_t>& slot() const { return reinterpret_cast<std::atomic<uint32_t>*>(memory->pad())[place]; }
  uint32_t before() const { return puts ? 0 : 1; } // in the slot

  // Returns whether the step is over. stamps: gets the one of the put.
  bool attempt(const std::string& stamp, std::vector<std::string>& stamps) {
    uint32_t expected = before();
    if (is_over || slot().load(std::memory_order_acquire) != expected) {
      return is_over;
    }
    // Nobody else changes the slot now, unless the program writes to the pad.
    if (puts) {
      races::write_stamp(*memory, place, stamp);
    } else {
      stamps.push_back(races::read_stamp(*memory, place));
    }
    is_over = slot().compare_exchange_strong(expected, 1 - expected, std::memory_order_acq_rel);
    wake(slot());
    return is_over;
  }
};

// A barrier, a put or a wait under way: see Note [Signals].
class Signals final : public Elsewhere {
 public:
  Signals(
      std::shared_ptr<const std::vector<Peer>> peers, std::string group, std::vector<Step> steps, std::string stamp,
      const char* name, int64_t rank, int channel, size_t timeout_ms)
      : peers_(std::move(peers)),
        group_(std::move(group)),
        stamp_(std::move(stamp)),
        name_(name),
        rank_(rank),
        channel_(channel),
        timeout_ms_(timeout_ms),
        site_(site_of_call()),
        deadline_(std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms)),
        steps_(std::move(steps)) {}

  bool advance() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return step(/*look=*/false) == nullptr;
  }

  // As `advance`, unless another thread is at it.
  void try_advance() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      step(/*look=*/false);
    }
  }
  bool is_over() const { return over_at_ != 0; }

  void finish() override {
    bool look = false;
    std::optional<WaitNote> note;
    while (true) {
      const std::atomic<uint32_t>* word = nullptr;
      uint32_t seen = 0;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        const Step* left = step(look);
        if (left == nullptr) {
          if (why_) {
            std::rethrow_exception(why_);
          }
          return;
        }
        if (look && !note.has_value()) {
          const auto until = timeout_ms_ > 0 ? deadline_ : deadline_ + kForever;
          note.emplace(group_, c10::str(name_, "(channel ", channel_, ")").c_str(), site_, 0, until);
        }
        if (note.has_value()) {
          note->waits_for(left->peer->rank);
        }
        word = &left->slot();
        seen = 1 - left->before();
      }
      sleep_while(*word, seen, kLook);
      look = true;
    }
  }

  int64_t over_at() const override { return over_at_; }
  int64_t number() const override { return -1; } // not in the trace of virtual time
  bool failed() const override { return over_at_ != 0 && why_ != nullptr; }
  Moment learned() const override { return over_at_ != 0 ? learned_ : nullptr; }

 private:
  // Does what is possible; returns the first step that is left, unless the work is over. look: whether peers live.
  const Step* step(bool look) {
    if (over_at_ != 0) {
      return nullptr;
    }
    const Step* left = attempt();
    std::string why;
    if (left != nullptr && look && left->peer->process != nullptr && left->peer->process->has_ended()) {
      why = c10::str(": rank ", left->peer->rank, " (process ", left->peer->process->pid(), ") has ended");
      left = attempt(); // it may have put just before
    } else if (left != nullptr && timeout_ms_ > 0 && std::chrono::steady_clock::now() >= deadline_) {
      why = c10::str(" after ", timeout_ms_, " milliseconds");
    }
    if (left == nullptr) {
      end();
    } else if (!why.empty()) {
      fail(why, *left);
    } else {
      return left;
    }
    return nullptr;
  }

  const Step* attempt() {
    const Step* left = nullptr;
    for (auto& each : steps_) {
      left = each.attempt(stamp_, stamps_) || left != nullptr ? left : &each;
    }
    return left;
  }

  void end() {
    notify([&](Observer& to) { learned_ = to.learned(stamps_); });
    over_at_ = stream_clock();
  }

  void fail(const std::string& why, const Step& left) {
    constexpr int32_t kLaunchFailure = 719; // cudaErrorLaunchFailure
    const auto peer = left.peer->rank;
    const auto text = c10::str(
        kSimTitle, " error: unspecified launch failure\n[FATAL] ", kSimTitle, "SymmetricMemory::", name_, ": rank ",
        rank_, " failed to ", left.puts ? "send signal to" : "receive signal from", " rank ", peer, " on channel ",
        channel_, why, ". Rank ", rank_, " waits at ", site_.empty() ? "?" : site_,
        left.puts ? " for rank " : " for a signal of rank ", peer, left.puts ? " to wait for the signal before." : ".");
    why_ = std::make_exception_ptr(
        c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kLaunchFailure, text));
    over_at_ = stream_clock();
  }

  const std::shared_ptr<const std::vector<Peer>> peers_;
  const std::string group_;
  const std::string stamp_;
  const char* name_;
  const int64_t rank_;
  const int channel_;
  const size_t timeout_ms_;
  const std::string site_;
  const std::chrono::steady_clock::time_point deadline_;
  std::atomic<int64_t> over_at_{0};
  std::mutex mutex_; // guards what follows, until the work is over
  std::vector<Step> steps_;
  std::exception_ptr why_;
  std::vector<std::string> stamps_;
  Moment learned_;
};

// Those that were not over when they were launched.
struct Pending {
  std::mutex mutex;
  std::vector<std::weak_ptr<Signals>> signals;
};

Pending& pending = *new Pending(); // never freed: the thread that advances them may outlive static objects

class Handle final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  Handle(std::shared_ptr<const std::vector<Peer>> peers, std::string group, int rank, size_t offset)
      : peers_(std::move(peers)), group_(std::move(group)), rank_(rank), offset_(offset) {
    for (const auto& peer : *peers_) {
      buffers_.push_back(peer.memory->buffer());
      pads_.push_back(peer.memory->pad());
      global_ranks_.push_back(static_cast<int>(peer.rank));
    }
  }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return own().memory->buffer_bytes; }
  size_t get_offset() override { return offset_; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(peers_->size()); }
  c10::Device get_device() override { return {kSim, own().memory->device}; }
  const std::vector<int>& get_rank_to_global_rank() override { return global_ranks_; }
  int* get_rank_to_global_rank_dev() override { return global_ranks_.data(); }
  bool world_within_direct_access() override { return true; }

  void barrier(int channel, size_t timeout_ms) override {
    std::vector<Step> steps;
    for (const bool puts : {true, false}) {
      for (int peer = 0; peer < get_world_size(); ++peer) {
        if (peer != rank_) {
          steps.push_back(step(puts, peer, channel));
        }
      }
    }
    launch("barrier", channel, timeout_ms, std::move(steps));
  }
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override {
    launch("put_signal", channel, timeout_ms, {step(/*puts=*/true, dst_rank, channel)});
  }
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override {
    launch("wait_signal", channel, timeout_ms, {step(/*puts=*/false, src_rank, channel)});
  }

 private:
  const Peer& own() const { return (*peers_)[static_cast<size_t>(rank_)]; }

  // The slot in the pad of the rank that waits, for signals of the rank that puts. Raises in CUDA's words, whose own
  // limit for channels, of pads times ranks, lies past the pad.
  Step step(bool puts, int peer, int channel) {
    TORCH_CHECK(
        peer >= 0 && peer < get_world_size(), "rank must be greater than or equal to 0 and less than the world size (",
        get_world_size(), "), got ", peer);
    const size_t channels = get_signal_pad_size() / sizeof(uint32_t) / peers_->size();
    TORCH_CHECK(
        channel >= 0, "channel for barrier(), put_signal() and wait_signal() must be greater than or equal to 0 (got ",
        channel, ")");
    TORCH_CHECK(
        static_cast<size_t>(channel) < channels,
        "The maximum supported channel for barrier(), put_signal() and wait_signal() is ", channels - 1, " (got ",
        channel, ")");
    const Peer& other = (*peers_)[static_cast<size_t>(peer)];
    auto* memory = (puts ? other : own()).memory.get();
    const auto place = peers_->size() * static_cast<size_t>(channel) + static_cast<size_t>(puts ? rank_ : peer);
    return {puts, &other, memory, place};
  }

  void launch(const char* name, int channel, size_t timeout_ms, std::vector<Step> steps) {
    const auto stream = current_stream(own().memory->device);
    if (const auto capture = is_capturing() ? capture_of(stream) : nullptr) {
      const auto self = c10::intrusive_ptr<Handle>::reclaim_copy(this);
      capture->add({name, stream, [=](Slots&) { self->launch(name, channel, timeout_ms, steps); }});
      return;
    }
    catch_up(stream); // so that a put comes after the work before it
    std::string stamp;
    notify([&](Observer& to) { stamp = to.stamp(stream); });
    auto made = std::make_shared<Signals>(
        peers_, group_, std::move(steps), std::move(stamp), name, own().rank, channel, timeout_ms);
    if (!made->advance()) {
      std::lock_guard<std::mutex> lock(pending.mutex);
      pending.signals.push_back(made);
    }
    wait(stream, Event{0, {std::move(made)}, {}, stream.device_index()});
  }

  const std::shared_ptr<const std::vector<Peer>> peers_;
  const std::string group_;
  const int rank_;
  const size_t offset_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  std::vector<int> global_ranks_;
};

} // namespace

void bind_signals(pybind11::module_& m) {
  m.def("advance_signals", [] {
    const WithoutGil without;
    std::vector<std::weak_ptr<Signals>> known;
    {
      std::lock_guard<std::mutex> lock(pending.mutex);
      known = pending.signals;
    }
    for (const auto& each : known) {
      if (const auto alive = each.lock()) {
        alive->try_advance();
      }
    }
    std::lock_guard<std::mutex> lock(pending.mutex);
    std::erase_if(pending.signals, [](const auto& each) {
      const auto alive = each.lock();
      return alive == nullptr || alive->is_over();
    });
  });
}

HandlePtr make_handle(
    std::shared_ptr<const std::vector<Peer>> peers, const std::string& group, int rank, size_t offset) {
  return c10::make_intrusive<Handle>(std::move(peers), group, rank, offset);
}

} // namespace torch_ext::sim::symmetric
