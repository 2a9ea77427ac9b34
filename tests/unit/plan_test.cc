// The plan of a round and the combine, against plain restatements of both.
#include "router/dispatch/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Distinct experts for every token, as a gate gives them.
std::vector<int32_t> RandomIds(int64_t tokens, int32_t experts, int32_t top_k, std::mt19937& rng) {
  std::vector<int32_t> all(experts), ids;
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.insert(ids.end(), all.begin(), all.begin() + top_k);
  }
  return ids;
}

RoundPlan Plan(const std::vector<int32_t>& ids, int32_t top_k, const std::vector<int32_t>& servers,
               int64_t pad_multiple) {
  auto plan = PlanRound(ids, top_k, servers, pad_multiple);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : RoundPlan{};
}

// Everything the contract says about one plan, looked up pair by pair.
void ExpectPlan(const RoundPlan& plan, const std::vector<int32_t>& ids, int32_t top_k,
                const std::vector<int32_t>& server_of_expert, int64_t pad_multiple) {
  // What each server must hold.
  std::map<int32_t, std::set<int64_t>> tokens_of_server;
  std::map<int32_t, std::map<int32_t, std::vector<int64_t>>> groups;  // server -> expert -> tokens
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const int32_t server = server_of_expert[ids[pair]];
    const int64_t token = static_cast<int64_t>(pair) / top_k;
    tokens_of_server[server].insert(token);
    groups[server][ids[pair]].push_back(token);
  }

  ASSERT_EQ(plan.slices.size(), groups.size());
  ASSERT_EQ(plan.pairs.size(), ids.size());
  // (slice, row of its reply) -> (token, expert)
  std::map<std::pair<int32_t, int64_t>, std::pair<int64_t, int32_t>> replies;
  size_t s = 0;
  for (const auto& [server, experts] : groups) {
    const ServerSlice& slice = plan.slices[s];
    ASSERT_EQ(slice.server, server);
    const std::set<int64_t>& tokens = tokens_of_server[server];
    ASSERT_EQ(slice.row_tokens, std::vector<int64_t>(tokens.begin(), tokens.end()));
    ASSERT_EQ(slice.expert_ids.size(), experts.size());
    ASSERT_EQ(slice.m_sizes.size(), experts.size());
    int64_t position = 0;
    int64_t reply_row = 0;
    size_t group = 0;
    for (const auto& [expert, expert_tokens] : experts) {
      ASSERT_EQ(slice.expert_ids[group], expert);
      const int64_t count = static_cast<int64_t>(expert_tokens.size());
      const int64_t padded = (count + pad_multiple - 1) / pad_multiple * pad_multiple;
      ASSERT_EQ(slice.m_sizes[group], padded);
      for (int64_t i = 0; i < padded; ++i, ++position) {
        ASSERT_LT(position, static_cast<int64_t>(slice.gather.size()));
        if (i >= count) {
          ASSERT_EQ(slice.gather[position], -1);
          continue;
        }
        ASSERT_GE(slice.gather[position], 0);
        ASSERT_EQ(slice.row_tokens[slice.gather[position]], expert_tokens[i]);
        replies[{static_cast<int32_t>(s), reply_row++}] = {expert_tokens[i], expert};
      }
      ++group;
    }
    ASSERT_EQ(position, static_cast<int64_t>(slice.gather.size()));
    ASSERT_EQ(slice.num_pairs, reply_row);
    ++s;
  }
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const auto found = replies.find({plan.pairs[pair].slice, plan.pairs[pair].row});
    ASSERT_NE(found, replies.end());
    ASSERT_EQ(found->second, std::make_pair(static_cast<int64_t>(pair) / top_k, ids[pair]));
  }
}

TEST(PlanRound, EveryPairIsWhereThePlanSays) {
  std::mt19937 rng(1);
  for (const int32_t experts : {1, 5, 12, 64}) {
    for (const int32_t top_k : std::set<int32_t>{1, std::min(3, experts), experts}) {
      for (const int32_t servers : {1, 2, 3, 5, experts + 3}) {
        std::vector<int32_t> server_of_expert(experts);
        for (int32_t& server : server_of_expert) {
          server = static_cast<int32_t>(rng() % static_cast<uint32_t>(servers));
        }
        for (const int64_t pad_multiple : {1, 4, 16}) {
          for (const int64_t tokens : {1, 2, 37}) {
            SCOPED_TRACE(absl::StrCat("E ", experts, ", K ", top_k, ", ", servers, " servers, pad ",
                                      pad_multiple, ", T ", tokens));
            const std::vector<int32_t> ids = RandomIds(tokens, experts, top_k, rng);
            ExpectPlan(Plan(ids, top_k, server_of_expert, pad_multiple), ids, top_k,
                       server_of_expert, pad_multiple);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// A case small enough to be worked out on paper. Experts 0 and 2 live on server 0, 1 and 3 on
// server 2, server 1 has none.
TEST(PlanRound, ByHand) {
  const RoundPlan plan = Plan({2, 0,  // token 0: both on server 0, whose row travels once
                               3, 2,  // token 1
                               2, 0},
                              2, {0, 2, 0, 2}, 4);
  ASSERT_EQ(plan.slices.size(), 2u);
  EXPECT_EQ(plan.slices[0].server, 0);
  EXPECT_THAT(plan.slices[0].expert_ids, ElementsAre(0, 2));
  EXPECT_THAT(plan.slices[0].m_sizes, ElementsAre(4, 4));
  EXPECT_THAT(plan.slices[0].row_tokens, ElementsAre(0, 1, 2));
  EXPECT_THAT(plan.slices[0].gather, ElementsAre(0, 2, -1, -1, 0, 1, 2, -1));
  EXPECT_EQ(plan.slices[0].num_pairs, 5);
  EXPECT_EQ(plan.slices[1].server, 2);
  EXPECT_THAT(plan.slices[1].expert_ids, ElementsAre(3));
  EXPECT_THAT(plan.slices[1].m_sizes, ElementsAre(4));
  EXPECT_THAT(plan.slices[1].row_tokens, ElementsAre(1));
  EXPECT_THAT(plan.slices[1].gather, ElementsAre(0, -1, -1, -1));
  EXPECT_EQ(plan.slices[1].num_pairs, 1);
  const std::vector<std::pair<int32_t, int64_t>> expected = {{0, 2}, {0, 0}, {1, 0},
                                                             {0, 3}, {0, 4}, {0, 1}};
  for (size_t pair = 0; pair < expected.size(); ++pair) {
    EXPECT_EQ(plan.pairs[pair].slice, expected[pair].first) << pair;
    EXPECT_EQ(plan.pairs[pair].row, expected[pair].second) << pair;
  }
}

TEST(PlanRound, NoTokensNoSlices) {
  const RoundPlan plan = Plan({}, 2, {0, 1, 0}, 16);
  EXPECT_THAT(plan.slices, IsEmpty());
  EXPECT_THAT(plan.pairs, IsEmpty());
}

// Groups without rows get a block of padding on servers that have rows; the rest stays as it is.
TEST(PlanRound, EmptyExpertsMayGetABlock) {
  const std::vector<int32_t> ids = {0, 4, 4, 0, 0, 4};  // of experts 0 to 6
  const std::vector<int32_t> servers = {0, 0, -1, 1, 1, 2, kRouterItself};
  const RoundPlan plain = Plan(ids, 2, servers, 4);
  const auto plan = PlanRound(ids, 2, servers, 4, EmptyExperts::kOneBlock);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->slices.size(), 2u);
  EXPECT_THAT(plan->slices[0].expert_ids, ElementsAre(0, 1));
  EXPECT_THAT(plan->slices[0].m_sizes, ElementsAre(4, 4));
  EXPECT_THAT(plan->slices[0].gather, ElementsAre(0, 1, 2, -1, -1, -1, -1, -1));
  EXPECT_THAT(plan->slices[1].expert_ids, ElementsAre(3, 4));
  EXPECT_THAT(plan->slices[1].m_sizes, ElementsAre(4, 4));
  EXPECT_THAT(plan->slices[1].gather, ElementsAre(-1, -1, -1, -1, 0, 1, 2, -1));
  for (size_t s = 0; s < 2; ++s) EXPECT_EQ(plan->slices[s].num_pairs, 3);
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    EXPECT_EQ(plan->pairs[pair].slice, plain.pairs[pair].slice);
    EXPECT_EQ(plan->pairs[pair].row, plain.pairs[pair].row);
  }
  // Without padding there are no blocks.
  EXPECT_THAT(PlanRound(ids, 2, servers, 1, EmptyExperts::kOneBlock)->slices[0].expert_ids,
              ElementsAre(0));
}

TEST(PlanRound, RefusesExpertsWithoutServer) {
  // An expert without a server does no harm while nobody asks for it.
  EXPECT_TRUE(PlanRound(std::vector<int32_t>{0, 2}, 2, {0, -1, 1}, 1).ok());
  for (const int32_t expert : {1, 3, -1}) {
    const auto plan = PlanRound(std::vector<int32_t>{0, expert}, 2, {0, -1, 1}, 1);
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr(absl::StrCat("expert ", expert)));
  }
}

// Shared experts follow a token's first slot that a server computes, if the server has them.
TEST(AddSharedSlots, ByHand) {
  // Experts 0 and 2 on server 0, 1 on server 1, 3 on server 2; ids from 4 on return their input.
  // Servers 0 and 2 have the 2 shared experts: 4, 5 on server 0 and 6, 7 on server 2 in the slots.
  const std::vector<int32_t> servers = {0, 1, 0, 2};
  const std::vector<int32_t> ids = {2, 3, 3, 0, 1, 2, 4, 3, 4, 5, 1, 0, 5, 4};
  const RoundSlots slots = AddSharedSlots(ids, 7, 2, 4, 2, servers, {0, 2});
  EXPECT_THAT(slots.server_of_id, ElementsAre(0, 1, 0, 2, 0, 0, 2, 2, kRouterItself));
  EXPECT_THAT(slots.ids, ElementsAre(2, 3, 4, 5,  // on server 0, as expert 2
                                     3, 0, 6, 7,  // on server 2
                                     1, 2, 4, 5,  // server 1 has none: token 2 of 7, the first half
                                     8, 3, 6, 7,  // the first slot is nobody's
                                     8, 8, 6, 7,  // both are: token 4 of 7, the second half
                                     1, 0, 6, 7,  //
                                     8, 8, 6, 7));
  EXPECT_EQ(slots.ExpertOf(3), 3);
  EXPECT_EQ(slots.ExpertOf(4), 4);
  EXPECT_EQ(slots.ExpertOf(6), 4);
  EXPECT_EQ(slots.ExpertOf(7), 5);
  const RoundPlan plan = Plan(slots.ids, 4, slots.server_of_id, 1);
  ASSERT_EQ(plan.slices.size(), 3u);
  EXPECT_THAT(plan.slices[0].expert_ids, ElementsAre(0, 2, 4, 5));
  EXPECT_THAT(plan.slices[1].expert_ids, ElementsAre(1));
  EXPECT_THAT(plan.slices[2].expert_ids, ElementsAre(3, 6, 7));
  EXPECT_THAT(plan.slices[2].row_tokens, ElementsAre(0, 1, 3, 4, 5, 6));
  EXPECT_EQ(plan.pairs[3 * 4].slice, -1);
  EXPECT_EQ(plan.pairs[3 * 4 + 1].slice, 2);
}

// No routed experts: an even, contiguous split.
TEST(AddSharedSlots, SplitsTokensWithoutSlots) {
  const RoundSlots slots = AddSharedSlots({}, 7, 0, 0, 1, {}, {3, 0, 1});
  EXPECT_THAT(slots.ids, ElementsAre(0, 0, 0, 1, 1, 2, 2));
  EXPECT_THAT(slots.server_of_id, ElementsAre(3, 0, 1, kRouterItself));
}

// The plan of PlanRound.ByHand, the weight of each pair in its position.
TEST(InputWeights, ByHand) {
  const std::vector<float> weights = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
  const RoundPlan plan = Plan({2, 0, 3, 2, 2, 0}, 2, {0, 2, 0, 2}, 4);
  EXPECT_THAT(InputWeights(plan, 2, 0, weights),
              ElementsAre(ElementsAre(0.2f, 0.6f, 1.0f, 1.0f, 0.1f, 0.4f, 0.5f, 1.0f),
                          ElementsAre(0.3f, 1.0f, 1.0f, 1.0f)));
  // The second slot is shared: expert 1, on the server of expert 0.
  const RoundPlan shared = Plan({0, 1, 0, 1}, 2, {0, 0}, 1);
  EXPECT_THAT(InputWeights(shared, 1, 1, {0.5f, 0.25f}),
              ElementsAre(ElementsAre(0.5f, 0.25f, 1.0f, 1.0f)));
}

TEST(GatherRows, CopiesTheRowsAsked) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Tensor hidden_states(dtype, {4, 3});
    for (int64_t i = 0; i < 12; ++i) {
      StoreFloat(dtype, hidden_states.data(), i, static_cast<float>(i));
    }
    std::vector<const std::byte*> tokens;
    for (int64_t t = 0; t < 4; ++t) {
      tokens.push_back(hidden_states.data() + t * 3 * BytesOf(dtype));
    }
    const Tensor rows = GatherRows(dtype, 3, tokens, std::vector<int64_t>{0, 2, 3});
    EXPECT_EQ(rows.dtype(), dtype);
    ASSERT_THAT(rows.shape(), ElementsAre(3, 3));
    std::vector<float> values(9);
    for (int64_t i = 0; i < 9; ++i) values[i] = LoadFloat(dtype, rows.data(), i);
    EXPECT_THAT(values, ElementsAre(0, 1, 2, 6, 7, 8, 9, 10, 11));
    // A copy, not a view.
    StoreFloat(dtype, hidden_states.data(), 0, 99);
    EXPECT_EQ(LoadFloat(dtype, rows.data(), 0), 0.0f);
  }
}

// output[t, d] of the bit contract, by libm's fma with FTZ and DAZ set on this thread.
float Restated(const std::vector<float>& rows, const std::vector<float>& weights,
               float routed_scale) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  volatile float sum = 0.0f;
  for (size_t k = 0; k < rows.size(); ++k) sum = fmaf(weights[k], rows[k], sum);
  if (routed_scale != 1.0f) sum = sum * routed_scale;
  const float result = sum;
  _mm_setcsr(saved);
  return result;
}

float RoundTo(DType dtype, float value) {
  if (dtype == DType::kBF16) return FloatFromBF16(BF16FromFloat(value));
  if (dtype == DType::kF16) return FloatFromF16(F16FromFloat(value));
  return value;
}

void ExpectCombine(DType dtype, int32_t top_k, float routed_scale, float magnitude) {
  SCOPED_TRACE(absl::StrCat(NameOf(dtype), ", K ", top_k, ", routed_scale ", routed_scale,
                            ", magnitude ", magnitude));
  constexpr int32_t kExperts = 12;
  constexpr int64_t kTokens = 29, kHidden = 17;
  const DType reply_dtype = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  std::mt19937 rng(top_k);
  std::normal_distribution<float> normal(0, 1);
  std::uniform_real_distribution<float> uniform(0, 1);

  std::vector<int32_t> server_of_expert(kExperts);
  for (int32_t e = 0; e < kExperts; ++e) server_of_expert[e] = e % 3;
  const std::vector<int32_t> ids = RandomIds(kTokens, kExperts, top_k, rng);
  const RoundPlan plan = Plan(ids, top_k, server_of_expert, /*pad_multiple=*/4);
  std::vector<Tensor> replies;
  for (const ServerSlice& slice : plan.slices) {
    Tensor& reply =
        replies.emplace_back(reply_dtype, std::vector<int64_t>{slice.num_pairs, kHidden});
    for (int64_t i = 0; i < reply.num_elements(); ++i) {
      StoreFloat(reply_dtype, reply.data(), i, magnitude * normal(rng));
    }
  }
  std::vector<float> weights(ids.size());
  for (float& weight : weights) weight = uniform(rng);

  Tensor output(dtype, {kTokens, kHidden});
  CombineInput input;
  input.pairs = plan.pairs;
  input.replies = replies;
  input.topk_weights = weights;
  input.top_k = top_k;
  input.routed_scale = routed_scale;
  input.hidden_size = kHidden;
  Combine(input, dtype, output.data());

  int64_t nonzero = 0;
  int64_t slot_order_matters = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<float> token_weights(weights.begin() + t * top_k,
                                           weights.begin() + (t + 1) * top_k);
    for (int64_t d = 0; d < kHidden; ++d) {
      std::vector<float> rows(top_k);
      for (int32_t k = 0; k < top_k; ++k) {
        const PairResult& at = plan.pairs[t * top_k + k];
        rows[k] = LoadFloat(reply_dtype, replies[at.slice].data(), at.row * kHidden + d);
      }
      const float exact = Restated(rows, token_weights, routed_scale);
      const float expected = RoundTo(dtype, exact);
      const float got = LoadFloat(dtype, output.data(), t * kHidden + d);
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(expected))
          << "token " << t << ", channel " << d << ": expected " << expected << ", got " << got;
      nonzero += expected != 0.0f;
      const std::vector<float> backward(token_weights.rbegin(), token_weights.rend());
      slot_order_matters += Restated({rows.rbegin(), rows.rend()}, backward, routed_scale) != exact;
    }
  }
  EXPECT_GT(nonzero, 0);
  if (top_k > 2 && magnitude == 1.0f) {
    EXPECT_GT(slot_order_matters, 0);
  }
}

TEST(Combine, HasTheBitsOfTheContract) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int32_t top_k : {1, 2, 3, 12}) {
      for (const float routed_scale : {1.0f, 2.5f, 0.1f}) {
        ExpectCombine(dtype, top_k, routed_scale, 1.0f);
      }
    }
  }
  // Products and sums around the smallest normal number: what is denormal counts as zero.
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ExpectCombine(dtype, 3, 1.0f, 2e-38f);
    ExpectCombine(dtype, 3, 0.5f, 2e-38f);
  }
}

// Rows whose elements are above 2^31, in a tensor of which only those rows are ever touched.
class FarRows : public testing::Test {
 protected:
  static constexpr int64_t kWidth = 8192;
  static constexpr int64_t kRows = 300'000;
  static constexpr int64_t kFirstFar = (int64_t{1} << 31) / kWidth;

  static uint16_t* Row(Tensor& tensor, int64_t row) { return tensor.as<uint16_t>() + row * kWidth; }
};

TEST_F(FarRows, AreCombined) {
  Tensor reply(DType::kBF16, {kRows, kWidth});
  const std::vector<int64_t> far = {kRows - 1, kFirstFar, kFirstFar - 1, 0};
  RoundPlan plan;
  for (size_t i = 0; i < far.size(); ++i) {
    std::fill_n(Row(reply, far[i]), kWidth, BF16FromFloat(static_cast<float>(1 << i)));
    plan.pairs.push_back({0, far[i]});
  }
  Tensor output(DType::kBF16, {2, kWidth});
  const std::vector<float> weights = {1, 1, 1, 1};
  CombineInput input;
  input.pairs = plan.pairs;
  input.replies = {&reply, 1};
  input.topk_weights = weights;
  input.top_k = 2;
  input.hidden_size = kWidth;
  Combine(input, DType::kBF16, output.data());
  EXPECT_EQ(std::count(Row(output, 0), Row(output, 1), BF16FromFloat(3.0f)), kWidth);
  EXPECT_EQ(std::count(Row(output, 1), Row(output, 2), BF16FromFloat(12.0f)), kWidth);
}

}  // namespace
}  // namespace expertmesh
