// Transfers between two ranks of a group over shared memory.
//
// Note [Letters]
// A sender copies its tensor to its own memory and appends a letter to its list for the receiver, so a send, even to
// oneself, is over when it has begun. A receiver reads the list of each sender; a receive takes the oldest unread
// letter of its sender. Of receives from one sender, the one that was started first gets it.
//
//   sender's list   first -> letter -> letter -> letter -> 0
//                            passed    passed    ^ cursor of the receiver: the last one it has seen
//                            and read            |
//                            = free              `- passed, not read: among the receiver's unread letters
//
// A letter is kept until the receiver has gone past it, because its `next` continues the list.
#include "shared_memory.h"

#include "../clock.h"
#include "../std.h"
#include "fingerprint.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {

Mailbox::Mailbox(std::shared_ptr<SharedGroup> group)
    : group_(std::move(group)),
      last_sent_(static_cast<size_t>(group_->size())),
      send_ends_(last_sent_.size()),
      receive_ends_(last_sent_.size()),
      cursor_(last_sent_.size()),
      unread_(last_sent_.size()) {}

Letter& Mailbox::letter(int rank, uint64_t place) const {
  auto& memory = group_->memory(rank);
  return *reinterpret_cast<Letter*>(memory.heap(place, sizeof(Letter)));
}

TransferPtr Mailbox::send(Call call) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  release_sent();
  const int to = call.root;
  if (auto why = group_->gone(to, /*look=*/true); !why.empty()) {
    std::rethrow_exception(group_->failure(c10::str(why, " and receives nothing from ", call.name, ".")));
  }
  const at::Tensor& tensor = call.inputs.front();
  const uint64_t bytes = tensor.nbytes();
  const uint64_t place = group_->allocate(sizeof(Letter) + bytes + call.stamp.size());
  std::byte* data = group_->own().heap(place + sizeof(Letter), bytes + call.stamp.size());
  copy_bytes(data, tensor.const_data_ptr(), bytes);
  copy_bytes(data + bytes, call.stamp.data(), call.stamp.size());
  clock::Span times{};
  if (call.timing.ready >= 0) {
    auto& end = send_ends_[static_cast<size_t>(to)];
    times.start = std::max(clock::epoch() + call.timing.ready, end);
    times.end = end = times.start + call.timing.lasts;
    call.timing.ready = times.start - clock::epoch();
  }
  new (&letter(group_->rank, place)) Letter{.envelope = envelope_of(call)};
  auto& last = last_sent_[static_cast<size_t>(to)];
  auto& link = last == 0 ? group_->own().first_letter(to) : letter(group_->rank, last).next;
  link.store(place, std::memory_order_release);
  last = place;
  ring(group_->header(to).doorbell);
  sent_.push_back(place);
  auto made = std::make_shared<Pending>(group_, shared_from_this(), std::move(call), 0);
  made->times = times;
  made->end();
  return made;
}

void Mailbox::release_sent() {
  while (!sent_.empty()) {
    const auto state = letter(group_->rank, sent_.front()).state.load(std::memory_order_acquire);
    if (state != (kLetterRead | kLetterPassed)) {
      return;
    }
    group_->free(sent_.front());
    sent_.pop_front();
  }
}

TransferPtr Mailbox::receive(Call call) {
  std::lock_guard<std::mutex> lock(group_->mutex);
  auto made = std::make_shared<Pending>(group_, shared_from_this(), std::move(call), 0);
  receiving_.push_back(made);
  return made;
}

void Mailbox::collect(int from) {
  const auto index = static_cast<size_t>(from);
  auto& memory = group_->memory(from);
  auto& cursor = cursor_[index];
  while (true) {
    auto& link = cursor == 0 ? memory.first_letter(group_->rank) : letter(from, cursor).next;
    const uint64_t place = link.load(std::memory_order_acquire);
    if (place == 0) {
      return;
    }
    if (cursor != 0) {
      letter(from, cursor).state.fetch_or(kLetterPassed, std::memory_order_release);
    }
    cursor = place;
    unread_[index].push_back(place);
  }
}

void Mailbox::open(Pending& to, uint64_t place) {
  const int from = to.call.root;
  const auto& tensor = to.call.outputs.front();
  auto why = fault_of(*group_, letter(from, place).envelope, to.call);
  if (why == nullptr) {
    const auto stamp = letter(from, place).envelope.stamp_bytes;
    const auto* data = group_->memory(from).heap(place + sizeof(Letter), tensor.nbytes() + stamp);
    copy_bytes(tensor.mutable_data_ptr(), data, tensor.nbytes());
    to.add_stamp(data + tensor.nbytes(), stamp);
  }
  if (to.call.timing.ready >= 0) {
    const Timing sent = letter(from, place).envelope.timing;
    auto& end = receive_ends_[static_cast<size_t>(from)];
    to.times.start = clock::epoch() + std::max(to.call.timing.ready, sent.ready);
    to.times.end = end =
        std::max({to.times.start, clock::epoch() + std::max(sent.ready, int64_t{0}) + sent.lasts, end});
    try {
      const int last = to.call.timing.ready > sent.ready ? group_->rank : from;
      group_->check_limit(to.call, to.call.timing.launched, end - clock::epoch(), group_->rank, last);
    } catch (...) {
      why = why ? why : std::current_exception();
    }
  }
  letter(from, place).state.fetch_or(kLetterRead, std::memory_order_release); // the heap may have moved
  to.end(why);
}

Wait Mailbox::progress(Pending& wanted, bool look) {
  const auto& doorbell = group_->header(group_->rank).doorbell;
  const Wait wait{&doorbell, doorbell.load(std::memory_order_acquire), wanted.call.root};
  // Check for ended peers before reading: they may have written just before.
  const auto why = wanted.over() ? "" : group_->gone(wanted.call.root, look);
  for (int from = 0; from < group_->size(); ++from) {
    collect(from);
  }
  for (const auto& one : receiving_) {
    auto& unread = unread_[static_cast<size_t>(one->call.root)];
    if (!one->over() && !unread.empty()) {
      const uint64_t place = unread.front();
      unread.pop_front();
      open(*one, place);
    }
  }
  if (!wanted.over() && !why.empty()) {
    wanted.end(group_->failure(c10::str(why, " and sends nothing more for ", wanted.call.name, ".")));
  }
  std::erase_if(receiving_, [](const auto& one) { return one->over(); });
  return wait;
}

} // namespace torch_ext::sim
