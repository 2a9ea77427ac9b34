// Threads that compute one thing together.
#pragma once

#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace expertmesh {

// A fixed number of threads, the caller's among them. Thread-safe: one Run at a time, others wait.
class ComputePool {
 public:
  // threads >= 1.
  explicit ComputePool(int threads);
  ~ComputePool();
  ComputePool(const ComputePool&) = delete;
  ComputePool& operator=(const ComputePool&) = delete;

  int threads() const { return threads_; }

  // Calls work(i) for i in [0, threads), on a thread each and under ScopedFlushDenormals; i = 0 is
  // the caller. Returns when all have returned. `work` must not throw: the others would wait for
  // ever.
  void Run(absl::FunctionRef<void(int thread)> work);

  // Called by work on every thread as often: waits until all of them have come.
  void Barrier() {
    if (threads_ > 1) barrier_.arrive_and_wait();
  }

 private:
  void Work(int thread);

  const int threads_;
  std::barrier<> barrier_;
  absl::Mutex run_;  // held by the Run under way
  absl::Mutex mutex_;
  const absl::FunctionRef<void(int)>* work_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;  // number of Runs begun
  int running_ ABSL_GUARDED_BY(mutex_) = 0;     // workers that have not finished this one
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace expertmesh
