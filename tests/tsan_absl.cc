// Linked into every program that is built with ThreadSanitizer, which does not see the
// distribution's Abseil lock, because that is not instrumented. These definitions take the place of
// the library's: they call it, and tell ThreadSanitizer what it means. So what an absl::Mutex or an
// absl::Notification guards is no race, and what it does not guard still is one.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace absl {
namespace {

// Calls the library's function. The library evaluates other threads' conditions in any of them,
// under the lock, but before ThreadSanitizer is told.
template <typename Result, typename... Args>
Result CallLibrary(const char* symbol, Args... args) {
  const auto function = reinterpret_cast<Result (*)(Args...)>(dlsym(RTLD_NEXT, symbol));
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  struct End {
    ~End() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
  } end;
  return function(args...);
}

}  // namespace

#define SYMBOL(rest) "_ZN4absl7debian3" rest

void Mutex::Lock() {
  CallLibrary<void>(SYMBOL("5Mutex4LockEv"), this);
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  const bool locked = CallLibrary<bool>(SYMBOL("5Mutex7TryLockEv"), this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::Unlock() {
  __tsan_release(this);
  CallLibrary<void>(SYMBOL("5Mutex6UnlockEv"), this);
}

void Mutex::ReaderLock() {
  CallLibrary<void>(SYMBOL("5Mutex10ReaderLockEv"), this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  __tsan_release(this);
  CallLibrary<void>(SYMBOL("5Mutex12ReaderUnlockEv"), this);
}

void Mutex::LockWhen(const Condition& condition) {
  CallLibrary<void>(SYMBOL("5Mutex8LockWhenERKNS0_9ConditionE"), this, &condition);
  __tsan_acquire(this);
}

void Mutex::Await(const Condition& condition) {
  __tsan_release(this);
  CallLibrary<void>(SYMBOL("5Mutex5AwaitERKNS0_9ConditionE"), this, &condition);
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  __tsan_release(this);
  const bool result =
      CallLibrary<bool>(SYMBOL("5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"), this,
                        &condition, timeout);
  __tsan_acquire(this);
  return result;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  __tsan_release(this);
  const bool result = CallLibrary<bool>(
      SYMBOL("5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"), this, &condition, deadline);
  __tsan_acquire(this);
  return result;
}

void CondVar::Wait(Mutex* mutex) {
  __tsan_release(mutex);
  CallLibrary<void>(SYMBOL("7CondVar4WaitEPNS0_5MutexE"), this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  __tsan_release(mutex);
  const bool result = CallLibrary<bool>(
      SYMBOL("7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"), this, mutex, timeout);
  __tsan_acquire(mutex);
  return result;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  __tsan_release(mutex);
  const bool result = CallLibrary<bool>(SYMBOL("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"),
                                        this, mutex, deadline);
  __tsan_acquire(mutex);
  return result;
}

void Notification::Notify() {
  __tsan_release(this);
  CallLibrary<void>(SYMBOL("12Notification6NotifyEv"), this);
}

void Notification::WaitForNotification() const {
  CallLibrary<void>("_ZNK4absl7debian312Notification19WaitForNotificationEv", this);
  __tsan_acquire(const_cast<Notification*>(this));
}

}  // namespace absl
