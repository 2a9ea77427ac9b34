// Threads for work that blocks or computes: gRPC's own threads must do neither.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace expertmesh {

// A fixed number of threads and a bounded queue. Thread-safe. The destructor runs what is queued
// and joins.
class Executor {
 public:
  // `name` is what debuggers show (at most 15 characters).
  Executor(const std::string& name, int num_threads, size_t max_queued);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // False, with `task` not run, when max_queued tasks wait already.
  [[nodiscard]] bool TryRun(absl::AnyInvocable<void()> task);

  size_t max_queued() const { return max_queued_; }

 private:
  void Work();

  const size_t max_queued_;
  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace expertmesh
