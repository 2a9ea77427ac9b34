// The router over a small model: a whole forward against a restatement of the bit contract,
// whatever the cluster, and what goes wrong.
#include "router/dispatch/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "tests/unit/router_cluster.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RouterBitsTest : public ::testing::TestWithParam<std::tuple<DType, DType>> {};

TEST_P(RouterBitsTest, AreThoseOfTheContractWhateverTheCluster) {
  const auto [weights, dtype] = GetParam();
  const auto checkpoint = MakeModel(weights);
  ASSERT_NE(checkpoint, nullptr);
  const Tensor hidden_states = Tokens(dtype, 257);
  const Expected expected = Restate(*checkpoint, kLayer, hidden_states);
  EXPECT_EQ(std::set<int32_t>(expected.ids.begin(), expected.ids.end()).size(), kExperts)
      << "every expert should be used";
  for (const int num_servers : {1, 2, 3, 5, 15}) {  // some of the 15 hold no expert
    SCOPED_TRACE(absl::StrCat(num_servers, " servers"));
    for (const int64_t max_reply_bytes : {int64_t{1}, int64_t{1000}, int64_t{8 << 20}}) {
      RouterOptions options;
      options.batching.max_reply_bytes = max_reply_bytes;
      const auto router = MakeCluster(checkpoint, num_servers, kAtOnce, options);
      ExpectForward(*router, hidden_states, expected, 0, 257);
    }
    const auto router = MakeCluster(checkpoint, num_servers, kAtOnce);
    for (int64_t t = 0; t < 40; ++t) ExpectForward(*router, hidden_states, expected, t, 1);
    for (int64_t begin = 0, tokens = 1; begin + tokens <= 257; begin += tokens, tokens += 7) {
      ExpectForward(*router, hidden_states, expected, begin, tokens);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, RouterBitsTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)));

class RouterTest : public ::testing::Test {
 protected:
  // The refusal of a call that fails, as "CODE: message".
  static std::string Refusal(Router& router, const ForwardCall& call) {
    const auto result = Forward(router, call);
    return result.ok() ? "accepted" : result.status().ToString();
  }

  const std::shared_ptr<const Checkpoint> checkpoint_ = MakeModel(DType::kBF16);
  const Tensor tokens_ = Tokens(DType::kF32, 257);
  const Expected expected_ = Restate(*checkpoint_, kLayer, tokens_);
};

TEST_F(RouterTest, RepliesMayComeInAnyOrderOnAnyThread) {
  Pool pool(3);
  RouterOptions options;
  options.batching.max_reply_bytes = 3000;  // 12 tokens
  options.batching.overlapping_rounds = 4;
  const auto router = MakeCluster(checkpoint_, 5, pool.handler(), options);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int time = 0; time < 5; ++time) {
        ExpectForward(*router, tokens_, expected_, 10 * c, 257 - 10 * c);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(RouterTest, KeepsNoMoreRoundsInFlightThanAllowed) {
  Pool pool(1);
  for (const int allowed : {1, 3}) {
    pool.Open(false);
    RouterOptions options;
    options.batching.max_tokens = 1;
    options.batching.overlapping_rounds = allowed;
    const auto router = MakeCluster(checkpoint_, 1, pool.handler(), options);
    std::thread caller([&] { ExpectForward(*router, tokens_, expected_, 0, 20); });
    const absl::Time give_up = absl::Now() + absl::Seconds(10);
    while (static_cast<int>(pool.waiting()) < allowed && absl::Now() < give_up) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_EQ(static_cast<int>(pool.waiting()), allowed);
    pool.Open(true);
    caller.join();
  }
}

TEST_F(RouterTest, SlicesAreWhatTheWireContractSays) {
  std::vector<ExpertSlice> slices;
  RouterOptions options;
  options.batching.max_reply_bytes = 10 * kTopK * kHidden * 2 + 1;  // 10 tokens in BF16
  const auto router = MakeCluster(
      checkpoint_, 2,
      [&slices](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        slices.push_back(slice);
        kAtOnce(index, store, std::move(slice), std::move(done));
      },
      options);
  const Tensor tokens = Tokens(DType::kBF16, 35);
  ForwardCall call = Call(tokens);
  call.deadline = absl::Now() + absl::Seconds(60);
  ASSERT_TRUE(Forward(*router, call).ok());
  EXPECT_GE(slices.size(), 4u);  // of 10, 10, 10 and 5 tokens
  EXPECT_LE(slices.size(), 8u);
  for (const ExpertSlice& slice : slices) {
    EXPECT_EQ(slice.layer, kLayer);
    EXPECT_EQ(slice.placement_epoch, router->membership()->epoch());
    EXPECT_EQ(slice.deadline, call.deadline);
    EXPECT_EQ(slice.rows.values.dtype(), DType::kBF16);
    EXPECT_LE(slice.rows.values.dim(0), 10);
    EXPECT_EQ(slice.expert_ids.size(), slice.m_sizes.size());
    for (const int32_t row : slice.gather) EXPECT_GE(row, 0);  // no padding
  }
}

TEST_F(RouterTest, NoTokensNeedNoServers) {
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  const auto router = MakeRouter(checkpoint_, options);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor none(dtype, {0, kHidden});
    const auto result = Forward(*router, Call(none));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->output.dtype(), dtype);
    EXPECT_THAT(result->output.shape(), ElementsAre(0, kHidden));
    EXPECT_THAT(result->routing.topk_ids.shape(), ElementsAre(0, kTopK));
    EXPECT_THAT(result->routing.topk_weights.shape(), ElementsAre(0, kTopK));
    EXPECT_THAT(result->routing.logits.shape(), ElementsAre(0, kExperts));
  }
}

TEST_F(RouterTest, RefusesWhatDoesNotFitTheLayer) {
  const auto router = MakeCluster(checkpoint_, 1, kAtOnce);
  ForwardCall call = Call(tokens_);
  for (const int32_t layer : {-1, 2}) {
    call.layer = layer;
    EXPECT_EQ(
        Refusal(*router, call),
        absl::StrCat("INVALID_ARGUMENT: layer: expected one of the MoE layers 0-1, got ", layer));
  }
  for (const DType dtype : {DType::kI32, DType::kI64, DType::kF8_E4M3}) {
    const Tensor tokens(dtype, {2, kHidden});
    EXPECT_EQ(Refusal(*router, Call(tokens)),
              absl::StrCat("INVALID_ARGUMENT: hidden_states.dtype: expected F32, BF16 or F16, got ",
                           NameOf(dtype)));
  }
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, kHidden + 1}, {2, 0}, {kHidden}, {1, 2, kHidden}, {}}) {
    const Tensor tokens(DType::kF32, shape);
    EXPECT_EQ(Refusal(*router, Call(tokens)),
              absl::StrCat("INVALID_ARGUMENT: hidden_states.shape: expected [T, 20], got ",
                           ShapeToString(shape)));
  }
}

TEST_F(RouterTest, NamesTheRowThatIsNotFinite) {
  const auto router = MakeCluster(
      checkpoint_, 1, [](size_t, const Store&, ExpertSlice, ExpertBackend::Done) { FAIL(); });
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Tensor bad = Tokens(dtype, 30);
      StoreFloat(dtype, bad.data(), 17 * kHidden + 4, value);
      StoreFloat(dtype, bad.data(), 21 * kHidden, value);
      EXPECT_EQ(Refusal(*router, Call(bad)),
                "INVALID_ARGUMENT: hidden_states: row 17 is not finite at column 4");
    }
  }
}

// It comes from the caller, and error texts add to it.
TEST_F(RouterTest, RefusesRowNumbersThatCannotBe) {
  const auto router = MakeCluster(MakeModel(DType::kBF16), 1, kAtOnce);
  ForwardCall call = Call(Tokens(DType::kF32, 3));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() - 3;
  call.first_row = kMost;
  EXPECT_TRUE(Forward(*router, call).ok());
  for (const int64_t first_row : {kMost + 1, int64_t{-1}}) {
    call.first_row = first_row;
    EXPECT_EQ(
        Forward(*router, call).status().ToString(),
        absl::StrCat("INVALID_ARGUMENT: first_row: expected 0 to ", kMost, ", got ", first_row));
  }
}

TEST_F(RouterTest, RefusesOptionsThatCannotWork) {
  const auto refusal = [this](const BatchingOptions& batching) {
    RouterOptions options;
    options.batching = batching;
    return Router::Create(checkpoint_, kNumerics, options).status().ToString();
  };
  EXPECT_EQ(refusal({.rounds_per_layer = -1}),
            "INVALID_ARGUMENT: rounds_per_layer: expected at least 0, got -1");
  EXPECT_EQ(refusal({.overlapping_rounds = 0}),
            "INVALID_ARGUMENT: overlapping_rounds: expected at least 1, got 0");
  EXPECT_EQ(refusal({.max_tokens = 0}), "INVALID_ARGUMENT: max_tokens: expected at least 1, got 0");
  EXPECT_EQ(refusal({.max_reply_bytes = 0}),
            "INVALID_ARGUMENT: max_reply_bytes: expected at least 1, got 0");
}

// Only the experts that the tokens need have to be there.
TEST_F(RouterTest, NamesTheExpertsThatNobodyHolds) {
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  const auto router = MakeRouter(checkpoint_, options);
  const std::set<int32_t> needed(expected_.ids.begin(), expected_.ids.begin() + kTopK);
  std::vector<int32_t> ids(needed.begin(), needed.end());
  EXPECT_THAT(Forward(*router, tokens_, 0, 1).status().ToString(),
              HasSubstr("UNAVAILABLE: layer 1: no live server holds experts " + IdRanges(ids)));
  const int32_t last = ids.back();
  ids.pop_back();
  AddServer(*router, 0, {{kLayer, ids}}, kAtOnce);
  EXPECT_THAT(Forward(*router, tokens_, 0, 1).status().ToString(),
              HasSubstr(absl::StrCat("layer 1: no live server holds expert ", last)));
  AddServer(*router, 1, {{kLayer, {last}}}, kAtOnce);
  ExpectForward(*router, tokens_, expected_, 0, 1);
}

TEST_F(RouterTest, WaitsForServersAtTheStart) {
  const auto router = MakeRouter(checkpoint_);
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(50));
    for (int s = 0; s < 2; ++s) {
      AddServer(*router, s, *ExpertStore::ShardOf(checkpoint_->model(), s, 2), kAtOnce);
    }
  });
  ExpectForward(*router, tokens_, expected_, 0, 257);
  late.join();
}

TEST_F(RouterTest, TheDeadlinePasses) {
  Pool pool(1);
  pool.Open(false);
  const auto router = MakeCluster(checkpoint_, 2, pool.handler());
  ForwardCall call = Call(tokens_);
  const absl::Time start = absl::Now();
  call.deadline = start + absl::Milliseconds(50);
  EXPECT_THAT(Refusal(*router, call), HasSubstr("DEADLINE_EXCEEDED: "));
  EXPECT_GE(absl::Now(), call.deadline);
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  // The replies come after the call has returned: nothing happens.
  EXPECT_GT(pool.waiting(), 0u);
  pool.Open(true);
  ExpectForward(*router, tokens_, expected_, 0, 257);
}

TEST_F(RouterTest, TheCallerGivesUp) {
  Pool pool(1);
  pool.Open(false);
  const auto router = MakeCluster(checkpoint_, 2, pool.handler());
  std::atomic<bool> cancelled = false;
  ForwardCall call = Call(tokens_);
  call.cancelled = [&cancelled] { return cancelled.load(); };
  std::thread caller([&] {
    absl::SleepFor(absl::Milliseconds(50));
    cancelled = true;
  });
  EXPECT_THAT(Refusal(*router, call), HasSubstr("CANCELLED: "));
  EXPECT_TRUE(cancelled);
  caller.join();
}

// Answers with a status on server 1 of 3, and never on server 2: the first failure ends the call.
class FailingServerTest : public RouterTest {
 protected:
  std::string RefusalOfServer1(const absl::Status& status) {
    std::vector<ExpertBackend::Done> unanswered;
    const auto router = MakeCluster(
        checkpoint_, 3,
        [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
          if (index == 0) return kAtOnce(index, store, std::move(slice), std::move(done));
          if (index == 1) return std::move(done)(status);
          unanswered.push_back(std::move(done));
        });
    const std::string refusal = Refusal(*router, Call(tokens_));
    EXPECT_FALSE(unanswered.empty());
    for (ExpertBackend::Done& done : unanswered) std::move(done)(absl::UnavailableError("late"));
    return refusal;
  }
};

TEST_F(FailingServerTest, LosingOneNamesLayerAndExperts) {
  EXPECT_EQ(RefusalOfServer1(absl::UnavailableError("its stream broke")),
            "UNAVAILABLE: layer 1: lost the server of experts 4-7: its stream broke");
}

TEST_F(FailingServerTest, OtherFailuresKeepTheirCode) {
  EXPECT_EQ(RefusalOfServer1(absl::ResourceExhaustedError("the queue is full")),
            "RESOURCE_EXHAUSTED: the queue is full");
  EXPECT_EQ(RefusalOfServer1(absl::NotFoundError("expert_ids: not here")),
            "NOT_FOUND: expert_ids: not here");
}

TEST_F(FailingServerTest, NamesASingleExpert) {
  const auto router = MakeCluster(
      checkpoint_, kExperts,
      [](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        if (index == 5) return std::move(done)(absl::UnavailableError("gone"));
        kAtOnce(index, store, std::move(slice), std::move(done));
      });
  EXPECT_EQ(Refusal(*router, Call(tokens_)),
            "UNAVAILABLE: layer 1: lost the server of expert 5: gone");
}

// What a server of another mind returns is refused before it is read.
TEST_F(RouterTest, RefusesRepliesThatDoNotFit) {
  const int64_t pairs = tokens_.dim(0) * kTopK;
  const auto refusal = [&](const Tensor& hidden_states, const Tensor& reply) {
    const auto router = MakeCluster(
        checkpoint_, 1, [&](size_t, const Store&, ExpertSlice, ExpertBackend::Done done) {
          std::move(done)(reply);
        });
    return Refusal(*router, Call(hidden_states));
  };
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{pairs - 1, kHidden}, {pairs, kHidden - 1}, {kHidden, pairs}, {0}}) {
    EXPECT_EQ(refusal(tokens_, Tensor(DType::kF32, shape)),
              absl::StrCat("INTERNAL: expected reply rows F32 ", ShapeToString({pairs, kHidden}),
                           ", got F32 ", ShapeToString(shape)));
  }
  for (const auto& [request, wrong] :
       std::vector<std::pair<DType, DType>>{{DType::kF32, DType::kBF16},
                                            {DType::kF32, DType::kF16},
                                            {DType::kF16, DType::kF16},
                                            {DType::kBF16, DType::kF32},
                                            {DType::kF32, DType::kI32}}) {
    EXPECT_THAT(refusal(Tokens(request, 257), Tensor(wrong, {pairs, kHidden})),
                AllOf(HasSubstr("INTERNAL: expected reply rows "),
                      HasSubstr(absl::StrCat("got ", NameOf(wrong)))));
  }
}

}  // namespace
}  // namespace expertmesh
