#include "client/cli/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "common/status.h"

namespace expertmesh {

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& argv,
                                                 bool capture) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  if (access(argv[0].c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat("cannot start ", argv[0], ": ", strerror(errno)));
  }
  int ends[2] = {-1, -1};
  if (capture ? pipe2(ends, O_CLOEXEC) != 0
              : (ends[1] = open("/dev/null", O_WRONLY | O_CLOEXEC)) < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot open a pipe: ", strerror(errno)));
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    // Only what is safe between fork and exec in a process with threads.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // the parent was gone already
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    dup2(ends[1], STDOUT_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[1]);
  if (pid < 0) {
    if (capture) close(ends[0]);
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start ", argv[0], ": ", strerror(errno)));
  }
  return ChildProcess(pid, ends[0]);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept { *this = std::move(other); }

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(output_, other.output_);
  std::swap(ended_, other.ended_);
  std::swap(line_, other.line_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (output_ >= 0) close(output_);
  if (pid_ > 0 && !ended_) {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::optional<std::string> ChildProcess::Poll() {
  int status = 0;
  if (pid_ > 0 && !ended_ && waitpid(pid_, &status, WNOHANG) == pid_) {
    ended_ = WIFEXITED(status) ? absl::StrCat("exit code ", WEXITSTATUS(status))
                               : absl::StrCat("signal ", WTERMSIG(status));
  }
  return ended_;
}

void ChildProcess::Signal(int number) {
  if (pid_ > 0 && !ended_) kill(pid_, number);
}

absl::StatusOr<std::string> ChildProcess::ReadLine(absl::Time deadline) {
  while (true) {
    pollfd poll_fd = {output_, POLLIN, 0};
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    const int ready =
        left <= 0 ? 0 : poll(&poll_fd, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return absl::DeadlineExceededError("it printed nothing in time");
    char c;
    if (read(output_, &c, 1) != 1) return absl::UnavailableError("it closed its standard output");
    if (c == '\n') return std::exchange(line_, "");
    line_.push_back(c);
  }
}

}  // namespace expertmesh
