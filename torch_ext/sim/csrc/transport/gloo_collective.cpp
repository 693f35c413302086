#include "gloo_collective.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fingerprint.h"
#include "transport.h"

namespace torch_ext::sim {

bool GlooCollective::advance() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_carried();
}

void GlooCollective::abandon() {
  std::lock_guard<std::mutex> lock(mutex_);
  abandoned_ = true;
  changed_.notify_all();
}

void GlooCollective::wait_for(const std::vector<GlooWork>& works) {
  // Told by gloo's threads, which may outlive the wait.
  struct Left {
    size_t works;
    std::exception_ptr why;
  };
  const auto left = std::make_shared<Left>(works.size());
  for (const auto& work : works) {
    work->getFuture()->addCallback(
        [self = shared_from_this(), left](c10::ivalue::Future& done) {
          std::lock_guard<std::mutex> lock(self->mutex_);
          --left->works;
          if (done.hasError() && !left->why) {
            left->why = done.exception_ptr();
          }
          self->changed_.notify_all();
        },
        /*uses_future=*/false);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return abandoned_ || left->works == 0; }); // gloo has a time limit of its own
  if (left->works > 0) {
    throw std::runtime_error("simccl: " + call.name + " was aborted.");
  }
  if (left->why) {
    std::rethrow_exception(left->why);
  }
}

void GlooCollective::carried(std::function<void()> then) {
  std::lock_guard<std::mutex> lock(mutex_);
  then_ = over_ ? nullptr : std::move(then);
  carried_ = true;
  changed_.notify_all();
}

void GlooCollective::finish(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (timeout == kNoTimeout) {
    changed_.wait(lock, [this] { return is_carried(); });
  } else if (!changed_.wait_for(lock, timeout, [this] { return is_carried(); })) {
    why_ = failure(
        who_,
        c10::str(
            call.name, call.site.empty() ? "" : " at " + call.site, " timed out: it was not over after ",
            timeout.count(), " ms."));
  }
  end();
  if (why_) {
    std::rethrow_exception(why_);
  }
}

// With the lock held. Runs the last step, once.
void GlooCollective::end() {
  if (!over_ && !why_ && then_) {
    try {
      // Views made in inference mode may not be written by a thread that is not in it, unless below autograd.
      at::AutoDispatchBelowADInplaceOrView below;
      then_();
    } catch (...) {
      why_ = std::current_exception();
    }
  }
  over_ = true;
  then_ = nullptr;
  changed_.notify_all();
}

void GlooCollective::abort(const std::exception_ptr& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_) {
    why_ = why_ ? why_ : why;
    changed_.notify_all();
  }
}

} // namespace torch_ext::sim
