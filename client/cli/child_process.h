// A child process of `serve`.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

// Started by Start(); dies with the parent, whatever kills it. Not thread-safe.
class ChildProcess {
 public:
  // NOT_FOUND when there is no such program. Starts argv[0] with these arguments and an unblocked
  // signal mask. Its standard output goes to a pipe (ReadLine) when `capture` is set, else to
  // /dev/null; standard error is shared.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& argv, bool capture);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  // Kills it if it still runs.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // How it ended, for people, once it has; nothing while it runs.
  std::optional<std::string> Poll();
  // Sends a signal, if it still runs.
  void Signal(int number);
  // The next line of its standard output; UNAVAILABLE when it has closed it, DEADLINE_EXCEEDED
  // (call again).
  absl::StatusOr<std::string> ReadLine(absl::Time deadline);

 private:
  ChildProcess(pid_t pid, int output) : pid_(pid), output_(output) {}
  pid_t pid_ = -1;
  int output_ = -1;
  std::optional<std::string> ended_;
  std::string line_;  // what has come of the next line
};

}  // namespace expertmesh
