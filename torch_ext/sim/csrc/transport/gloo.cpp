#include "gloo.h"

#include "../transport_view.h"
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../flight_record.h"
#include "fingerprint.h"
#include "gloo_calls.h"
#include "gloo_collective.h"
#include "gloo_letter.h"
#include "layout.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

// What one rank says of a collective: its fingerprint, its number, and its counts, of which an all-to-all has most.
constexpr size_t kSaidBytes = sizeof(Fingerprint) + sizeof(uint64_t);

at::Tensor bytes_of(const Call& call, uint64_t number, size_t size) {
  const Counts counts = counts_of(call);
  const Fingerprint print = fingerprint_of(call, counts);
  at::Tensor bytes = at::zeros({static_cast<int64_t>(kSaidBytes + 2 * size * sizeof(int64_t))}, at::kByte);
  auto* to = bytes.mutable_data_ptr<uint8_t>();
  std::memcpy(to, &print, sizeof print);
  std::memcpy(to + sizeof print, &number, sizeof number);
  std::memcpy(to + kSaidBytes, counts.data(), counts.size() * sizeof(int64_t));
  return bytes;
}

Said said_in(const at::Tensor& bytes, std::string who) {
  const auto* from = bytes.const_data_ptr<uint8_t>();
  const auto* print = reinterpret_cast<const Fingerprint*>(from);
  Said said{std::move(who), print, Counts(print->count_size)};
  std::memcpy(said.counts.data(), from + kSaidBytes, said.counts.size() * sizeof(int64_t));
  return said;
}

} // namespace

Gloo::Gloo(
    c10::intrusive_ptr<c10d::Backend> backend, std::vector<int64_t> global_ranks, std::chrono::milliseconds timeout,
    bool any_device)
    : backend_(std::move(backend)),
      global_ranks_(std::move(global_ranks)),
      any_device_(any_device),
      owner_(getpid()),
      timeout_(timeout) {
  backend_->setGroupDesc(kTransportDescription);
}

Gloo::~Gloo() {
  bool broken = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    broken = broken_;
    changed_.notify_all();
  }
  if (worker_.joinable()) {
    if (getpid() == owner_) {
      worker_.join();
    } else {
      worker_.detach(); // a child that was forked since has no such thread
    }
  }
  if (broken) {
    // gloo's destructor waits for its collectives, which cannot be stopped and may have lost their peers.
    backend_.release();
  }
}

void Gloo::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  backend_->setTimeout(timeout);
}

void Gloo::set_name(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  name_ = name;
  backend_->setGroupUid(name);
}

void Gloo::leave(bool broken) {
  std::lock_guard<std::mutex> lock(mutex_);
  broken_ = broken_ || broken;
  ending_ = ending_ || broken;
  if (broken && current_ != nullptr) {
    current_->abandon();
  }
  changed_.notify_all();
}

void Gloo::settle() {
  std::shared_ptr<GlooCollective> last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  if (last != nullptr) {
    try {
      last->finish(kNoTimeout);
    } catch (...) {
      // Whoever waits for that one is told what became of it.
    }
  }
}

TransferPtr Gloo::start(Call call) {
  call.site = site_of_call();
  if (any_device_) {
    call.device = -1;
  }
  if (c10d::isP2POp(call.kind)) {
    return start_letter(std::move(call));
  }
  auto made = std::make_shared<GlooCollective>(std::move(call), self());
  std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back(made);
  last_ = made;
  if (!worker_.joinable()) {
    worker_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
  return made;
}

TransferPtr Gloo::start_letter(Call call) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<GlooLetter>> earlier;
  std::erase_if(receiving_, [&](const auto& weak) {
    const auto letter = weak.lock();
    if (letter == nullptr || letter->advance()) {
      return true;
    }
    if (letter->competes_with(call)) {
      earlier.push_back(letter);
    }
    return false;
  });
  const bool is_send = call.kind == c10d::OpType::SEND;
  const auto names = [ranks = global_ranks_](int rank) { return c10::str("rank ", ranks[static_cast<size_t>(rank)]); };
  auto made = std::make_shared<GlooLetter>(backend_, std::move(call), std::move(earlier), names);
  if (!is_send) {
    receiving_.push_back(made);
  }
  return made;
}

std::shared_ptr<GlooCollective> Gloo::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return ending_ || !queued_.empty(); });
  if (broken_ || queued_.empty()) {
    return current_ = nullptr;
  }
  current_ = queued_.front();
  queued_.pop_front();
  return current_;
}

void Gloo::work() {
  at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::end
  uint64_t number = 0;
  while (const auto collective = next()) {
    try {
      compare(*collective, ++number);
      auto begun = begin_on_gloo(*backend_, collective->call);
      collective->wait_for(begun.works);
      collective->carried(std::move(begun.then));
    } catch (...) {
      collective->abort(std::current_exception());
    }
  }
}

void Gloo::compare(GlooCollective& collective, uint64_t number) {
  const auto& call = collective.call;
  const size_t size = global_ranks_.size();
  const size_t mine = static_cast<size_t>(backend_->getRank());
  Tensors inputs{bytes_of(call, number, size)};
  TensorLists outputs(1);
  for (size_t peer = 0; peer < size; ++peer) {
    outputs.front().push_back(at::empty_like(inputs.front()));
  }
  c10d::AllgatherOptions options;
  options.timeout = call.timeout;
  try {
    collective.wait_for({backend_->allgather(outputs, inputs, options)});
  } catch (const std::exception& error) {
    const auto own = said_in(inputs.front(), "");
    std::rethrow_exception(failure(self(), c10::str("in ", phrase(own), ", gloo says: ", error.what())));
  }
  std::vector<Said> ranks;
  ranks.reserve(size);
  for (size_t peer = 0; peer < size; ++peer) {
    ranks.push_back(said_in(outputs.front()[peer], called(peer)));
  }
  for (const auto& peer : ranks) {
    if (auto told = difference(ranks[mine], peer); !told.empty()) {
      std::lock_guard<std::mutex> lock(mutex_);
      std::rethrow_exception(failure(self(), c10::str("collective ", number, " of group ", name_, ": ", told)));
    }
  }
  if (auto told = disagreement_of_all(ranks); !told.empty()) {
    std::rethrow_exception(failure(self(), told));
  }
}

} // namespace torch_ext::sim
