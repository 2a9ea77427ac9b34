#include "router/placement/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kFingerprint[] = "f00d";
constexpr char kNumerics[] = "numerics-1";
const absl::Duration kLong = absl::Seconds(60);

const std::function<bool()> kNeverCancelled = [] { return false; };

// Layers 1 (4 experts) and 3 (6 experts).
ModelDescription Model() {
  ModelDescription model;
  for (const auto& [layer, experts] : std::map<int32_t, int32_t>{{1, 4}, {3, 6}}) {
    LayerDescription& description = model.layers.emplace_back();
    description.layer = layer;
    description.router.num_experts = experts;
  }
  return model;
}

ServerRegistration Registration(const std::string& name, const std::string& address,
                                std::map<int32_t, std::vector<int32_t>> experts) {
  ServerRegistration registration;
  registration.name = name;
  registration.address = address;
  registration.pid = 1234;
  registration.model_fingerprint = kFingerprint;
  registration.numerics = kNumerics;
  registration.experts = std::move(experts);
  return registration;
}

const std::map<int32_t, std::vector<int32_t>> kAll = {{1, {0, 1, 2, 3}}, {3, {0, 1, 2, 3, 4, 5}}};
const std::map<int32_t, std::vector<int32_t>> kLower = {{1, {0, 1}}, {3, {0, 1, 2}}};
const std::map<int32_t, std::vector<int32_t>> kUpper = {{1, {2, 3}}, {3, {3, 4, 5}}};

// Never called: these tests are about who is there.
class NoBackend : public ExpertBackend {
 public:
  explicit NoBackend(std::function<void()> destroyed = [] {}) : destroyed_(std::move(destroyed)) {}
  ~NoBackend() override { destroyed_(); }
  uint64_t Dispatch(ExpertSlice, Done) override {
    ADD_FAILURE();
    return 0;
  }
  void Cancel(uint64_t) override { FAIL(); }

 private:
  const std::function<void()> destroyed_;
};

class MembershipTest : public ::testing::Test {
 protected:
  uint64_t MustRegister(const std::string& name, const std::string& address,
                        const std::map<int32_t, std::vector<int32_t>>& experts) {
    const auto ticket = membership_.Register(Registration(name, address, experts));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or(0);
  }
  uint64_t MustServe(const std::string& name, const std::string& address,
                     const std::map<int32_t, std::vector<int32_t>>& experts) {
    const uint64_t ticket = MustRegister(name, address, experts);
    membership_.SetServing(ticket, std::make_shared<NoBackend>());
    return ticket;
  }
  std::string Refusal(const ServerRegistration& registration) {
    const uint64_t epoch = membership_.epoch();
    const auto ticket = membership_.Register(registration);
    EXPECT_EQ(membership_.epoch() != epoch, ticket.ok());
    return ticket.ok() ? "accepted" : ticket.status().ToString();
  }
  ServerState StateOf(const std::string& name) {
    for (const ServerRecord& record : membership_.Servers()) {
      if (record.registration.name == name) return record.state;
    }
    ADD_FAILURE() << name << " is not listed";
    return ServerState::kDown;
  }
  // Waits for nothing.
  absl::StatusOr<LayerPlacement> Place(int32_t layer, const std::vector<int32_t>& experts) {
    return membership_.WaitFor(layer, experts, absl::InfinitePast(), kNeverCancelled);
  }

  Membership membership_{Model(), kFingerprint, kNumerics, kLong};
};

TEST_F(MembershipTest, RefusesWhatDoesNotFitTheModel) {
  const ServerRegistration good = Registration("a", "host:1", kAll);
  ServerRegistration bad = good;
  bad.model_fingerprint = "beef";
  EXPECT_THAT(Refusal(bad), AllOf(HasSubstr("FAILED_PRECONDITION: registration.model_fingerprint"),
                                  HasSubstr("beef"), HasSubstr(kFingerprint)));
  bad = good;
  bad.numerics = "numerics-2";
  EXPECT_THAT(Refusal(bad), AllOf(HasSubstr("FAILED_PRECONDITION: registration.numerics"),
                                  HasSubstr("numerics-2"), HasSubstr(kNumerics)));
  EXPECT_THAT(Refusal(Registration("a", "", kAll)),
              HasSubstr("INVALID_ARGUMENT: registration.address"));
  const std::string most(128, 'x');
  for (const std::string& name :
       {std::string(), most + "x", std::string("a b"), std::string("a\n"), std::string("a\0b", 3),
        std::string("\x7f"), std::string("caf\xc3\xa9")}) {
    EXPECT_THAT(Refusal(Registration(name, "host:1", kAll)),
                AllOf(HasSubstr("INVALID_ARGUMENT: registration.name: expected 1 to 128 printable"),
                      HasSubstr(absl::CHexEscape(name.substr(0, 128)))));
  }
  EXPECT_THAT(Refusal(Registration("a", "host:1", {{2, {0}}})),
              HasSubstr("INVALID_ARGUMENT: registration.layers: the model has no MoE layer 2"));
  for (const auto& [ids, wrong] : std::vector<std::pair<std::vector<int32_t>, int32_t>>{
           {{4}, 4}, {{-1, 2}, -1}, {{0, 1, 1}, 1}, {{2, 0}, 0}, {{0, 100}, 100}}) {
    EXPECT_THAT(Refusal(Registration("a", "host:1", {{1, ids}})),
                AllOf(HasSubstr("INVALID_ARGUMENT: registration.layers: layer 1"),
                      HasSubstr("[0, 4)"), HasSubstr(absl::StrCat("got ", wrong))));
  }
  EXPECT_THAT(membership_.Servers(), IsEmpty());
  EXPECT_EQ(Refusal(good), "accepted");
  EXPECT_EQ(Refusal(Registration(most, "host:2", kAll)), "accepted");
}

TEST_F(MembershipTest, ListsServersByName) {
  const uint64_t b = MustRegister("b", "host:2", kUpper);
  const uint64_t a = MustServe("a", "host:1", kLower);
  membership_.SetRows(a, 17);
  membership_.SetTimes(a, 18, 19);
  std::vector<ServerRecord> servers = membership_.Servers();
  ASSERT_EQ(servers.size(), 2u);
  EXPECT_EQ(servers[0].registration.name, "a");
  EXPECT_EQ(servers[0].registration.address, "host:1");
  EXPECT_EQ(servers[0].registration.pid, 1234);
  EXPECT_EQ(servers[0].registration.experts, kLower);
  EXPECT_EQ(servers[0].state, ServerState::kServing);
  EXPECT_EQ(servers[0].rows, 17u);
  EXPECT_EQ(servers[0].gather_us, 18u);
  EXPECT_EQ(servers[0].gemm_us, 19u);
  EXPECT_EQ(servers[1].registration.name, "b");
  EXPECT_EQ(servers[1].state, ServerState::kConnecting);
  EXPECT_EQ(servers[1].rows, 0u);
  membership_.SetDown(b);
  EXPECT_EQ(StateOf("b"), ServerState::kDown);
  EXPECT_EQ(StateOf("a"), ServerState::kServing);
}

TEST_F(MembershipTest, PlacesEveryExpertOnAServerThatHoldsIt) {
  const auto lower = std::make_shared<NoBackend>();
  const auto upper = std::make_shared<NoBackend>();
  membership_.SetServing(MustRegister("b-lower", "host:1", kLower), lower);
  membership_.SetServing(MustRegister("a-upper", "host:2", kUpper), upper);
  MustRegister("c-connecting", "host:3", kAll);  // holds no expert as long as it cannot be reached
  const auto placement = Place(3, {0, 1, 2, 3, 4, 5});
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_EQ(placement->epoch, membership_.epoch());
  ASSERT_EQ(placement->server_of_expert.size(), 6u);
  for (int32_t e = 0; e < 6; ++e) {
    const int32_t server = placement->server_of_expert[e];
    ASSERT_GE(server, 0) << e;
    EXPECT_EQ(placement->backends.at(server).get(), e < 3 ? lower.get() : upper.get()) << e;
  }
}

TEST_F(MembershipTest, ALiveServersNameIsTakenElsewhere) {
  MustRegister("a", "host:1", kLower);  // connecting counts as live
  EXPECT_THAT(Refusal(Registration("a", "host:2", kLower)),
              AllOf(HasSubstr("ALREADY_EXISTS: registration.name"), HasSubstr("host:1"),
                    HasSubstr("host:2")));
  EXPECT_EQ(membership_.Servers().at(0).registration.address, "host:1");
}

TEST_F(MembershipTest, TheSameAddressReplaces) {
  const uint64_t before = MustServe("a", "host:1", kLower);
  membership_.SetRows(before, 5);
  const uint64_t after = MustRegister("a", "host:1", kUpper);
  EXPECT_NE(after, before);
  EXPECT_EQ(StateOf("a"), ServerState::kConnecting);
  EXPECT_EQ(membership_.Servers().at(0).rows, 0u);
  EXPECT_EQ(membership_.Servers().at(0).registration.experts, kUpper);
  EXPECT_EQ(Place(1, {0}).status().code(), absl::StatusCode::kUnavailable);
  membership_.SetServing(after, std::make_shared<NoBackend>());
  EXPECT_TRUE(Place(1, {2, 3}).ok());
  EXPECT_EQ(Place(1, {0}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(MembershipTest, AfterItWentDownANameIsFree) {
  membership_.SetDown(MustServe("a", "host:1", kAll));
  EXPECT_EQ(Place(1, {0}).status().code(), absl::StatusCode::kUnavailable);
  MustServe("a", "host:2", kAll);
  ASSERT_EQ(membership_.Servers().size(), 1u);
  EXPECT_EQ(membership_.Servers()[0].registration.address, "host:2");
  EXPECT_TRUE(Place(1, {0}).ok());
}

TEST_F(MembershipTest, TicketsThatAreNotCurrentDoNothing) {
  const uint64_t replaced = MustRegister("a", "host:1", kAll);
  const uint64_t current = MustRegister("a", "host:1", kAll);
  const uint64_t down = MustServe("b", "host:2", kLower);
  membership_.SetDown(down);
  const uint64_t epoch = membership_.epoch();
  for (const uint64_t ticket : {replaced, down, uint64_t{0}, uint64_t{999}}) {
    membership_.SetServing(ticket, std::make_shared<NoBackend>());
    membership_.SetRows(ticket, 5);
    membership_.SetDown(ticket);
    EXPECT_EQ(StateOf("a"), ServerState::kConnecting) << ticket;
    EXPECT_EQ(StateOf("b"), ServerState::kDown) << ticket;
    EXPECT_EQ(membership_.Servers()[0].rows + membership_.Servers()[1].rows, 0u) << ticket;
    EXPECT_EQ(Place(1, {0}).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(membership_.epoch(), epoch);
  membership_.SetServing(current, std::make_shared<NoBackend>());
  EXPECT_EQ(StateOf("a"), ServerState::kServing);
}

TEST_F(MembershipTest, TheEpochFollowsTheSetOfServers) {
  std::vector<uint64_t> epochs = {membership_.epoch()};
  EXPECT_GT(epochs[0], 0u);
  const auto changed = [&] {
    epochs.push_back(membership_.epoch());
    return epochs[epochs.size() - 2] < epochs.back();
  };
  const uint64_t ticket = MustRegister("a", "host:1", kAll);
  changed();
  membership_.SetServing(ticket, std::make_shared<NoBackend>());
  EXPECT_TRUE(changed());
  membership_.SetRows(ticket, 3);
  EXPECT_FALSE(changed());
  EXPECT_TRUE(Place(1, {0}).ok());
  EXPECT_FALSE(changed());
  membership_.SetDown(ticket);
  EXPECT_TRUE(changed());
  membership_.SetDown(ticket);
  EXPECT_FALSE(changed());
}

// A backend closes connections when it goes; that must not happen under the lock.
TEST_F(MembershipTest, BackendsAreDestroyedOutsideTheLock) {
  int destroyed = 0;
  const auto backend = [&] {
    return std::make_shared<NoBackend>([&] {
      membership_.epoch();
      ++destroyed;
    });
  };
  const uint64_t first = MustRegister("a", "host:1", kAll);
  membership_.SetServing(first, backend());
  const uint64_t second = MustRegister("a", "host:1", kAll);
  EXPECT_EQ(destroyed, 1);
  membership_.SetServing(first, backend());  // refused
  EXPECT_EQ(destroyed, 2);
  membership_.SetServing(second, backend());
  membership_.SetServing(second, backend());
  EXPECT_EQ(destroyed, 3);
  membership_.SetDown(second);
  EXPECT_EQ(destroyed, 4);
}

TEST_F(MembershipTest, MissingNamesTheFirstLayerThatLacksExperts) {
  EXPECT_EQ(membership_.Missing(), "layer 1: no live server holds experts 0-3");
  const uint64_t a = MustServe("a", "host:1", {{1, {0, 2, 3}}, {3, {0, 1, 4, 5}}});
  EXPECT_EQ(membership_.Missing(), "layer 1: no live server holds expert 1");
  MustServe("b", "host:2", {{1, {1}}});
  EXPECT_EQ(membership_.Missing(), "layer 3: no live server holds experts 2-3");
  MustServe("c", "host:3", {{3, {2, 3}}});
  EXPECT_EQ(membership_.Missing(), "");
  membership_.SetDown(a);
  EXPECT_EQ(membership_.Missing(), "layer 1: no live server holds experts 0, 2-3");
}

TEST_F(MembershipTest, OnServingChangeIsCalledAtOnceAndOnChangesOnly) {
  std::vector<bool> calls;
  membership_.OnServingChange([&calls](bool serving) { calls.push_back(serving); });
  const uint64_t a = MustServe("a", "host:1", kLower);
  EXPECT_THAT(calls, ElementsAre(false));
  const uint64_t b = MustServe("b", "host:2", kUpper);
  EXPECT_THAT(calls, ElementsAre(false, true));
  const uint64_t c = MustServe("c", "host:3", kLower);
  membership_.SetDown(a);  // c has the same experts
  EXPECT_THAT(calls, ElementsAre(false, true));
  membership_.SetDown(c);
  membership_.SetDown(b);
  EXPECT_THAT(calls, ElementsAre(false, true, false));
  membership_.OnServingChange(nullptr);
  MustServe("d", "host:4", kAll);
  EXPECT_THAT(calls, ElementsAre(false, true, false));
  membership_.OnServingChange([&calls](bool serving) { calls.push_back(serving); });
  EXPECT_THAT(calls, ElementsAre(false, true, false, true));
}

TEST_F(MembershipTest, WaitForWaitsForServersThatHaveNotComeYet) {
  MustServe("a", "host:1", kLower);
  // Nobody waits for what is there.
  EXPECT_TRUE(membership_.WaitFor(1, {0, 1}, absl::InfiniteFuture(), kNeverCancelled).ok());
  std::atomic<bool> registered = false;
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(100));
    const uint64_t ticket = MustRegister("b", "host:2", kUpper);
    absl::SleepFor(absl::Milliseconds(50));
    registered = true;
    membership_.SetServing(ticket, std::make_shared<NoBackend>());
  });
  const auto placement = membership_.WaitFor(1, {0, 3}, absl::InfiniteFuture(), kNeverCancelled);
  EXPECT_TRUE(placement.ok()) << placement.status();
  EXPECT_TRUE(registered);
  late.join();
}

TEST_F(MembershipTest, WaitForFailsAtOnceForExpertsThatWereServedBefore) {
  membership_.SetDown(MustServe("a", "host:1", kUpper));
  const absl::Time start = absl::Now();
  // 0 and 1 may still come, 2 and 3 were there.
  const auto placement = membership_.WaitFor(1, {3, 2, 0}, absl::InfiniteFuture(), kNeverCancelled);
  EXPECT_LT(absl::Now() - start, kLong / 2);
  EXPECT_EQ(placement.status().ToString(),
            "UNAVAILABLE: layer 1: no live server holds experts 0, 2-3");
}

// A call that waits hears of a server that came and went meanwhile.
TEST_F(MembershipTest, WaitForFailsWhenAServerGoesWhileItWaits) {
  std::thread other([&] {
    absl::SleepFor(absl::Milliseconds(50));
    membership_.SetDown(MustServe("a", "host:1", kLower));
  });
  const absl::Time start = absl::Now();
  const auto placement = membership_.WaitFor(1, {0, 3}, absl::InfiniteFuture(), kNeverCancelled);
  EXPECT_EQ(placement.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, kLong / 2);
  other.join();
}

TEST_F(MembershipTest, WaitForEndsWithTheDeadline) {
  const absl::Time start = absl::Now();
  const auto placement =
      membership_.WaitFor(3, {5, 5, 4}, start + absl::Milliseconds(50), kNeverCancelled);
  const absl::Duration waited = absl::Now() - start;
  EXPECT_GE(waited, absl::Milliseconds(50));
  EXPECT_LT(waited, kLong / 2);
  EXPECT_EQ(placement.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(placement.status().message()),
              HasSubstr("layer 3: no live server holds experts 4-5"));
}

TEST_F(MembershipTest, WaitForEndsWhenTheCallerGivesUp) {
  std::atomic<bool> cancelled = false;
  std::thread caller([&] {
    absl::SleepFor(absl::Milliseconds(50));
    cancelled = true;
  });
  const auto placement = membership_.WaitFor(3, {5}, absl::InfiniteFuture(),
                                             [&cancelled] { return cancelled.load(); });
  EXPECT_EQ(placement.status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(cancelled);
  caller.join();
}

TEST_F(MembershipTest, WaitForKnowsItsLayers) {
  const auto placement = membership_.WaitFor(2, {0}, absl::InfiniteFuture(), kNeverCancelled);
  EXPECT_EQ(placement.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(placement.status().message()), HasSubstr("layer 2"));
  EXPECT_TRUE(membership_.WaitFor(1, {}, absl::InfiniteFuture(), kNeverCancelled).ok());
}

TEST(Membership, WaitForEndsWithTheGracePeriod) {
  const absl::Time start = absl::Now();
  const Membership membership(Model(), kFingerprint, kNumerics, absl::Milliseconds(100));
  const auto placement = membership.WaitFor(3, {2}, absl::InfiniteFuture(), kNeverCancelled);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(100));
  EXPECT_EQ(placement.status().ToString(),
            "UNAVAILABLE: layer 3: no live server holds expert 2 (none has registered since the "
            "router started)");
  // Nobody waits any more.
  const absl::Time again = absl::Now();
  EXPECT_FALSE(membership.WaitFor(3, {2}, absl::InfiniteFuture(), kNeverCancelled).ok());
  EXPECT_LT(absl::Now() - again, kLong / 2);
}

// For ThreadSanitizer: everything at once.
TEST_F(MembershipTest, TakesCallsFromManyThreads) {
  std::atomic<int> changes = 0;
  membership_.OnServingChange([&changes](bool) { ++changes; });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i) {
        const std::string name = absl::StrCat("server-", t);
        const uint64_t ticket = MustServe(name, name + ":1", t % 2 == 0 ? kLower : kUpper);
        membership_.SetRows(ticket, i);
        EXPECT_EQ(StateOf(name), ServerState::kServing);
        const auto placement =
            Place(3, t % 2 == 0 ? std::vector<int32_t>{0} : std::vector<int32_t>{5});
        EXPECT_TRUE(placement.ok()) << placement.status();
        (void)membership_.Missing();
        membership_.SetDown(ticket);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(changes % 2, 1);  // one at once; not serving in the end, as in the beginning
  EXPECT_EQ(membership_.Servers().size(), 4u);
}

TEST(IdRanges, Text) {
  EXPECT_EQ(IdRanges({}), "");
  EXPECT_EQ(IdRanges({7}), "7");
  EXPECT_EQ(IdRanges({0, 1}), "0-1");
  EXPECT_EQ(IdRanges({0, 1, 2, 3, 7}), "0-3, 7");
  EXPECT_EQ(IdRanges({0, 2, 4, 5}), "0, 2, 4-5");
}

}  // namespace
}  // namespace expertmesh
