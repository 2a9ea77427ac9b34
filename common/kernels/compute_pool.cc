#include "common/kernels/compute_pool.h"

#include <pthread.h>

#include "common/numerics/flush_denormals.h"

namespace expertmesh {

ComputePool::ComputePool(int threads) : threads_(threads), barrier_(threads) {
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] {
      pthread_setname_np(pthread_self(), "compute");
      Work(i);
    });
  }
}

ComputePool::~ComputePool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void ComputePool::Run(absl::FunctionRef<void(int)> work) {
  absl::MutexLock one_at_a_time(&run_);
  if (threads_ > 1) {
    absl::MutexLock lock(&mutex_);
    work_ = &work;
    running_ = threads_ - 1;
    ++round_;
  }
  {
    const ScopedFlushDenormals flush;
    work(0);
  }
  if (threads_ > 1) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* running) { return *running == 0; }, &running_));
  }
}

void ComputePool::Work(int thread) {
  const ScopedFlushDenormals flush;
  uint64_t seen = 0;
  for (;;) {
    const absl::FunctionRef<void(int)>* work;
    {
      const auto called = [this, &seen]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return stopping_ || round_ != seen;
      };
      absl::MutexLock lock(&mutex_, absl::Condition(&called));
      if (stopping_) return;
      seen = round_;
      work = work_;
    }
    (*work)(thread);
    absl::MutexLock lock(&mutex_);
    --running_;
  }
}

}  // namespace expertmesh
