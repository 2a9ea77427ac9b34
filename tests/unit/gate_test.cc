#include "router/gating/gate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/dtype.h"
#include "common/numerics/flush_denormals.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/gating/shared_gate.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Tensor MakeTensor(DType dtype, std::vector<int64_t> shape, const std::vector<float>& values) {
  Tensor tensor(dtype, std::move(shape));
  for (size_t i = 0; i < values.size(); ++i) {
    StoreFloat(dtype, tensor.data(), static_cast<int64_t>(i), values[i]);
  }
  return tensor;
}

// [N], or empty where there are no values.
Tensor Vector(const std::vector<float>& values) {
  return MakeTensor(DType::kF32, {static_cast<int64_t>(values.size())}, values);
}

std::vector<float> Values(const Tensor& t) {
  std::vector<float> values;
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    values.push_back(LoadFloat(t.dtype(), t.data(), i));
  }
  return values;
}

std::vector<int32_t> Ids(const Tensor& t) {
  return {t.as<int32_t>(), t.as<int32_t>() + t.num_elements()};
}

// A gate whose logits are its input: the identity matrix of size n, in F32.
absl::StatusOr<Gate> IdentityGate(const RouterDescriptor& router, int64_t n,
                                  const std::vector<float>& logits_bias = {},
                                  const std::vector<float>& selection_bias = {},
                                  const std::vector<float>& per_expert_scale = {}) {
  std::vector<float> identity(static_cast<size_t>(n * n), 0.0f);
  for (int64_t i = 0; i < n; ++i) identity[static_cast<size_t>(i * n + i)] = 1.0f;
  return Gate::Create(router, {MakeTensor(DType::kF32, {n, n}, identity), Vector(logits_bias),
                               Vector(selection_bias), Vector(per_expert_scale)});
}

RouterDescriptor Router(int32_t num_experts, int32_t top_k) {
  RouterDescriptor router;
  router.num_experts = num_experts;
  router.top_k = top_k;
  return router;
}

RouterDescriptor SigmoidRouter(int32_t num_experts, int32_t top_k) {
  RouterDescriptor router = Router(num_experts, top_k);
  router.score = ScoreFunction::kSigmoid;
  router.norm = WeightNorm::kSum;
  return router;
}

// ---- Golden vectors ----------------------------------------------------------------------------

template <typename Enum>
Enum Choice(const nlohmann::json& fields, const char* field,
            const std::vector<std::pair<std::string, Enum>>& names) {
  if (!fields.contains(field)) return names[0].second;
  for (const auto& [name, value] : names) {
    if (fields[field] == name) return value;
  }
  ADD_FAILURE() << "unknown " << field << ": " << fields[field];
  return names[0].second;
}

RouterDescriptor RouterFromJson(const nlohmann::json& fields) {
  RouterDescriptor router = Router(fields["num_experts"], fields["top_k"]);
  router.score = Choice<ScoreFunction>(fields, "score",
                                       {{"softmax", ScoreFunction::kSoftmax},
                                        {"sigmoid", ScoreFunction::kSigmoid},
                                        {"sqrt_softplus", ScoreFunction::kSqrtSoftplus},
                                        {"sparsemixer", ScoreFunction::kSparsemixer}});
  router.order = Choice<ScoreOrder>(fields, "order",
                                    {{"score_then_topk", ScoreOrder::kScoreThenTopK},
                                     {"topk_then_score", ScoreOrder::kTopKThenScore}});
  router.group_score = Choice<GroupScore>(
      fields, "group_score",
      {{"none", GroupScore::kNone}, {"max", GroupScore::kMax}, {"top2_sum", GroupScore::kTop2Sum}});
  router.mask_fill = Choice<MaskFill>(
      fields, "mask_fill", {{"-infinity", MaskFill::kNegativeInfinity}, {"zero", MaskFill::kZero}});
  router.norm = Choice<WeightNorm>(fields, "norm",
                                   {{"none", WeightNorm::kNone},
                                    {"sum", WeightNorm::kSum},
                                    {"sum_clamped", WeightNorm::kSumClamped},
                                    {"p_norm", WeightNorm::kPNorm}});
  router.num_groups = fields.value("num_groups", 1);
  router.topk_groups = fields.value("topk_groups", 1);
  router.norm_epsilon = fields.value("norm_epsilon", 0.0f);
  router.norm_p = fields.value("norm_p", 1.0f);
  router.scale = fields.value("scale", 1.0f);
  router.routed_scale = fields.value("routed_scale", 1.0f);
  router.softcap = fields.value("softcap", 0.0f);
  router.jitter = fields.value("jitter", 0.0f);
  router.weigh_input = fields.value("weigh_input", false);
  router.identity_experts = fields.value("identity_experts", 0);
  return router;
}

TEST(GateGolden, EveryFamily) {
  std::ifstream file(EXPERTMESH_TEST_DATA "/gating.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden["cases"].size(), 100u);
  for (const nlohmann::json& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const std::vector<float> logits = c["logits"];
    const std::vector<float> logits_bias = c["logits_bias"];
    const std::vector<float> selection_bias = c["selection_bias"];
    const std::vector<float> per_expert_scale = c["per_expert_scale"];
    RouterDescriptor router = RouterFromJson(c["router"]);
    router.has_logits_bias = !logits_bias.empty();
    router.has_selection_bias = !selection_bias.empty();
    router.has_per_expert_scale = !per_expert_scale.empty();

    const int64_t n = static_cast<int64_t>(logits.size());
    const auto gate = IdentityGate(router, n, logits_bias, selection_bias, per_expert_scale);
    ASSERT_TRUE(gate.ok()) << gate.status();
    const Tensor x = MakeTensor(DType::kF32, {1, n}, logits);
    const auto routing = gate->Route(x);
    ASSERT_TRUE(routing.ok()) << routing.status();

    EXPECT_EQ(Ids(routing->topk_ids), c["ids"].get<std::vector<int32_t>>());
    const std::vector<double> expected = c["weights"];
    const std::vector<float> weights = Values(routing->topk_weights);
    ASSERT_EQ(weights.size(), expected.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_NEAR(weights[i], expected[i], 1e-6 * std::fabs(expected[i])) << "slot " << i;
    }
  }
}

// ---- Against a plain float64 restatement -------------------------------------------------------

struct Reference {
  std::vector<int32_t> ids;
  std::vector<double> weights;
  double gap;  // least difference between neighbours of the sorted selection scores, up to slot K
};

// Softmax or sigmoid, then top-k, then division by the sum.
Reference PlainRoute(const RouterDescriptor& router, const float* logits, const float* bias) {
  const size_t n = static_cast<size_t>(router.num_experts);
  std::vector<double> score(n);
  double sum = 0.0;
  for (size_t e = 0; e < n; ++e) sum += std::exp(static_cast<double>(logits[e]));
  for (size_t e = 0; e < n; ++e) {
    score[e] = router.score == ScoreFunction::kSigmoid
                   ? 1.0 / (1.0 + std::exp(-static_cast<double>(logits[e])))
                   : std::exp(static_cast<double>(logits[e])) / sum;
  }
  std::vector<std::pair<double, int32_t>> sorted;  // by descending selection score, ascending id
  for (size_t e = 0; e < n; ++e) {
    sorted.emplace_back(-(score[e] + (bias != nullptr ? bias[e] : 0.0f)), static_cast<int32_t>(e));
  }
  std::sort(sorted.begin(), sorted.end());
  Reference result{{}, {}, 1.0};
  double total = 0.0;
  for (size_t s = 0; s < static_cast<size_t>(router.top_k); ++s) {
    result.ids.push_back(sorted[s].second);
    result.weights.push_back(score[static_cast<size_t>(sorted[s].second)]);
    total += result.weights.back();
    if (s + 1 < n) result.gap = std::min(result.gap, sorted[s + 1].first - sorted[s].first);
  }
  if (router.norm == WeightNorm::kSum) {
    for (double& w : result.weights) w /= total;
  }
  for (double& w : result.weights) w *= router.scale;
  return result;
}

TEST(GateSweep, IdsAndWeightsOfEveryShape) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  constexpr int kTokens = 20;
  int compared = 0;
  int skipped = 0;
  for (const int32_t n : {1, 2, 3, 7, 8, 9, 16, 60, 64, 128, 160, 256, 384, 512}) {
    for (const int32_t k : {1, 2, 3, 4, 6, 8, 10, 22, n}) {
      if (k > n) continue;
      for (const bool sigmoid : {false, true}) {
        for (const bool normalise : {false, true}) {
          RouterDescriptor router = Router(n, k);
          router.score = sigmoid ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax;
          router.norm = normalise ? WeightNorm::kSum : WeightNorm::kNone;
          router.has_selection_bias = sigmoid;
          router.scale = 2.5f;
          std::vector<float> logits(static_cast<size_t>(kTokens * n));
          for (float& z : logits) z = normal(random);
          std::vector<float> bias(static_cast<size_t>(sigmoid ? n : 0));
          for (float& b : bias) b = 0.1f * normal(random);
          std::vector<int32_t> ids(static_cast<size_t>(kTokens * k));
          std::vector<float> weights(ids.size());
          ASSERT_TRUE(ValidateRouter(router).ok());
          ASSERT_TRUE(
              SelectExperts(router, logits, bias, {}, absl::MakeSpan(ids), absl::MakeSpan(weights))
                  .ok());
          for (int t = 0; t < kTokens; ++t) {
            const Reference expected = PlainRoute(router, &logits[static_cast<size_t>(t * n)],
                                                  sigmoid ? bias.data() : nullptr);
            if (expected.gap < 1e-6) {
              ++skipped;  // the order is a matter of rounding
              continue;
            }
            ++compared;
            for (int32_t s = 0; s < k; ++s) {
              const size_t slot = static_cast<size_t>(t * k + s);
              const size_t i = static_cast<size_t>(s);
              ASSERT_EQ(ids[slot], expected.ids[i]) << "E " << n << " K " << k << " slot " << s;
              ASSERT_NEAR(weights[slot], expected.weights[i], 2e-6 * expected.weights[i])
                  << "E " << n << " K " << k << " slot " << s;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 4 * skipped) << compared << " compared, " << skipped << " skipped";
}

// ---- The order of a logit's chain --------------------------------------------------------------

// One logit as the bit contract states it, without any of the gate's code.
KERNEL_NOINLINE float PlainLogit(const std::vector<float>& x, const std::vector<float>& w,
                                 bool pairs) {
  float acc = 0.0f;
  if (!pairs) {
    for (size_t k = 0; k < x.size(); ++k) acc = std::fma(x[k], w[k], acc);
    return acc;
  }
  for (size_t k = 0; k < x.size(); k += 2) {
    const bool padded = k + 1 == x.size();
    acc = std::fma(padded ? 0.0f : x[k + 1], padded ? 0.0f : w[k + 1], acc);
    acc = std::fma(x[k], w[k], acc);
  }
  return acc;
}

class GateChain : public ::testing::TestWithParam<std::tuple<DType, DType, int64_t, float>> {};

TEST_P(GateChain, LogitsHaveTheBitsOfThePlainLoop) {
  const auto [weight_dtype, activation_dtype, hidden, magnitude] = GetParam();
  constexpr int64_t kExperts = 13;  // a panel and a half
  constexpr int64_t kTokens = 7;    // a block of rows and three single ones
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&](DType dtype, std::vector<int64_t> shape, float scale) {
    std::vector<float> values(static_cast<size_t>(NumElements(shape)));
    for (float& v : values) v = scale * normal(random);
    return MakeTensor(dtype, std::move(shape), values);
  };
  RouterDescriptor router = Router(kExperts, 2);
  router.has_logits_bias = true;
  const Tensor weight = draw(weight_dtype, {kExperts, hidden}, magnitude);
  const Tensor bias = draw(DType::kF32, {kExperts}, magnitude * magnitude);
  const Tensor x = draw(activation_dtype, {kTokens, hidden}, magnitude);
  const auto gate = Gate::Create(router, {weight, bias, Tensor(), Tensor()});
  ASSERT_TRUE(gate.ok()) << gate.status();
  EXPECT_EQ(gate->hidden_size(), hidden);
  const auto routing = gate->Route(x);
  ASSERT_TRUE(routing.ok()) << routing.status();
  EXPECT_EQ(routing->logits.shape(), (std::vector<int64_t>{kTokens, kExperts}));

  const ScopedFlushDenormals flush;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = 0; e < kExperts; ++e) {
      std::vector<float> xs, ws;
      for (int64_t k = 0; k < hidden; ++k) {
        xs.push_back(LoadFloat(activation_dtype, x.data(), t * hidden + k));
        ws.push_back(LoadFloat(weight_dtype, weight.data(), e * hidden + k));
      }
      volatile float logit = PlainLogit(xs, ws, weight_dtype != DType::kF32);
      const volatile float expected = logit + bias.as<float>()[e];
      const float given = routing->logits.as<float>()[t * kExperts + e];
      ASSERT_EQ(std::bit_cast<uint32_t>(given), std::bit_cast<uint32_t>(float{expected}))
          << "token " << t << " expert " << e << ": " << given << " against " << expected;
    }
  }
}

// 1e-19 * 1e-19 is about 2^-126, where flushing decides; F16 cannot be that small and has its own
// denormals at 1e-6.
INSTANTIATE_TEST_SUITE_P(
    Formats, GateChain,
    ::testing::Combine(::testing::Values(DType::kBF16, DType::kF16, DType::kF32),
                       ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                       ::testing::Values(1, 2, 37, 256, 333),
                       ::testing::Values(1.0f, 1e-6f, 1e-19f, 3e-20f)));

TEST(GateChain, DenormalWeightsAreZero) {
  const float denormal = std::bit_cast<float>(0x00400000u);
  const auto gate = Gate::Create(
      Router(2, 1), {MakeTensor(DType::kBF16, {2, 2}, {denormal, denormal, 0.0f, 1e-30f}), Tensor(),
                     Tensor(), Tensor()});
  ASSERT_TRUE(gate.ok()) << gate.status();
  const auto routing = gate->Route(MakeTensor(DType::kF32, {1, 2}, {1e30f, 1e30f}));
  ASSERT_TRUE(routing.ok()) << routing.status();
  EXPECT_EQ(routing->logits.as<float>()[0], 0.0f);
  EXPECT_NEAR(routing->logits.as<float>()[1], 1.0f, 0.01f);
}

// ---- Edge cases --------------------------------------------------------------------------------

TEST(Gate, NoTokens) {
  const auto gate = IdentityGate(Router(8, 3), 8);
  ASSERT_TRUE(gate.ok()) << gate.status();
  const auto routing = gate->Route(Tensor(DType::kBF16, {0, 8}));
  ASSERT_TRUE(routing.ok()) << routing.status();
  EXPECT_EQ(routing->topk_ids.shape(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(routing->topk_weights.shape(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(routing->logits.shape(), (std::vector<int64_t>{0, 8}));
}

TEST(Gate, NonFiniteHiddenStatesNameTheFirstRowAndTheColumn) {
  const auto gate = IdentityGate(Router(8, 2), 8);
  ASSERT_TRUE(gate.ok()) << gate.status();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      for (const int64_t row : {0, 2, 3, 4, 5}) {
        std::vector<float> x(6 * 8, 0.5f);
        x[static_cast<size_t>(row * 8 + 5)] = bad;
        x[5 * 8 + 6] = bad;
        const auto routing = gate->Route(MakeTensor(dtype, {6, 8}, x));
        ASSERT_EQ(routing.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_EQ(std::string(routing.status().message()),
                  absl::StrCat("hidden_states: row ", row, " is not finite at column 5"));
      }
    }
  }
}

TEST(Gate, RowsOfOnlyNaNAreRefusedAndTheOthersUnchanged) {
  const auto gate = IdentityGate(Router(8, 2), 8);
  ASSERT_TRUE(gate.ok()) << gate.status();
  std::vector<float> x(4 * 8);
  std::iota(x.begin(), x.end(), -10.0f);
  std::fill(x.begin() + 16, x.begin() + 24, kNan);
  EXPECT_THAT(std::string(gate->Route(MakeTensor(DType::kF32, {4, 8}, x)).status().message()),
              HasSubstr("row 2"));
  x.erase(x.begin() + 16, x.begin() + 24);
  EXPECT_TRUE(gate->Route(MakeTensor(DType::kF32, {3, 8}, x)).ok());
}

TEST(Gate, LogitsThatOverflowNameTheFirstBadRow) {
  const Tensor weight = MakeTensor(DType::kF32, {2, 2}, {1.0f, 0.0f, 3e38f, 3e38f});
  const auto gate = Gate::Create(Router(2, 1), {weight, Tensor(), Tensor(), Tensor()});
  ASSERT_TRUE(gate.ok()) << gate.status();
  // Row 1 overflows although its hidden states are finite; row 2 has a NaN, but later.
  const auto routing =
      gate->Route(MakeTensor(DType::kF32, {3, 2}, {0.0f, 0.0f, 9.0f, 9.0f, kNan, 0.0f}));
  ASSERT_EQ(routing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(routing.status().message()),
            "router logits: row 1 is not finite at expert 1");
}

// Its logits are others than the router's.
TEST(SharedGate, LogitsThatOverflowAreCalledItsOwn) {
  for (const EngineKind kind : {EngineKind::kForLoop, EngineKind::kGrouped}) {
    const auto gate = SharedGate::Create(MakeTensor(DType::kF32, {1, 2}, {3e38f, 3e38f}), 1, kind);
    ASSERT_TRUE(gate.ok()) << gate.status();
    const auto weights = gate->Weigh(MakeTensor(DType::kF32, {2, 2}, {0.0f, 0.0f, 9.0f, 9.0f}), 5);
    EXPECT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(weights.status().message()),
              "shared_gate logits: row 6 is not finite at expert 0");
    // A hidden state is nobody's.
    EXPECT_EQ(
        std::string(gate->Weigh(MakeTensor(DType::kF32, {1, 2}, {0.0f, kNan})).status().message()),
        "hidden_states: row 0 is not finite at column 1");
  }
}

TEST(SelectExperts, NonFiniteLogitsNameTheFirstRow) {
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    std::vector<float> logits(5 * 8, 1.0f);
    logits[2 * 8 + 7] = bad;
    logits[3 * 8] = bad;
    std::vector<int32_t> ids(5 * 2);
    std::vector<float> weights(5 * 2);
    const absl::Status status =
        SelectExperts(Router(8, 2), logits, {}, {}, absl::MakeSpan(ids), absl::MakeSpan(weights));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(status.message()), "router logits: row 2 is not finite at expert 7");
  }
}

TEST(SelectExperts, WrongLengths) {
  std::vector<int32_t> ids(4);
  std::vector<float> weights(4);
  const auto select = [&](RouterDescriptor router, size_t logits, std::vector<float> bias,
                          std::vector<float> scale) {
    return SelectExperts(router, std::vector<float>(logits), bias, scale, absl::MakeSpan(ids),
                         absl::MakeSpan(weights));
  };
  EXPECT_TRUE(select(Router(8, 2), 16, {}, {}).ok());
  EXPECT_THAT(std::string(select(Router(8, 2), 17, {}, {}).message()), HasSubstr("got 17"));
  EXPECT_THAT(std::string(select(Router(8, 2), 24, {}, {}).message()), HasSubstr("got 24, 4"));
  EXPECT_THAT(std::string(select(Router(8, 2), 16, {1.0f}, {}).message()),
              HasSubstr("selection_bias must have 0 entries, got 1"));
  RouterDescriptor router = Router(8, 2);
  router.has_per_expert_scale = true;
  EXPECT_THAT(std::string(select(router, 16, {}, {1.0f}).message()),
              HasSubstr("per_expert_scale must have 8 entries, got 1"));
  std::vector<float> scale(8, 1.0f);
  scale[3] = kNan;
  EXPECT_THAT(std::string(select(router, 16, {}, scale).message()),
              HasSubstr("per_expert_scale[3] is not finite"));
}

TEST(SelectExperts, UnderflownSigmoidsGiveFiniteWeights) {
  // The middle token's scores are all exactly 0.
  std::vector<float> logits(3 * 8);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = 0.1f * static_cast<float>(i % 8);
  std::fill(logits.begin() + 8, logits.begin() + 16, -100.0f);
  for (const WeightNorm norm :
       {WeightNorm::kSum, WeightNorm::kSumClamped, WeightNorm::kPNorm, WeightNorm::kNone}) {
    for (const float epsilon : {0.0f, 1e-20f}) {
      RouterDescriptor router = SigmoidRouter(8, 2);
      router.norm = norm;
      router.norm_epsilon = epsilon;
      std::vector<int32_t> ids(6);
      std::vector<float> weights(6);
      ASSERT_TRUE(
          SelectExperts(router, logits, {}, {}, absl::MakeSpan(ids), absl::MakeSpan(weights)).ok());
      EXPECT_THAT(ids, ElementsAre(7, 6, 0, 1, 7, 6));
      EXPECT_EQ(weights[2], 0.0f);
      EXPECT_EQ(weights[3], 0.0f);
      EXPECT_EQ(weights[0], weights[4]);
      EXPECT_EQ(weights[1], weights[5]);
      EXPECT_GT(weights[0], 0.5f);
    }
  }
}

TEST(SelectExperts, DefaultEpsilonChangesNoSoftmax) {
  // The same bits with an epsilon of 0, which stands for 1e-20, as without any normal epsilon.
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> logits(100 * 64);
  for (float& z : logits) z = normal(random);
  std::vector<int32_t> ids(100 * 4);
  std::vector<float> normalised(ids.size()), plain(ids.size());
  RouterDescriptor router = Router(64, 4);
  ASSERT_TRUE(
      SelectExperts(router, logits, {}, {}, absl::MakeSpan(ids), absl::MakeSpan(plain)).ok());
  router.norm = WeightNorm::kSum;
  ASSERT_TRUE(
      SelectExperts(router, logits, {}, {}, absl::MakeSpan(ids), absl::MakeSpan(normalised)).ok());
  for (size_t t = 0; t < 100; ++t) {
    const float* w = &plain[t * 4];
    const float sum = ((w[0] + w[1]) + w[2]) + w[3];
    for (size_t s = 0; s < 4; ++s) EXPECT_EQ(normalised[t * 4 + s], w[s] / sum);
  }
}

TEST(Gate, TiesGoToTheLowerIdAlways) {
  const auto gate = IdentityGate(Router(8, 3), 8);
  ASSERT_TRUE(gate.ok()) << gate.status();
  for (const int64_t tokens : {1, 257}) {
    const Tensor x = MakeTensor(DType::kF32, {tokens, 8},
                                std::vector<float>(static_cast<size_t>(tokens * 8), 0.25f));
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto routing = gate->Route(x);
      ASSERT_TRUE(routing.ok()) << routing.status();
      for (int64_t t = 0; t < tokens; ++t) {
        const int32_t* ids = routing->topk_ids.as<int32_t>() + t * 3;
        ASSERT_THAT(std::vector<int32_t>(ids, ids + 3), ElementsAre(0, 1, 2));
      }
    }
  }
}

TEST(Gate, ATokenDoesNotDependOnTheOthers) {
  constexpr int64_t kHidden = 129;
  constexpr int64_t kTokens = 23;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weight(16 * kHidden), bias(16), x(kTokens * kHidden);
  for (float& v : weight) v = normal(random);
  for (float& v : bias) v = normal(random);
  for (float& v : x) v = normal(random);
  for (const int32_t k : {1, 4}) {  // one slot too: normalisation runs over slots, not tokens
    RouterDescriptor router = SigmoidRouter(16, k);
    router.has_selection_bias = true;
    router.group_score = GroupScore::kTop2Sum;
    router.num_groups = 4;
    router.topk_groups = 2;
    const auto gate = Gate::Create(router, {MakeTensor(DType::kBF16, {16, kHidden}, weight),
                                            Tensor(), Vector(bias), Tensor()});
    ASSERT_TRUE(gate.ok()) << gate.status();
    const auto all = gate->Route(MakeTensor(DType::kF32, {kTokens, kHidden}, x));
    ASSERT_TRUE(all.ok()) << all.status();
    for (int64_t t = 0; t < kTokens; ++t) {
      const std::vector<float> row(x.begin() + t * kHidden, x.begin() + (t + 1) * kHidden);
      const auto one = gate->Route(MakeTensor(DType::kF32, {1, kHidden}, row));
      ASSERT_TRUE(one.ok()) << one.status();
      const size_t slots = static_cast<size_t>(k) * 4;
      EXPECT_EQ(0, std::memcmp(one->topk_ids.data(), all->topk_ids.as<int32_t>() + t * k, slots));
      EXPECT_EQ(
          0, std::memcmp(one->topk_weights.data(), all->topk_weights.as<float>() + t * k, slots));
      EXPECT_EQ(0, std::memcmp(one->logits.data(), all->logits.as<float>() + t * 16, 16 * 4));
      if (k == 1) {
        EXPECT_EQ(one->topk_weights.as<float>()[0], 1.0f);
      }
    }
  }
}

TEST(Gate, TheSameBitsOnEveryInstructionSetAsByThePlainLoops) {
  std::mt19937 random(12);
  for (const DType weight_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const auto& [experts, hidden] :
           std::vector<std::pair<int64_t, int64_t>>{{5, 33}, {130, 64}}) {
        // The second scale puts products and sums around the smallest normal number.
        for (const float scale : {1.0f, 2e-19f}) {
          if (scale < 1 && (weight_dtype == DType::kF16 || dtype == DType::kF16)) continue;
          const Tensor weight = RandomTensor(weight_dtype, {experts, hidden}, scale, random);
          const Tensor x = RandomTensor(dtype, {150, hidden}, scale, random);
          const RouterDescriptor router = Router(static_cast<int32_t>(experts), 3);
          const auto route = [&](EngineKind kind, Isa isa) {
            return Gate::Create(router, {weight, Tensor(), Tensor(), Tensor()}, kind, isa)
                ->Route(x)
                .value();
          };
          const Routing expected = route(EngineKind::kForLoop, BestIsa());
          for (const Isa isa : SupportedIsas()) {
            const Routing got = route(EngineKind::kGrouped, isa);
            EXPECT_EQ(0, std::memcmp(got.logits.data(), expected.logits.data(),
                                     expected.logits.num_bytes()))
                << NameOf(isa) << ", " << NameOf(weight_dtype) << " x " << NameOf(dtype) << ", "
                << experts << " experts, scale " << scale;
            EXPECT_EQ(Ids(got.topk_ids), Ids(expected.topk_ids));
          }
        }
      }
    }
  }
}

TEST(Gate, TheSameBitsInFortyRepeatsAndOnAllThreads) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> weight(64 * 96), x(33 * 96);
  for (float& v : weight) v = normal(random);
  for (float& v : x) v = normal(random);
  const auto gate = Gate::Create(
      Router(64, 8), {MakeTensor(DType::kBF16, {64, 96}, weight), Tensor(), Tensor(), Tensor()});
  ASSERT_TRUE(gate.ok()) << gate.status();
  const Tensor tokens = MakeTensor(DType::kBF16, {33, 96}, x);
  const auto first = gate->Route(tokens);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto same = [&] {
    const auto again = gate->Route(tokens);
    return again.ok() && Ids(again->topk_ids) == Ids(first->topk_ids) &&
           std::memcmp(again->topk_weights.data(), first->topk_weights.data(),
                       first->topk_weights.num_bytes()) == 0;
  };
  int differing[4] = {};
  std::vector<std::thread> threads;
  for (int& count : differing) {
    threads.emplace_back([&same, &count] {
      for (int repeat = 0; repeat < 10; ++repeat) count += !same();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(differing, ElementsAre(0, 0, 0, 0));
}

TEST(Gate, RefusesInputsThatDoNotFit) {
  const auto gate = IdentityGate(Router(8, 2), 8);
  ASSERT_TRUE(gate.ok()) << gate.status();
  for (const Tensor& x : {Tensor(DType::kF32, {3, 9}), Tensor(DType::kF32, {24}),
                          Tensor(DType::kF32, {1, 3, 8}), Tensor(DType::kI32, {3, 8})}) {
    const absl::Status status = gate->Route(x).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("hidden_states must be F32, BF16 or F16 [tokens, 8], got ",
                                       NameOf(x.dtype()), " ", ShapeToString(x.shape()))));
  }
}

TEST(Gate, RefusesWeightsThatDoNotFit) {
  RouterDescriptor router = Router(8, 2);
  const Tensor weight = MakeTensor(DType::kF32, {8, 4}, std::vector<float>(32));
  const Tensor seven = Vector(std::vector<float>(7));
  EXPECT_TRUE(Gate::Create(router, {weight, Tensor(), Tensor(), Tensor()}).ok());
  const auto message = [](const RouterDescriptor& r, RouterWeights weights) {
    const absl::Status status = Gate::Create(r, std::move(weights)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(router, {seven, Tensor(), Tensor(), Tensor()}),
              HasSubstr("router weight must be F32, BF16 or F16 [8, hidden_size], got F32 [7]"));
  EXPECT_THAT(message(router, {Tensor(DType::kI32, {8, 4}), Tensor(), Tensor(), Tensor()}),
              HasSubstr("got I32 [8, 4]"));
  EXPECT_THAT(message(router, {weight, seven, Tensor(), Tensor()}),
              HasSubstr("logits_bias must be F32 [0], got F32 [7]"));
  router.has_selection_bias = true;
  EXPECT_THAT(message(router, {weight, Tensor(), seven, Tensor()}),
              HasSubstr("selection_bias must be F32 [8], got F32 [7]"));
  EXPECT_THAT(message(router, {weight, Tensor(), Vector({0, 0, kNan, 0, 0, 0, 0, 0}), Tensor()}),
              HasSubstr("selection_bias[2] is not finite"));
}

TEST(ValidateRouter, RefusesWhatCannotBeComputed) {
  const auto status = [](auto change) {
    RouterDescriptor router = Router(12, 2);
    change(router);
    return ValidateRouter(router);
  };
  const auto refused = [&](auto change) {
    const absl::Status result = status(change);
    EXPECT_EQ(result.code(), absl::StatusCode::kInvalidArgument) << result;
    return std::string(result.message());
  };
  const auto groups = [](RouterDescriptor& r, GroupScore score, int32_t n, int32_t kept,
                         int32_t k) {
    r.group_score = score;
    r.num_groups = n;
    r.topk_groups = kept;
    r.top_k = k;
  };
  using R = RouterDescriptor;
  EXPECT_TRUE(status([](R&) {}).ok());
  EXPECT_TRUE(status([](R& r) { r.top_k = 12; }).ok());
  EXPECT_THAT(refused([](R& r) { r.top_k = 13; }), HasSubstr("[1, 12], got 13"));
  EXPECT_THAT(refused([](R& r) { r.top_k = 0; }), HasSubstr("top_k"));
  EXPECT_THAT(refused([](R& r) { r.num_experts = 0; }), HasSubstr("num_experts"));
  EXPECT_THAT(refused([](R& r) { r.identity_experts = -1; }), HasSubstr("identity_experts"));
  EXPECT_TRUE(status([](R& r) { r.top_k = 16, r.identity_experts = 4; }).ok());
  EXPECT_THAT(refused([&](R& r) { groups(r, GroupScore::kMax, 5, 1, 2); }),
              HasSubstr("num_groups must divide the 12 experts, got 5"));
  EXPECT_THAT(refused([&](R& r) { groups(r, GroupScore::kMax, 4, 5, 2); }), HasSubstr("got 5"));
  EXPECT_THAT(refused([&](R& r) { groups(r, GroupScore::kMax, 4, 2, 7); }),
              HasSubstr("2 * 3, got 7"));
  EXPECT_TRUE(status([&](R& r) { groups(r, GroupScore::kMax, 4, 2, 6); }).ok());
  EXPECT_THAT(refused([&](R& r) { groups(r, GroupScore::kTop2Sum, 12, 4, 2); }),
              HasSubstr("best two"));
  EXPECT_TRUE(status([&](R& r) { groups(r, GroupScore::kMax, 12, 4, 2); }).ok());
  EXPECT_THAT(refused([](R& r) { r.scale = kNan; }), HasSubstr("scale"));
  EXPECT_THAT(refused([](R& r) { r.norm_epsilon = -1.0f; }), HasSubstr("norm_epsilon"));

  EXPECT_THAT(refused([](R& r) { r.jitter = -0.5f; }), HasSubstr("jitter"));
  EXPECT_TRUE(status([](R& r) { r.score = ScoreFunction::kSparsemixer; }).ok());
  for (const int32_t k : {1, 3}) {
    EXPECT_THAT(refused([k](R& r) { r.score = ScoreFunction::kSparsemixer, r.top_k = k; }),
                HasSubstr(absl::StrCat("selects 2 experts, got top_k ", k)));
  }
  EXPECT_THAT(
      refused([](R& r) { r.score = ScoreFunction::kSparsemixer, r.has_selection_bias = true; }),
      HasSubstr("neither a selection bias nor groups"));
  EXPECT_THAT(refused([&](R& r) {
                r.score = ScoreFunction::kSparsemixer;
                groups(r, GroupScore::kMax, 4, 2, 2);
              }),
              HasSubstr("neither a selection bias nor groups"));

  const absl::Status p_norm = status([](R& r) { r.norm = WeightNorm::kPNorm, r.norm_p = 3.0f; });
  EXPECT_EQ(p_norm.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(p_norm.message()), HasSubstr("norm_p 3"));
  EXPECT_FALSE(
      Gate::Create(Router(8, 9), {Tensor(DType::kF32, {8, 4}), Tensor(), Tensor(), Tensor()}).ok());
}

}  // namespace
}  // namespace expertmesh
