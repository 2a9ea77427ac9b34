// Things that are to be done later, for code that has no thread to wait on.
#pragma once

#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace expertmesh {

// One thread that runs tasks at their times, one after the other. Thread-safe.
class AlarmClock {
 public:
  // `name` is what debuggers show (at most 15 characters).
  explicit AlarmClock(const std::string& name);
  // Waits for the task that is running; those that are not due are dropped.
  ~AlarmClock();
  AlarmClock(const AlarmClock&) = delete;
  AlarmClock& operator=(const AlarmClock&) = delete;

  // Runs `task` at that time or soon after. It must not block: others wait for it.
  void At(absl::Time time, absl::AnyInvocable<void()> task);

 private:
  void Work();

  absl::Mutex mutex_;
  absl::CondVar wake_;
  std::multimap<absl::Time, absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace expertmesh
