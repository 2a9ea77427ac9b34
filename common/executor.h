// Threads for work that blocks or takes long: gRPC's own threads must not be kept.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace expertmesh {

// Up to a number of threads, each started when it is first needed, and a bounded queue.
// Thread-safe. The destructor runs what is queued and joins.
class Executor {
 public:
  // `name` is what debuggers show (at most 15 characters).
  Executor(const std::string& name, int max_threads, size_t max_queued);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // False, with `task` not run, when max_queued tasks wait already, and when the system has no
  // thread for it and none runs yet.
  [[nodiscard]] bool TryRun(absl::AnyInvocable<void()> task);

  size_t max_queued() const { return max_queued_; }

 private:
  void Work();
  bool StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  const size_t max_threads_;
  const size_t max_queued_;
  absl::Mutex mutex_;
  absl::CondVar wake_;  // one idle thread for each task
  std::deque<absl::AnyInvocable<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that wait for a task
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertmesh
