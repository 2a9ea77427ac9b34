// Dynamic batching: calls that share rounds get what they would get alone, in bits, in errors and
// in time.
#include "router/dispatch/batcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/text.h"
#include "tests/unit/router_cluster.h"

namespace {

// Where tensors get their memory. More than this at once is refused.
std::atomic<size_t> largest_allocation = std::numeric_limits<size_t>::max();

}  // namespace

extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  void* memory = nullptr;
  return size <= largest_allocation && posix_memalign(&memory, alignment, size) == 0 ? memory
                                                                                     : nullptr;
}

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr absl::Duration kLong = absl::Seconds(30);  // nothing takes so long, on any machine

void WaitUntil(const char* what, const std::function<bool()>& condition) {
  const absl::Time give_up = absl::Now() + kLong;
  while (!condition()) {
    ASSERT_LT(absl::Now(), give_up) << "in vain for: " << what;
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// Servers that keep every slice until the test says what becomes of it.
class Desk {
 public:
  struct Task {
    size_t server = 0;
    uint64_t id = 0;
    Store store;
    ExpertSlice slice;
    ExpertBackend::Done done;
  };

  FakeServer::Handler handler() {
    return [this](size_t server, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
      absl::MutexLock lock(&mutex_);
      tasks_.push_back({server, ++ids_[server], store, std::move(slice), std::move(done)});
    };
  }
  FakeServer::OnCancel on_cancel() {
    return [this](size_t server, uint64_t id) {
      absl::MutexLock lock(&mutex_);
      cancelled_.emplace_back(server, id);
    };
  }
  size_t waiting() {
    absl::MutexLock lock(&mutex_);
    return tasks_.size();
  }
  std::vector<std::pair<size_t, uint64_t>> cancelled() {
    absl::MutexLock lock(&mutex_);
    return cancelled_;
  }
  // The oldest slice of a server, once there is one.
  Task Take(size_t server = 0) {
    Task task;
    WaitUntil("a slice", [&] {
      absl::MutexLock lock(&mutex_);
      const auto found = std::find_if(tasks_.begin(), tasks_.end(),
                                      [&](const Task& t) { return t.server == server; });
      if (found == tasks_.end()) return false;
      task = std::move(*found);
      tasks_.erase(found);
      return true;
    });
    return task;
  }
  // Computes the oldest slice of a server; returns the number of its rows.
  int64_t Serve(size_t server = 0) {
    Task task = Take(server);
    if (task.store == nullptr) return -1;
    const int64_t rows = task.slice.rows.values.dim(0);
    std::move(task.done)(Compute(*task.store, task.slice));
    return rows;
  }
  // The server goes instead.
  void Lose(size_t server) {
    Task task = Take(server);
    if (task.done) std::move(task.done)(absl::UnavailableError("gone"));
  }

 private:
  absl::Mutex mutex_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::map<size_t, uint64_t> ids_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<size_t, uint64_t>> cancelled_ ABSL_GUARDED_BY(mutex_);
};

// A call under way.
class Caller {
 public:
  Caller(Router& router, ForwardCall call) {
    call.cancelled = [this] {
      ++asked_;
      return cancelled_.load();
    };
    router.Forward(std::move(call), [this](absl::StatusOr<ForwardResult> answer) {
      absl::MutexLock lock(&mutex_);
      result_ = std::move(answer);
      answered_ = true;
    });
  }
  ~Caller() { result().IgnoreError(); }

  bool answered() {
    absl::MutexLock lock(&mutex_);
    return answered_;
  }
  const absl::StatusOr<ForwardResult>& result() {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&answered_), kLong));
    return result_;
  }
  std::string text() { return result().ok() ? "OK" : result().status().ToString(); }
  void Cancel() { cancelled_ = true; }
  // Has come to where somebody looks after it: queued, or in a round.
  void WaitQueued() {
    const int before = asked_;
    WaitUntil("the call to be looked at", [&] { return asked_ > before; });
  }

 private:
  std::atomic<int> asked_ = 0;
  std::atomic<bool> cancelled_ = false;
  absl::Mutex mutex_;
  bool answered_ = false;
  absl::StatusOr<ForwardResult> result_ = absl::InternalError("not answered");
};

class BatcherTest : public ::testing::Test {
 protected:
  // Experts 0-3, 4-7, 8-11 on servers 0, 1, 2.
  std::unique_ptr<Router> ThreeServers(const BatchingOptions& batching = {}) {
    return Cluster(3, batching);
  }
  std::unique_ptr<Router> Cluster(int servers, const BatchingOptions& batching = {}) {
    RouterOptions options;
    options.batching = batching;
    return MakeCluster(checkpoint_, servers, desk_.handler(), options, desk_.on_cancel());
  }
  // Another server with what `of` of `servers` holds.
  void AddReplica(Router& router, size_t server, int of, int servers = 3) {
    AddServer(router, server, *ExpertStore::ShardOf(checkpoint_->model(), of, servers),
              desk_.handler(), desk_.on_cancel());
  }
  std::unique_ptr<Caller> Start(Router& router, int64_t begin, int64_t tokens,
                                absl::Time deadline = absl::InfiniteFuture()) {
    ForwardCall call = Call(Slice(tokens_, begin, tokens));
    call.deadline = deadline;
    return std::make_unique<Caller>(router, std::move(call));
  }
  void ExpectTokens(Caller& caller, int64_t begin, int64_t tokens) {
    ASSERT_TRUE(caller.result().ok()) << caller.result().status();
    ExpectResult(*caller.result(), expected_, DType::kF32, begin, tokens);
  }
  std::set<size_t> ServersOf(int64_t token) const {
    std::set<size_t> servers;
    for (int k = 0; k < kTopK; ++k) servers.insert(expected_.ids[token * kTopK + k] / 4);
    return servers;
  }
  // The first token from `from` on that needs exactly these of three servers.
  int64_t TokenOf(const std::set<size_t>& servers, int64_t from = 0) const {
    for (int64_t t = from; t < tokens_.dim(0); ++t) {
      if (ServersOf(t) == servers) return t;
    }
    ADD_FAILURE() << "no token for these servers";
    return 0;
  }
  std::string ExpertsOf(int64_t token, size_t server) const {
    std::set<int32_t> ids;
    for (int k = 0; k < kTopK; ++k) {
      const int32_t id = expected_.ids[token * kTopK + k];
      if (static_cast<size_t>(id / 4) == server) ids.insert(id);
    }
    return IdRanges(std::vector<int32_t>(ids.begin(), ids.end()));
  }

  Desk desk_;
  const std::shared_ptr<const Checkpoint> checkpoint_ = MakeModel(DType::kBF16);
  const Tensor tokens_ = Tokens(DType::kF32, 257);
  const Expected expected_ = Restate(*checkpoint_, kLayer, tokens_);
};

TEST_F(BatcherTest, WhatQueuesIsMergedIntoTheNextRound) {
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 3);
  WaitUntil("the first round", [&] { return desk_.waiting() == 1; });
  std::vector<std::unique_ptr<Caller>> callers;
  for (int c = 0; c < 5; ++c) {
    callers.push_back(Start(*router, 10 * c, c + 1));
    callers.back()->WaitQueued();
  }
  EXPECT_EQ(desk_.waiting(), 1u);
  EXPECT_EQ(desk_.Serve(), 3);
  EXPECT_EQ(desk_.Serve(), 1 + 2 + 3 + 4 + 5);
  ExpectTokens(*first, 0, 3);
  for (int c = 0; c < 5; ++c) ExpectTokens(*callers[c], 10 * c, c + 1);
  const RoundCounters& counters = router->counters(kLayer);
  EXPECT_EQ(counters.rounds, 2u);
  EXPECT_EQ(counters.requests, 6u);
  EXPECT_EQ(counters.tokens, 18u);
  EXPECT_EQ(router->counters(0).rounds, 0u);
}

TEST_F(BatcherTest, NothingIsMergedWhereBatchingIsOff) {
  const auto router = Cluster(1, {.rounds_per_layer = 0});
  std::vector<std::unique_ptr<Caller>> callers;
  for (int c = 0; c < 6; ++c) callers.push_back(Start(*router, 10 * c, 2));
  WaitUntil("a round of each", [&] { return desk_.waiting() == 6; });
  for (int c = 0; c < 6; ++c) EXPECT_EQ(desk_.Serve(), 2);
  for (int c = 0; c < 6; ++c) ExpectTokens(*callers[c], 10 * c, 2);
  EXPECT_EQ(router->counters(kLayer).rounds, 6u);
  EXPECT_EQ(router->counters(kLayer).requests, 6u);
}

TEST_F(BatcherTest, SeveralRoundsOfALayerAtATime) {
  const auto router = Cluster(1, {.rounds_per_layer = 2});
  std::vector<std::unique_ptr<Caller>> callers;
  for (int c = 0; c < 4; ++c) {
    callers.push_back(Start(*router, 10 * c, 1));
    if (c < 2) WaitUntil("a round", [&] { return static_cast<int>(desk_.waiting()) == c + 1; });
    callers.back()->WaitQueued();
  }
  EXPECT_EQ(desk_.waiting(), 2u);
  EXPECT_EQ(desk_.Serve(), 1);
  EXPECT_EQ(desk_.Serve(), 1);
  EXPECT_EQ(desk_.Serve(), 2);
  for (int c = 0; c < 4; ++c) ExpectTokens(*callers[c], 10 * c, 1);
}

TEST_F(BatcherTest, LayersDoNotWaitForEachOther) {
  const auto router = Cluster(1);
  const auto one = Start(*router, 0, 1);
  WaitUntil("a round", [&] { return desk_.waiting() == 1; });
  ForwardCall call = Call(Slice(tokens_, 0, 1));
  call.layer = 0;
  Caller other(*router, call);
  WaitUntil("that of the other layer", [&] { return desk_.waiting() == 2; });
  desk_.Serve();
  desk_.Serve();
  ExpectTokens(*one, 0, 1);
  EXPECT_EQ(other.text(), "OK");
}

TEST_F(BatcherTest, ARoundHasOneDtype) {
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  const Tensor bf16 = Tokens(DType::kBF16, 6);
  const Expected expected = Restate(*checkpoint_, kLayer, bf16);
  std::vector<std::unique_ptr<Caller>> callers;
  for (int c = 0; c < 6; ++c) {
    callers.push_back(c % 2 ? Start(*router, c, 1)
                            : std::make_unique<Caller>(*router, Call(Slice(bf16, c, 1))));
    callers.back()->WaitQueued();
  }
  for (const int64_t rows : {1, 3, 3}) EXPECT_EQ(desk_.Serve(), rows);
  for (int c = 0; c < 6; ++c) {
    if (c % 2) {
      ExpectTokens(*callers[c], c, 1);
    } else {
      ASSERT_EQ(callers[c]->text(), "OK");
      ExpectResult(*callers[c]->result(), expected, DType::kBF16, c, 1);
    }
  }
}

TEST_F(BatcherTest, ARoundWaitsForCompanyIfToldTo) {
  const auto router = Cluster(1, {.wait = absl::Milliseconds(300), .max_tokens = 5});
  const absl::Time start = absl::Now();
  const auto one = Start(*router, 0, 1);
  one->WaitQueued();
  const auto two = Start(*router, 7, 2);
  EXPECT_EQ(desk_.Serve(), 3);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  ExpectTokens(*one, 0, 1);
  ExpectTokens(*two, 7, 2);
}

TEST_F(BatcherTest, AFullRoundWaitsForNobody) {
  const auto router = Cluster(1, {.wait = kLong * 2, .max_tokens = 5});
  const auto one = Start(*router, 0, 3);
  one->WaitQueued();
  EXPECT_EQ(desk_.waiting(), 0u);
  const auto two = Start(*router, 7, 2);
  EXPECT_EQ(desk_.Serve(), 5);
  ExpectTokens(*one, 0, 3);
  ExpectTokens(*two, 7, 2);
}

TEST_F(BatcherTest, SmallCallsComeBetweenTheRoundsOfALargeOne) {
  const auto router = Cluster(1, {.max_tokens = 10});
  const auto large = Start(*router, 0, 100);
  WaitUntil("two of its rounds", [&] { return desk_.waiting() == 2; });
  const auto small = Start(*router, 200, 2);
  small->WaitQueued();
  int rounds = 0;
  while (!small->answered() && rounds < 20) {
    EXPECT_LE(desk_.Serve(), 10);
    ++rounds;
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_LE(rounds, 6);  // of 11
  ExpectTokens(*small, 200, 2);
  EXPECT_FALSE(large->answered());
  std::thread server([&] {
    while (!large->answered()) {
      if (desk_.waiting() > 0) desk_.Serve();
    }
  });
  ExpectTokens(*large, 0, 100);
  server.join();
}

TEST_F(BatcherTest, ARoundTakesNoMoreThanItsBound) {
  const auto router = Cluster(1, {.max_tokens = 10});
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  std::vector<std::unique_ptr<Caller>> callers;
  for (const int64_t tokens : {4, 4, 4, 1}) {  // the third does not fit, and nobody overtakes it
    callers.push_back(Start(*router, 0, tokens));
    callers.back()->WaitQueued();
  }
  for (const int64_t rows : {1, 8, 5}) EXPECT_EQ(desk_.Serve(), rows);
  for (const auto& caller : callers) EXPECT_EQ(caller->text(), "OK");
}

TEST_F(BatcherTest, WhoseDeadlinePassesIsAnsweredAndTheOthersGoOn) {
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  const absl::Time deadline = absl::Now() + absl::Milliseconds(400);
  const auto hurried = Start(*router, 1, 2, deadline);
  const auto patient = Start(*router, 5, 3);
  hurried->WaitQueued();
  patient->WaitQueued();
  EXPECT_EQ(desk_.Serve(), 1);
  WaitUntil("the merged round", [&] { return desk_.waiting() == 1; });
  EXPECT_EQ(hurried->text(),
            "DEADLINE_EXCEEDED: the deadline passed while the experts were computing");
  EXPECT_GE(absl::Now(), deadline);
  EXPECT_LT(absl::Now(), deadline + absl::Seconds(2));
  EXPECT_FALSE(patient->answered());
  EXPECT_TRUE(desk_.cancelled().empty());
  Desk::Task task = desk_.Take();
  EXPECT_EQ(task.slice.rows.values.dim(0), 5);
  EXPECT_EQ(task.slice.deadline, absl::InfiniteFuture());  // the latest of all
  std::move(task.done)(Compute(*task.store, task.slice));
  ExpectTokens(*patient, 5, 3);
}

TEST_F(BatcherTest, WhoGivesUpIsAnsweredAndTheOthersGoOn) {
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  const auto leaves = Start(*router, 1, 2);
  const auto stays = Start(*router, 5, 3);
  leaves->WaitQueued();
  stays->WaitQueued();
  EXPECT_EQ(desk_.Serve(), 1);
  WaitUntil("the merged round", [&] { return desk_.waiting() == 1; });
  leaves->Cancel();
  EXPECT_EQ(leaves->text(), "CANCELLED: the caller has given up");
  EXPECT_FALSE(stays->answered());
  EXPECT_TRUE(desk_.cancelled().empty());
  EXPECT_EQ(desk_.Serve(), 5);
  ExpectTokens(*stays, 5, 3);
}

TEST_F(BatcherTest, WithNobodyLeftTheServersAreTold) {
  const auto router = ThreeServers();
  const auto first = Start(*router, TokenOf({0}), 1);
  WaitUntil("a round", [&] { return desk_.waiting() == 1; });
  const auto leaves = Start(*router, TokenOf({0, 1}), 1);
  const auto late = Start(*router, TokenOf({1, 2}), 1, absl::Now() + absl::Milliseconds(400));
  leaves->WaitQueued();
  late->WaitQueued();
  desk_.Serve(0);
  WaitUntil("the merged round", [&] { return desk_.waiting() == 3; });
  // Server 0 has rows of the first alone, server 2 of the second, server 1 of both.
  leaves->Cancel();
  WaitUntil("word to server 0", [&] { return !desk_.cancelled().empty(); });
  EXPECT_THAT(desk_.cancelled(), ElementsAre(std::pair<size_t, uint64_t>(0, 2)));
  EXPECT_THAT(late->text(), HasSubstr("DEADLINE_EXCEEDED"));
  WaitUntil("word to the others", [&] { return desk_.cancelled().size() == 3; });
  EXPECT_THAT(desk_.cancelled(), UnorderedElementsAre(std::pair<size_t, uint64_t>(0, 2),
                                                      std::pair<size_t, uint64_t>(1, 1),
                                                      std::pair<size_t, uint64_t>(2, 1)));
  // What comes nevertheless disturbs nobody.
  for (size_t s = 0; s < 3; ++s) desk_.Serve(s);
  const int64_t token = TokenOf({0});
  const auto next = Start(*router, token, 1);
  desk_.Serve(0);
  ExpectTokens(*next, token, 1);
}

TEST_F(BatcherTest, WhoWaitsForARoundCanLeaveToo) {
  const auto router = Cluster(1, {.patience = kLong * 2});
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  const auto leaves = Start(*router, 1, 2);
  const auto late = Start(*router, 3, 2, absl::Now() + absl::Milliseconds(100));
  const auto stays = Start(*router, 5, 3);
  leaves->WaitQueued();
  stays->WaitQueued();
  leaves->Cancel();
  EXPECT_EQ(leaves->text(), "CANCELLED: the caller has given up");
  EXPECT_EQ(late->text(),
            "DEADLINE_EXCEEDED: the deadline passed while the call waited for its round");
  EXPECT_EQ(desk_.Serve(), 1);
  EXPECT_EQ(desk_.Serve(), 3);
  ExpectTokens(*stays, 5, 3);
}

TEST_F(BatcherTest, ALargeCallThatFailsTakesNoMoreRounds) {
  const auto router = Cluster(1, {.max_tokens = 10});
  const auto large = Start(*router, 0, 100);
  WaitUntil("two of its rounds", [&] { return desk_.waiting() == 2; });
  large->Cancel();
  EXPECT_THAT(large->text(), HasSubstr("CANCELLED"));
  WaitUntil("word to the server", [&] { return desk_.cancelled().size() == 2; });
  const auto next = Start(*router, 200, 1);
  WaitUntil("its round", [&] { return desk_.waiting() == 3; });
  for (const int64_t rows : {10, 10, 1}) EXPECT_EQ(desk_.Serve(), rows);
  ExpectTokens(*next, 200, 1);
}

TEST_F(BatcherTest, AStuckServerHoldsUpOnlyThoseWhoNeedIt) {
  const auto router = ThreeServers({.patience = absl::Milliseconds(200)});
  const int64_t needs = TokenOf({0, 1}), other = TokenOf({0, 2}), later = TokenOf({2});
  const auto first = Start(*router, needs, 1);
  first->WaitQueued();
  desk_.Serve(0);  // and server 1 is stuck
  // The next round is not held back for longer than the patience, and those who need server 1 too
  // have no part in it: there is no round that it could hold back then.
  const auto stuck = Start(*router, needs, 1);
  const auto healthy = Start(*router, other, 1);
  EXPECT_EQ(desk_.Serve(0), 1);
  desk_.Serve(2);
  ExpectTokens(*healthy, other, 1);
  for (int i = 0; i < 3; ++i) {
    const auto again = Start(*router, later, 1);
    const auto too = Start(*router, needs, 2);
    desk_.Serve(2);
    ExpectTokens(*again, later, 1);
    too->Cancel();
    EXPECT_THAT(too->text(), HasSubstr("CANCELLED"));
  }
  EXPECT_FALSE(first->answered() || stuck->answered());
  EXPECT_EQ(desk_.waiting(), 1u);
  const auto more = Start(*router, needs, 1);
  EXPECT_EQ(desk_.Serve(1), 1);  // it goes on: those who waited share a round
  ExpectTokens(*first, needs, 1);
  EXPECT_EQ(desk_.Serve(0), 2);
  EXPECT_EQ(desk_.Serve(1), 2);
  ExpectTokens(*stuck, needs, 1);
  ExpectTokens(*more, needs, 1);
}

TEST_F(BatcherTest, AStuckServerIsNotForgottenWithItsCallers) {
  const auto router = ThreeServers({.patience = absl::Seconds(3)});
  const int64_t needs = TokenOf({0, 1}), healthy = TokenOf({0, 2});
  const auto first = Start(*router, needs, 1, absl::Now() + absl::Milliseconds(3100));
  desk_.Serve(0);
  EXPECT_THAT(first->text(), HasSubstr("DEADLINE_EXCEEDED"));
  // Its slice was given up, and so is the knowledge that it is stuck only when it replies.
  const absl::Time start = absl::Now();
  const auto second = Start(*router, needs, 1);
  desk_.Serve(0);
  for (int i = 0; i < 3; ++i) {
    const auto other = Start(*router, healthy, 1);
    desk_.Serve(0);
    desk_.Serve(2);
    ExpectTokens(*other, healthy, 1);
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));  // the first of them would have waited for 3
  desk_.Take(1);                                     // of the first call
  desk_.Serve(1);
  ExpectTokens(*second, needs, 1);
}

TEST_F(BatcherTest, AServerThatAnswersIsNotStuckHoweverLongItsRoundsTake) {
  const auto router = Cluster(1, {.max_tokens = 10, .patience = absl::Milliseconds(100)});
  const auto large = Start(*router, 0, 60);
  WaitUntil("two rounds", [&] { return desk_.waiting() == 2; });
  for (int round = 0; round < 4; ++round) {
    absl::SleepFor(absl::Milliseconds(150));  // the second is older than the patience too
    EXPECT_EQ(desk_.Serve(), 10);
    WaitUntil("two rounds again", [&] { return desk_.waiting() == 2; });
  }
  desk_.Serve();
  desk_.Serve();
  ExpectTokens(*large, 0, 60);
}

TEST_F(BatcherTest, AServerThatDiesFailsOnlyThoseWhoNeedIt) {
  const auto router = ThreeServers();
  const auto first = Start(*router, TokenOf({0}), 1);
  first->WaitQueued();
  const int64_t one = TokenOf({1}), mixed = TokenOf({0, 1}), other = TokenOf({0, 2});
  const auto a = Start(*router, one, 1);
  const auto b = Start(*router, mixed, 1);
  const auto c = Start(*router, other, 1);
  for (Caller* caller : {a.get(), b.get(), c.get()}) caller->WaitQueued();
  desk_.Serve(0);
  Desk::Task task = desk_.Take(1);
  EXPECT_EQ(task.slice.rows.values.dim(0), 2);
  std::move(task.done)(absl::UnavailableError("its stream broke"));
  for (const auto& [caller, token] : {std::pair{a.get(), one}, {b.get(), mixed}}) {
    const std::string experts = ExpertsOf(token, 1);
    const bool several = experts.find_first_of("-,") != std::string::npos;
    EXPECT_EQ(caller->text(), absl::StrCat("UNAVAILABLE: layer 1: lost the server of expert",
                                           several ? "s " : " ", experts, ": its stream broke"));
  }
  EXPECT_FALSE(c->answered());
  EXPECT_EQ(desk_.Serve(0), 2);
  desk_.Serve(2);
  ExpectTokens(*c, other, 1);
}

TEST_F(BatcherTest, AServerThatLeavesBeforeTheRoundFailsOnlyThoseWhoNeedIt) {
  RouterOptions options;
  auto router = MakeRouter(checkpoint_, options);
  std::vector<uint64_t> tickets;
  for (int s = 0; s < 3; ++s) {
    tickets.push_back(
        AddServer(*router, s, *ExpertStore::ShardOf(checkpoint_->model(), s, 3), desk_.handler()));
  }
  const auto first = Start(*router, TokenOf({0}), 1);
  first->WaitQueued();
  const int64_t mixed = TokenOf({0, 1}), other = TokenOf({0, 2});
  const auto needs = Start(*router, mixed, 1);
  const auto does_not = Start(*router, other, 1);
  needs->WaitQueued();
  does_not->WaitQueued();
  router->membership()->SetDown(tickets[1]);
  desk_.Serve(0);
  EXPECT_THAT(needs->text(), HasSubstr("UNAVAILABLE: layer 1: no live server holds expert"));
  EXPECT_THAT(needs->text(), HasSubstr(ExpertsOf(mixed, 1)));
  EXPECT_EQ(desk_.Serve(0), 1);
  desk_.Serve(2);
  ExpectTokens(*does_not, other, 1);
}

TEST_F(BatcherTest, ARowThatIsNotFiniteFailsOnlyItsCall) {
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 1);
  first->WaitQueued();
  std::vector<std::unique_ptr<Caller>> callers;
  for (int c = 0; c < 20; ++c) {
    ForwardCall call = Call(Slice(tokens_, 12 * c, 5));
    call.first_row = 1000 * c;
    if (c == 13) call.hidden_states.as<float>()[3 * kHidden + 2] = std::nanf("");
    callers.push_back(std::make_unique<Caller>(*router, std::move(call)));
    if (c != 13) callers.back()->WaitQueued();
  }
  EXPECT_EQ(callers[13]->text(),
            "INVALID_ARGUMENT: hidden_states: row 13003 is not finite at column 2");
  EXPECT_EQ(desk_.Serve(), 1);
  EXPECT_EQ(desk_.Serve(), 19 * 5);
  for (int c = 0; c < 20; ++c) {
    if (c != 13) ExpectTokens(*callers[c], 12 * c, 5);
  }
}

// While one lives, no tensor gets more bytes than these.
class MemoryLimit {
 public:
  explicit MemoryLimit(size_t bytes) { largest_allocation = bytes; }
  ~MemoryLimit() { largest_allocation = std::numeric_limits<size_t>::max(); }
};

TEST_F(BatcherTest, WhatThereIsNoMemoryForFailsAndTheOthersGoOn) {
  constexpr size_t kRowBytes = kHidden * sizeof(float);
  const auto router = Cluster(1);
  const auto first = Start(*router, 0, 1);
  WaitUntil("the first round", [&] { return desk_.waiting() == 1; });
  const auto second = Start(*router, 0, 60);
  second->WaitQueued();
  const auto third = Start(*router, 60, 60);
  third->WaitQueued();
  ForwardCall too_large = Call(Slice(tokens_, 0, 101));
  Desk::Task task = desk_.Take();
  absl::StatusOr<Tensor> reply = Compute(*task.store, task.slice);
  {
    MemoryLimit limit(100 * kRowBytes);
    Caller large(*router, std::move(too_large));
    EXPECT_THAT(large.text(), HasSubstr("RESOURCE_EXHAUSTED: the router is out of memory"));
    std::move(task.done)(std::move(reply));  // the second and the third are gathered for one round
    for (Caller* caller : {second.get(), third.get()}) {
      EXPECT_THAT(caller->text(), HasSubstr("RESOURCE_EXHAUSTED: the router is out of memory"));
    }
  }
  EXPECT_EQ(desk_.waiting(), 0u);
  EXPECT_THAT(desk_.cancelled(), IsEmpty());
  ExpectTokens(*first, 0, 1);
  const auto last = Start(*router, 0, 120);
  EXPECT_EQ(desk_.Serve(), 120);
  ExpectTokens(*last, 0, 120);
}

// A round lasts until its last caller goes; the rows of those that have gone do not.
TEST_F(BatcherTest, RowsGoWithTheirCall) {
  const auto router = ThreeServers();
  const int64_t alone = TokenOf({0}), both = TokenOf({0, 1});
  const auto first = Start(*router, TokenOf({2}), 1);  // so that the others share a round
  WaitUntil("the first round", [&] { return desk_.waiting() == 1; });
  // Answered, and given up.
  std::vector<std::weak_ptr<std::byte>> rows;
  std::vector<std::unique_ptr<Caller>> callers;
  for (const int64_t token : {alone, both, both}) {
    ForwardCall call = Call(Slice(tokens_, token, 1));
    rows.push_back(call.hidden_states.buffer());
    callers.push_back(std::make_unique<Caller>(*router, std::move(call)));
    callers.back()->WaitQueued();
  }
  EXPECT_EQ(desk_.Serve(2), 1);
  Desk::Task held = desk_.Take(1);
  EXPECT_EQ(desk_.Serve(0), 3);
  ExpectTokens(*callers[0], alone, 1);
  callers[1]->Cancel();
  EXPECT_THAT(callers[1]->text(), HasSubstr("CANCELLED"));
  WaitUntil("their rows are gone", [&] { return rows[0].expired() && rows[1].expired(); });
  EXPECT_FALSE(rows[2].expired());
  EXPECT_FALSE(callers[2]->answered());
  std::move(held.done)(Compute(*held.store, held.slice));
  ExpectTokens(*callers[2], both, 1);
  ExpectTokens(*first, TokenOf({2}), 1);
}

// Random sizes, threads and order of the replies, calls that leave in the middle; everything on the
// thread that brings it, or on the executor's.
TEST_F(BatcherTest, EveryMergeHasTheSameBits) {
  for (const BatchingOptions& batching :
       {BatchingOptions{}, BatchingOptions{.rounds_per_layer = 0},
        BatchingOptions{.rounds_per_layer = 3, .max_tokens = 7},
        BatchingOptions{.light_elements = 0},
        BatchingOptions{.max_tokens = 7, .light_elements = 20 * kHidden},
        BatchingOptions{.wait = absl::Microseconds(300), .max_tokens = 40},
        BatchingOptions{.overlapping_rounds = 3, .max_reply_bytes = 1}}) {
    Pool pool(3);
    RouterOptions options;
    options.batching = batching;
    const auto router = MakeCluster(checkpoint_, 3, pool.handler(), options);
    std::vector<std::thread> threads;
    for (int c = 0; c < 8; ++c) {
      threads.emplace_back([&, c] {
        std::mt19937 rng(c);
        for (int i = 0; i < 12; ++i) {
          const int64_t tokens = 1 + rng() % (rng() % 4 == 0 ? 60 : 4);
          const int64_t begin = rng() % (257 - tokens);
          Caller caller(*router, Call(Slice(tokens_, begin, tokens)));
          if (rng() % 5 == 0) caller.Cancel();
          if (caller.result().ok()) {
            ExpectTokens(caller, begin, tokens);
          } else {
            EXPECT_EQ(caller.text(), "CANCELLED: the caller has given up");
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// --- others take over
// ------------------------------------------------------------------------------------

TEST_F(BatcherTest, OfAMergedRoundGoesOnWhatOthersHold) {
  const auto router = ThreeServers();
  AddReplica(*router, 3, 0);
  const int64_t of0 = TokenOf({0}), of1 = TokenOf({1}), of2 = TokenOf({2});
  const auto first = Start(*router, of2, 1);
  WaitUntil("the first round", [&] { return desk_.waiting() == 1; });
  const auto moves = Start(*router, of0, 1);
  moves->WaitQueued();
  const auto fails = Start(*router, of1, 1);
  fails->WaitQueued();
  EXPECT_EQ(desk_.Serve(2), 1);
  ExpectTokens(*first, of2, 1);
  desk_.Lose(0);
  EXPECT_FALSE(moves->answered());
  desk_.Lose(1);
  EXPECT_THAT(fails->text(), HasSubstr("UNAVAILABLE: layer 1: lost the server of expert"));
  EXPECT_EQ(desk_.Serve(3), 1);
  ExpectTokens(*moves, of0, 1);
  EXPECT_EQ(desk_.waiting(), 0u);
}

TEST_F(BatcherTest, WhatIsTakenOverCountsAsARoundInFlight) {
  const auto router = ThreeServers();
  AddReplica(*router, 3, 0);
  const int64_t of0 = TokenOf({0}), of1 = TokenOf({1});
  const auto moves = Start(*router, of0, 1);
  WaitUntil("the first round", [&] { return desk_.waiting() == 1; });
  const auto waits = Start(*router, of1, 1);
  waits->WaitQueued();
  desk_.Lose(0);
  EXPECT_EQ(desk_.waiting(), 1u);
  EXPECT_EQ(desk_.Serve(3), 1);
  ExpectTokens(*moves, of0, 1);
  EXPECT_EQ(desk_.Serve(1), 1);
  ExpectTokens(*waits, of1, 1);
}

TEST_F(BatcherTest, NothingIsTakenOverThatManyServersWentWith) {
  const auto router = Cluster(1);
  for (const size_t server : {1, 2, 3}) AddReplica(*router, server, 0, 1);
  const auto call = Start(*router, 0, 5);
  for (const size_t server : {0, 1, 2}) {
    EXPECT_FALSE(call->answered());
    desk_.Lose(server);
  }
  EXPECT_THAT(call->text(), HasSubstr("UNAVAILABLE: layer 1: lost the server of expert"));
  EXPECT_EQ(desk_.waiting(), 0u);
}

TEST_F(BatcherTest, WhoGivesUpWhileOthersTakeOverIsLetGo) {
  const auto router = Cluster(1, {.max_tokens = 10});
  AddReplica(*router, 1, 0, 1);
  const auto call = Start(*router, 0, 20);
  WaitUntil("two of its rounds", [&] { return desk_.waiting() == 2; });
  EXPECT_EQ(desk_.Serve(0), 10);
  desk_.Lose(0);
  EXPECT_EQ(desk_.waiting(), 1u);
  call->Cancel();
  EXPECT_THAT(call->text(), HasSubstr("CANCELLED"));
  WaitUntil("word to the server", [&] { return desk_.cancelled().size() == 1; });
  EXPECT_EQ(desk_.cancelled()[0].first, 1u);
  desk_.Serve(1);  // late
  const auto next = Start(*router, 3, 4);
  EXPECT_EQ(desk_.Serve(0), 4);
  ExpectTokens(*next, 3, 4);
}

// One server of a call goes and another one fails, and both are heard of at once: while somebody is
// answered.
TEST_F(BatcherTest, WhatFailsElsewhereTooIsNotTakenOver) {
  const auto router = ThreeServers({.rounds_per_layer = 2});
  AddReplica(*router, 3, 0);
  const auto call = Start(*router, TokenOf({0, 1}), 1);
  Desk::Task gone = desk_.Take(0), failed = desk_.Take(1);
  router->Forward(Call(Slice(tokens_, TokenOf({2}), 1)), [&](absl::StatusOr<ForwardResult> answer) {
    EXPECT_TRUE(answer.ok()) << answer.status();
    std::move(gone.done)(absl::UnavailableError("gone"));
    std::move(failed.done)(absl::InternalError("broken"));
  });
  EXPECT_EQ(desk_.Serve(2), 1);
  if (desk_.waiting() > 0) {  // it is answered in any case
    for (const size_t server : {1, 3}) desk_.Serve(server);
  }
  EXPECT_EQ(call->text(), "INTERNAL: broken");
}

}  // namespace
}  // namespace expertmesh
