#include "common/alarm_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;

TEST(AlarmClock, RunsTasksInTheOrderOfTheirTimes) {
  AlarmClock clock("test");
  const absl::Time start = absl::Now();
  std::vector<int> ran;  // the clock's thread's alone
  absl::Notification done;
  // The third is set first, so that the clock has to be woken for the others.
  clock.At(start + absl::Milliseconds(300), [&] {
    EXPECT_GE(absl::Now(), start + absl::Milliseconds(300));
    ran.push_back(3);
    done.Notify();
  });
  clock.At(start + absl::Milliseconds(200), [&] {
    EXPECT_GE(absl::Now(), start + absl::Milliseconds(200));
    ran.push_back(2);
  });
  clock.At(absl::InfinitePast(), [&] { ran.push_back(1); });
  done.WaitForNotification();
  EXPECT_THAT(ran, ElementsAre(1, 2, 3));
}

TEST(AlarmClock, TasksSetTasks) {
  AlarmClock clock("test");
  absl::Notification done;
  clock.At(absl::Now(), [&] { clock.At(absl::Now(), [&] { done.Notify(); }); });
  done.WaitForNotification();
}

TEST(AlarmClock, TakesTasksFromAllThreads) {
  constexpr int kThreads = 4, kTasks = 200;
  std::atomic<int> ran = 0;
  AlarmClock clock("test");
  absl::Notification done;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTasks; ++i) {
        clock.At(absl::Now() + absl::Microseconds(i % 7), [&] {
          if (++ran == kThreads * kTasks) done.Notify();
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done.WaitForNotification();
}

TEST(AlarmClock, DropsWhatIsNotDueAtItsEnd) {
  const auto kept = std::make_shared<int>(0);
  {
    AlarmClock clock("test");
    clock.At(absl::InfiniteFuture(), [kept] { FAIL(); });
    EXPECT_EQ(kept.use_count(), 2);
  }
  EXPECT_EQ(kept.use_count(), 1);
}

}  // namespace
}  // namespace expertmesh
