#include "gloo_letter.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstddef>
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
    data_ = bytes_of(call_.inputs.front());
    Tensors data{data_};
    works_.push_back(gloo_->send(data, call_.root, tag + 1));
    opened_ = true;
  } else if (call_.kind == OpType::RECV) {
    works_.push_back(gloo_->recv(envelope, call_.root, tag));
  } else {
    works_.push_back(gloo_->recvAnysource(envelope, tag));
  }
}

GlooLetter::~GlooLetter() {
  if (watcher_.joinable()) {
    abort(std::make_exception_ptr(std::runtime_error("simccl: " + call_.name + " was given up.")));
    watcher_.join();
  }
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
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_ && !watcher_.joinable()) {
    watcher_ = std::thread([this] { wait_for_peer(kNoTimeout); });
  }
  return over_;
}

void GlooLetter::finish(std::chrono::milliseconds timeout) {
  wait_for_peer(timeout);
  std::lock_guard<std::mutex> lock(mutex_);
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
  }
  for (const auto& work : works) {
    work->abort();
  }
}

void GlooLetter::wait_for(const Work& work, std::chrono::milliseconds timeout) const {
  if (!work->wait(timeout)) {
    throw std::runtime_error("simccl: " + call_.name + " was aborted.");
  }
}

void GlooLetter::remember(Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  works_.push_back(work);
  if (over_) {
    work->abort();
  }
}

void GlooLetter::open(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> only_one(opening_);
  if (opened_) {
    return;
  }
  for (const auto& earlier : std::exchange(earlier_, {})) {
    try {
      earlier->open(timeout);
    } catch (...) {
      // Whoever waits for that one is told what became of it.
    }
  }
  const auto envelope = works_.front();
  wait_for(envelope, timeout);
  opened_ = true;
  source_ = call_.kind == OpType::RECV ? call_.root : envelope->sourceRank();
  const auto& sent = *reinterpret_cast<const Envelope*>(envelope_.const_data_ptr<uint8_t>());
  const auto type = static_cast<at::ScalarType>(sent.type);
  const auto& to = call_.outputs.front();
  const bool agrees = sent.elements == to.numel() && type == to.scalar_type();
  // What does not fit is received all the same: the next letter lies behind it.
  const auto unwanted =
      at::empty({agrees ? 0 : sent.elements * static_cast<int64_t>(c10::elementSize(type))}, at::kByte);
  if (!agrees) {
    disagreement_ = failure(
        called_(gloo_->getRank()),
        unequal_letter(called_(source_), sent.elements, sent.type, sent.site, called_(gloo_->getRank()), call_));
  }
  data_ = agrees ? bytes_of(to) : unwanted;
  Tensors data{data_};
  remember(gloo_->recv(data, source_, 2 * call_.tag + 1));
}

void GlooLetter::wait_for_peer(std::chrono::milliseconds timeout) {
  at::AutoDispatchBelowADInplaceOrView below; // see GlooCollective::end
  std::lock_guard<std::mutex> only_one(waiting_);
  if (is_over()) {
    return;
  }
  std::exception_ptr why;
  try {
    open(timeout);
    std::vector<Work> works;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      works = works_;
    }
    // gloo would wait for a second envelope if it were asked again.
    for (size_t i = call_.kind == OpType::SEND ? 0 : 1; i < works.size(); ++i) {
      wait_for(works[i], timeout);
    }
    why = disagreement_;
  } catch (...) {
    why = std::current_exception();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  why_ = over_ ? why_ : why;
  over_ = true;
}

} // namespace torch_ext::sim
