#include "common/executor.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace expertmesh {
namespace {

TEST(Executor, RefusesWhatDoesNotFitInTheQueue) {
  absl::Notification started, go;
  int ran = 0;  // by the one thread
  {
    Executor executor("test", 1, 2);
    EXPECT_EQ(executor.max_queued(), 2u);
    ASSERT_TRUE(executor.TryRun([&] {
      started.Notify();
      go.WaitForNotification();
      ++ran;
    }));
    started.WaitForNotification();  // it has left the queue
    EXPECT_TRUE(executor.TryRun([&] { ++ran; }));
    EXPECT_TRUE(executor.TryRun([&] { ++ran; }));
    bool refused_ran = false;
    EXPECT_FALSE(executor.TryRun([&] { refused_ran = true; }));
    EXPECT_FALSE(executor.TryRun([&] { refused_ran = true; }));
    EXPECT_EQ(ran, 0);
    go.Notify();
    // There is room again as the queue empties.
    while (!executor.TryRun([&] { ++ran; })) std::this_thread::yield();
    absl::Notification last;
    while (!executor.TryRun([&] { last.Notify(); })) std::this_thread::yield();
    last.WaitForNotification();
    EXPECT_FALSE(refused_ran);
  }
  EXPECT_EQ(ran, 4);
}

TEST(Executor, RunsWhatIsQueuedBeforeItIsGone) {
  std::atomic<int> ran = 0;
  {
    Executor executor("test", 2, 1000);
    for (int i = 0; i < 500; ++i) {
      ASSERT_TRUE(executor.TryRun([&] {
        std::this_thread::yield();
        // A task may queue another one, also while the executor is going.
        ASSERT_TRUE(executor.TryRun([&ran] { ++ran; }));
      }));
    }
  }
  EXPECT_EQ(ran, 500);
}

// Two tasks that wait for each other need two threads.
TEST(Executor, RunsOnAllItsThreads) {
  absl::Notification first, second;
  Executor executor("a name that is too long", 2, 10);
  ASSERT_TRUE(executor.TryRun([&] {
    first.Notify();
    second.WaitForNotification();
  }));
  ASSERT_TRUE(executor.TryRun([&] {
    second.Notify();
    first.WaitForNotification();
  }));
}

// Waits, at most for some seconds, until the condition holds.
bool Eventually(const std::function<bool()>& condition) {
  const absl::Time give_up = absl::Now() + absl::Seconds(10);
  while (!condition()) {
    if (absl::Now() > give_up) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(Executor, NamesItsThreads) {
  Executor executor("a name that is too long", 1, 10);
  ASSERT_TRUE(executor.TryRun([] {
    // A thread gets its name just after its start.
    EXPECT_TRUE(Eventually([] {
      char name[16];
      return pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 &&
             std::string(name) == "a name that is ";
    }));
  }));
}

TEST(Executor, TasksFromManyThreadsRunOnceEach) {
  constexpr int kThreads = 8, kTasks = 500;
  std::vector<std::atomic<int>> runs(kThreads * kTasks);
  std::atomic<int> refused = 0;
  {
    Executor executor("test", 3, 50);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kTasks; ++i) {
          while (!executor.TryRun([&runs, at = t * kTasks + i] { ++runs[at]; })) {
            ++refused;
            std::this_thread::yield();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const std::atomic<int>& times : runs) ASSERT_EQ(times, 1);
}

// What a task holds goes away with it, not with the executor.
TEST(Executor, DropsATaskOnceItHasRun) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = held;
  Executor executor("test", 1, 10);
  ASSERT_TRUE(executor.TryRun([held = std::move(held)] {}));
  EXPECT_TRUE(Eventually([&weak] { return weak.expired(); }));
}

// While one lives, no thread can be started: its stack would not fit in the address space.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge = before_;
    pthread_attr_setstacksize(&huge, size_t{1} << 47);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
  }
  ~NoThreads() { EXPECT_EQ(pthread_setattr_default_np(&before_), 0); }

 private:
  pthread_attr_t before_;
};

TEST(Executor, RefusesWhatNoThreadCanRun) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = held;
  absl::Notification ran;
  Executor executor("test", 2, 10);
  {
    NoThreads limit;
    EXPECT_FALSE(executor.TryRun([held = std::move(held)] { ADD_FAILURE(); }));
    EXPECT_TRUE(weak.expired());
  }
  ASSERT_TRUE(executor.TryRun([&] { ran.Notify(); }));
  ran.WaitForNotification();
}

TEST(Executor, DoesWithTheThreadsItHas) {
  absl::Notification started, go;
  int ran = 0;  // by the one thread
  {
    Executor executor("test", 3, 10);
    ASSERT_TRUE(executor.TryRun([&] {
      started.Notify();
      go.WaitForNotification();
    }));
    started.WaitForNotification();
    NoThreads limit;
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(executor.TryRun([&ran] { ++ran; }));
    go.Notify();
  }
  EXPECT_EQ(ran, 3);
}

// An idle thread is woken by every task, however they come.
TEST(Executor, WakesAThreadForEveryTask) {
  constexpr int kThreads = 4, kTimes = 300;
  Executor executor("test", kThreads, 100);
  for (int i = 0; i < kTimes; ++i) {
    std::atomic<int> running = 0;
    absl::BlockingCounter done(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      ASSERT_TRUE(executor.TryRun([&] {
        ++running;  // each waits for all
        EXPECT_TRUE(Eventually([&running] { return running == kThreads; }));
        done.DecrementCount();
      }));
    }
    done.Wait();
  }
}

}  // namespace
}  // namespace expertmesh
