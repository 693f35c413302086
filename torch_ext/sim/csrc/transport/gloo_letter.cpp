#include "gloo_letter.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fingerprint.h"
#include "layout.h"
#include "transport.h"

namespace torch_ext::sim {
namespace {

using c10d::OpType;

struct Envelope {
  int64_t elements;
  int8_t type;
  char site[kSiteBytes];
};

at::Tensor envelope_of(const Call& call) {
  at::Tensor bytes = at::zeros({sizeof(Envelope)}, at::kByte);
  if (call.kind == OpType::SEND) {
    auto& written = *reinterpret_cast<Envelope*>(bytes.mutable_data_ptr<uint8_t>());
    written.elements = call.inputs.front().numel();
    written.type = static_cast<int8_t>(call.inputs.front().scalar_type());
    copy_text(written.site, kSiteBytes, call.site);
  }
  return bytes;
}

// The bytes of a tensor, as gloo takes them.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.view(at::kByte);
}

} // namespace

GlooLetter::GlooLetter(
    c10::intrusive_ptr<c10d::Backend> gloo, Call call, std::vector<std::shared_ptr<GlooLetter>> earlier,
    std::function<std::string(int)> called)
    : gloo_(std::move(gloo)),
      call_(std::move(call)),
      called_(std::move(called)),
      envelope_(envelope_of(call_)),
      earlier_(std::move(earlier)) {
  constexpr int kTags = std::numeric_limits<int>::max() / 2;
  TORCH_CHECK_VALUE(call_.tag < kTags, "simccl over gloo takes tags below ", kTags, ", but got ", call_.tag, ".");
  const int tag = 2 * call_.tag;
  Tensors envelope{envelope_};
  if (call_.kind == OpType::SEND) {
    works_.push_back(gloo_->send(envelope, call_.root, tag));
    Tensors data{bytes_of(call_.inputs.front())};
    works_.push_back(gloo_->send(data, call_.root, tag + 1));
  } else if (call_.kind == OpType::RECV) {
    works_.push_back(gloo_->recv(envelope, call_.root, tag));
  } else {
    works_.push_back(gloo_->recvAnysource(envelope, tag));
  }
  thread_ = std::thread([this] { run(); });
}

GlooLetter::~GlooLetter() {
  abort(std::make_exception_ptr(std::runtime_error("simccl: " + call_.name + " was given up.")));
  thread_.join();
}

bool GlooLetter::competes_with(const Call& other) const {
  const bool any = call_.kind == OpType::RECVANYSOURCE || other.kind == OpType::RECVANYSOURCE;
  return call_.kind != OpType::SEND && other.kind != OpType::SEND && call_.tag == other.tag &&
      (any || call_.root == other.root);
}

bool GlooLetter::is_over() {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

bool GlooLetter::advance() {
  return is_over();
}

void GlooLetter::finish(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [this] { return over_; };
  if (timeout == kNoTimeout) {
    changed_.wait(lock, is_over); // gloo has a time limit of its own
  } else if (!changed_.wait_for(lock, timeout, is_over)) {
    lock.unlock();
    abort(failure(
        called_(gloo_->getRank()),
        c10::str(
            call_.name, call_.site.empty() ? "" : " at " + call_.site, " timed out: it was not over after ",
            timeout.count(), " ms.")));
    lock.lock();
  }
  if (why_) {
    std::rethrow_exception(why_);
  }
}

void GlooLetter::abort(const std::exception_ptr& why) {
  std::vector<Work> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_) {
      return;
    }
    over_ = true;
    why_ = why;
    works = works_;
    changed_.notify_all();
  }
  for (const auto& work : works) {
    work->abort();
  }
}

void GlooLetter::end(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_) {
    over_ = true;
    why_ = why;
  }
  changed_.notify_all();
}

void GlooLetter::wait_for(const Work& work) const {
  if (!work->wait(kNoTimeout)) {
    throw std::runtime_error("simccl: " + call_.name + " was aborted.");
  }
}

void GlooLetter::remember(const Work& work) {
  std::lock_guard<std::mutex> lock(mutex_);
  works_.push_back(work);
  asked_ = true;
  changed_.notify_all();
  if (over_) {
    work->abort();
  }
}

void GlooLetter::wait_for_earlier() {
  constexpr std::chrono::milliseconds kSlice{20}; // after which to look whether this one was given up
  for (const auto& earlier : std::exchange(earlier_, {})) {
    std::unique_lock<std::mutex> lock(earlier->mutex_);
    while (!earlier->changed_.wait_for(lock, kSlice, [&] { return earlier->asked_ || earlier->over_; })) {
      lock.unlock();
      if (is_over()) {
        return;
      }
      lock.lock();
    }
  }
}

void GlooLetter::receive() {
  const auto envelope = works_.front();
  wait_for_earlier();
  wait_for(envelope);
  source_ = call_.kind == OpType::RECV ? call_.root : envelope->sourceRank();
  const auto& sent = *reinterpret_cast<const Envelope*>(envelope_.const_data_ptr<uint8_t>());
  const auto type = static_cast<at::ScalarType>(sent.type);
  const auto& to = call_.outputs.front();
  const bool agrees = sent.elements == to.numel() && type == to.scalar_type();
  // What does not fit is received all the same: the next letter lies behind it.
  Tensors data{
      agrees ? bytes_of(to) : at::empty({sent.elements * static_cast<int64_t>(c10::elementSize(type))}, at::kByte)};
  const Work work = gloo_->recv(data, source_, 2 * call_.tag + 1);
  remember(work);
  wait_for(work);
  if (!agrees) {
    const auto me = called_(gloo_->getRank());
    std::rethrow_exception(
        failure(me, unequal_letter(called_(source_), sent.elements, sent.type, sent.site, me, call_)));
  }
}

void GlooLetter::run() {
  at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::end
  try {
    if (call_.kind == OpType::SEND) {
      wait_for(works_[0]);
      wait_for(works_[1]);
    } else {
      receive();
    }
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
  }
}

} // namespace torch_ext::sim
