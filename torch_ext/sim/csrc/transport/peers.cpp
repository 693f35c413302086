#include "peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>

namespace torch_ext::sim {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 // the same number on every architecture
#endif

std::shared_ptr<const Process> Process::find(pid_t pid) {
  static auto* mutex = new std::mutex(); // never freed: groups may outlive static objects
  static auto* known = new std::map<pid_t, std::weak_ptr<const Process>>();
  std::lock_guard<std::mutex> lock(*mutex);
  if (auto found = (*known)[pid].lock(); found != nullptr && !found->has_ended()) {
    return found;
  }
  const int file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (file < 0) {
    return nullptr;
  }
  auto made = std::make_shared<const Process>(pid, file);
  (*known)[pid] = made;
  return made;
}

Process::~Process() {
  ::close(file_);
}

bool Process::has_ended() const {
  pollfd asked{file_, POLLIN, 0};
  return ::poll(&asked, 1, 0) == 1;
}

} // namespace torch_ext::sim
