#include "common/rpc/executor.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

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

TEST(Executor, NamesItsThreads) {
  std::string name(16, '\0');
  {
    Executor executor("a name that is too long", 1, 10);
    ASSERT_TRUE(executor.TryRun([&name] {
      // The name is set just after the thread's start.
      do pthread_getname_np(pthread_self(), name.data(), name.size());
      while (name[0] != 'a' || name[1] != ' ');
    }));
  }
  EXPECT_STREQ(name.c_str(), "a name that is ");
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
  absl::Notification next;
  ASSERT_TRUE(executor.TryRun([&next] { next.Notify(); }));
  next.WaitForNotification();
  EXPECT_TRUE(weak.expired());
}

}  // namespace
}  // namespace expertmesh
