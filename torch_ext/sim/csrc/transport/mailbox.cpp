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

#include "../std.h"
#include "fingerprint.h"
#include "segment.h"
#include "transport.h"

namespace torch_ext::sim {

Mailbox::Mailbox(std::shared_ptr<SharedGroup> group)
    : group_(std::move(group)),
      last_sent_(static_cast<size_t>(group_->size())),
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
  const uint64_t data = group_->allocate(bytes);
  const uint64_t place = group_->allocate(sizeof(Letter));
  copy_bytes(group_->own().heap(data, bytes), tensor.const_data_ptr(), bytes);
  auto& written = *new (&letter(group_->rank, place)) Letter{};
  written.elements = static_cast<uint64_t>(tensor.numel());
  written.type = static_cast<int8_t>(tensor.scalar_type());
  written.data = data;
  written.turn = call.turn;
  copy_text(written.site, kSiteBytes, call.site);
  auto& last = last_sent_[static_cast<size_t>(to)];
  auto& link = last == 0 ? group_->own().first_letter(to) : letter(group_->rank, last).next;
  link.store(place, std::memory_order_release);
  last = place;
  ring(group_->header(to).doorbell);
  sent_.push_back({place, data});
  auto made = std::make_shared<Pending>(group_, shared_from_this(), std::move(call), 0);
  made->end();
  return made;
}

void Mailbox::release_sent() {
  while (!sent_.empty()) {
    const auto [place, data] = sent_.front();
    const auto state = letter(group_->rank, place).state.load(std::memory_order_acquire);
    if (state != (kLetterRead | kLetterPassed)) {
      return;
    }
    group_->free(place);
    group_->free(data);
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
  const auto& received = letter(from, place);
  const uint64_t elements = received.elements, data = received.data;
  std::exception_ptr why;
  if (static_cast<uint64_t>(tensor.numel()) != elements || static_cast<int8_t>(tensor.scalar_type()) != received.type) {
    why = group_->failure(unequal_letter(
        group_->called(from), static_cast<int64_t>(elements), received.type, received.site,
        group_->called(group_->rank), to.call));
  } else if (
      auto message = mutual_block(group_->called(from), received.turn, received.site, to.call); !message.empty()) {
    why = group_->failure(message);
  } else {
    copy_bytes(tensor.mutable_data_ptr(), group_->memory(from).heap(data, tensor.nbytes()), tensor.nbytes());
  }
  letter(from, place).state.fetch_or(kLetterRead, std::memory_order_release);
  to.end(why);
}

Wait Mailbox::progress(Pending& wanted, bool look) {
  const auto& doorbell = group_->header(group_->rank).doorbell;
  const Wait wait{&doorbell, doorbell.load(std::memory_order_acquire), wanted.call.root};
  // Check for ended peers before reading: they may have written just before.
  const auto why = wanted.over() ? "" : none_can_come(wanted, look);
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
  std::erase_if(receiving_, [](const auto& one) { return one->over(); });
  if (!wanted.over() && !why.empty()) {
    wanted.end(group_->failure(why));
    std::erase_if(receiving_, [&](const auto& one) { return one.get() == &wanted; });
  }
  return wait;
}

std::string Mailbox::none_can_come(const Pending& to, bool look) const {
  const auto why = group_->gone(to.call.root, look);
  return why.empty() ? why : c10::str(why, " and sends nothing more for ", to.call.name, ".");
}

} // namespace torch_ext::sim
