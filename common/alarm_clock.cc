#include "common/alarm_clock.h"

#include <pthread.h>

#include <utility>

#include "absl/time/clock.h"

namespace expertmesh {

AlarmClock::AlarmClock(const std::string& name) : thread_([this] { Work(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

AlarmClock::~AlarmClock() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.Signal();
  }
  thread_.join();
}

void AlarmClock::At(absl::Time time, absl::AnyInvocable<void()> task) {
  absl::MutexLock lock(&mutex_);
  const auto set = tasks_.emplace(time, std::move(task));
  if (set == tasks_.begin()) wake_.Signal();
}

void AlarmClock::Work() {
  while (true) {
    absl::AnyInvocable<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      while (!stopping_ && (tasks_.empty() || absl::Now() < tasks_.begin()->first)) {
        wake_.WaitWithDeadline(&mutex_,
                               tasks_.empty() ? absl::InfiniteFuture() : tasks_.begin()->first);
      }
      if (stopping_) return;
      task = std::move(tasks_.begin()->second);
      tasks_.erase(tasks_.begin());
    }
    task();
  }
}

}  // namespace expertmesh
