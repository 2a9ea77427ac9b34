#include "common/executor.h"

#include <pthread.h>

#include <exception>
#include <utility>

namespace expertmesh {

Executor::Executor(const std::string& name, int max_threads, size_t max_queued)
    : name_(name.substr(0, 15)), max_threads_(max_threads), max_queued_(max_queued) {}

Executor::~Executor() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool Executor::TryRun(absl::AnyInvocable<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (queue_.size() >= max_queued_) return false;
  queue_.push_back(std::move(task));
  // Once stopping, the threads that are there run the rest.
  if (!stopping_ && queue_.size() > idle_ && threads_.size() < max_threads_ && !StartThread() &&
      threads_.empty()) {
    task = std::move(queue_.back());  // to be destroyed without the lock
    queue_.pop_back();
    return false;
  }
  wake_.Signal();
  return true;
}

bool Executor::StartThread() {
  try {
    threads_.emplace_back([this] { Work(); });
  } catch (const std::exception&) {  // std::system_error: a limit of the system; std::bad_alloc
    return false;
  }
  pthread_setname_np(threads_.back().native_handle(), name_.c_str());
  return true;
}

void Executor::Work() {
  while (true) {
    absl::AnyInvocable<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      ++idle_;
      while (queue_.empty() && !stopping_) wake_.Wait(&mutex_);
      --idle_;
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task();
  }
}

}  // namespace expertmesh
