// Processes that must stay alive. Any thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>

namespace torch_ext::sim {

// Whether one process lives, known from its pidfd, which no other process can take over.
class Process {
 public:
  // Empty where there is no such process, or the kernel knows no pidfds (before Linux 5.3). The same object for all who
  // ask for one pid while one of them lives, so that groups share descriptors.
  static std::shared_ptr<const Process> find(pid_t pid);

  explicit Process(pid_t pid, int file) : pid_(pid), file_(file) {}
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool has_ended() const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int file_;
};

} // namespace torch_ext::sim
