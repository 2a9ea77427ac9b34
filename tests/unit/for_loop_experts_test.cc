// ForLoopExperts against a restatement of the bit contract that knows nothing of it, on the
// thread's own floating-point environment.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "expert_server/engine/cpu/for_loop_experts.h"
#include "tests/random_tensor.h"
#include "tests/restated_experts.h"

namespace expertmesh {
namespace {

struct Shape {
  int64_t hidden_size;
  int64_t intermediate_size;
};

// The whole expert for one row, under FTZ and DAZ.
std::vector<float> Reference(const ExpertDescriptor& descriptor, const ExpertWeights& expert,
                             DType dtype, const Tensor& rows, int64_t row) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  std::vector<float> x(rows.dim(1));
  for (int64_t d = 0; d < rows.dim(1); ++d) {
    x[d] = LoadFloat(dtype, rows.data(), row * rows.dim(1) + d);
  }
  const std::vector<float> y = RestatedExpert(descriptor, expert, dtype, x);
  _mm_setcsr(saved);
  return y;
}

absl::StatusOr<std::unique_ptr<Experts>> Make(const ExpertDescriptor& descriptor,
                                              const std::vector<ExpertWeights>& weights) {
  auto experts = MakeForLoopExperts(descriptor, static_cast<int64_t>(weights.size()));
  for (size_t e = 0; experts.ok() && e < weights.size(); ++e) (*experts)->SetWeights(e, weights[e]);
  return experts;
}

class ForLoopExpertsTest : public testing::TestWithParam<std::tuple<WeightType, DType, float>> {};

TEST_P(ForLoopExpertsTest, HasTheBitsOfTheContract) {
  const auto [type, dtype, scale] = GetParam();
  std::mt19937 rng(7);
  struct Case {
    Shape shape;
    Activation activation;
    bool has_bias;
  };
  std::vector<Case> cases = {{{160, 96}, Activation::kSiluGlu, false},
                             {{300, 134}, Activation::kSiluGlu, true}};
  for (const Activation activation : AllActivations()) {
    for (const bool has_bias : {false, true}) cases.push_back({{33, 17}, activation, has_bias});
    cases.push_back({{8, 1}, activation, false});
  }
  for (const auto& [shape, activation, has_bias] : cases) {
    const int64_t hidden_size = type.Width(shape.hidden_size);
    SCOPED_TRACE(absl::StrCat("D ", shape.hidden_size, ", activation ",
                              static_cast<int>(activation), ", bias ", has_bias));
    const ExpertDescriptor descriptor =
        Expert(activation, has_bias, type, hidden_size, type.Width(shape.intermediate_size));
    std::vector<ExpertWeights> experts, copies;
    for (int e = 0; e < 3; ++e) {
      experts.push_back(RandomExpert(descriptor, scale, rng));
      copies.push_back(experts[e]);  // shares the memory
    }
    auto engine = Make(descriptor, experts);
    ASSERT_TRUE(engine.ok());
    const Tensor rows = RandomTensor(dtype, {4, hidden_size}, 1.0f, rng);
    const std::vector<int32_t> ids = {0, 2};
    const std::vector<int64_t> m_sizes = {4, 4};
    const std::vector<int32_t> gather = {1, 0, 3, -1, 2, 1, -1, -1};
    const ExpertBatch batch = {rows, ids, m_sizes, gather};
    Tensor output(ReplyDType(dtype), {5, hidden_size});
    EXPECT_EQ((*engine)->Forward(batch, output.data()).code(),
              absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE((*engine)->Prepare().ok());
    ASSERT_TRUE((*engine)->Prepare().ok());
    ASSERT_TRUE((*engine)->Forward(batch, output.data()).ok());
    const std::vector<std::pair<int, int>> expected = {{0, 1}, {0, 0}, {0, 3}, {2, 2}, {2, 1}};
    int64_t nonzero = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto [expert, row] = expected[i];
      const std::vector<float> y = Reference(descriptor, copies[expert], dtype, rows, row);
      for (int64_t d = 0; d < hidden_size; ++d) {
        const float got = LoadFloat(output.dtype(), output.data(), i * hidden_size + d);
        ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(y[d]))
            << "position " << i << ", channel " << d << ": expected " << y[d] << ", got " << got;
        nonzero += y[d] != 0.0f;
      }
    }
    EXPECT_GT(nonzero, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, ForLoopExpertsTest,
                         testing::Combine(testing::ValuesIn(AllWeightTypes()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(0.1f, 3.0f)));

// Weights so small that products are denormal: they must count as zero, as on every machine.
TEST(ForLoopExperts, DenormalProductsAreZero) {
  ExpertDescriptor descriptor;
  descriptor.hidden_size = 4;
  descriptor.intermediate_size = 2;
  descriptor.weight_dtype = DType::kF32;
  std::mt19937 rng(3);
  std::vector<ExpertWeights> experts(1);
  experts[0].gate_up = RandomTensor(DType::kF32, {4, 4}, 1.0f, rng);
  experts[0].down = RandomTensor(DType::kF32, {4, 2}, 1e-38f, rng);
  const ExpertWeights copy = experts[0];
  auto engine = Make(descriptor, experts);
  ASSERT_TRUE(engine.ok());
  ASSERT_TRUE((*engine)->Prepare().ok());
  const Tensor rows = RandomTensor(DType::kF32, {64, 4}, 0.5f, rng);
  std::vector<int32_t> gather(64);
  for (int i = 0; i < 64; ++i) gather[i] = i;
  const std::vector<int32_t> ids = {0};
  const std::vector<int64_t> m_sizes = {64};
  Tensor output(DType::kF32, {64, 4});
  ASSERT_TRUE((*engine)->Forward({rows, ids, m_sizes, gather}, output.data()).ok());
  int zeros = 0;
  for (int i = 0; i < 64; ++i) {
    const std::vector<float> y = Reference(descriptor, copy, DType::kF32, rows, i);
    for (int d = 0; d < 4; ++d) {
      const float got = output.as<float>()[i * 4 + d];
      EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(y[d]));
      zeros += got == 0.0f;
    }
  }
  EXPECT_GT(zeros, 10);
  EXPECT_LT(zeros, 256);
}

// An odd width is padded with a zero product, which turns a sum that was flushed to -0 into +0.
TEST(ForLoopExperts, OddWidthsArePaddedWithAZeroProduct) {
  ExpertDescriptor descriptor;
  descriptor.hidden_size = 2;
  descriptor.intermediate_size = 3;
  const auto bf16 = [](std::vector<int64_t> shape, const std::vector<float>& values) {
    Tensor tensor(DType::kBF16, std::move(shape));
    for (size_t i = 0; i < values.size(); ++i)
      StoreFloat(DType::kBF16, tensor.data(), i, values[i]);
    return tensor;
  };
  // With x = (1, 0): g = (0, 1, 0), u = (1, -1e-20, 1), so h = (0, -7.3e-21, 0).
  std::vector<ExpertWeights> experts(1);
  experts[0].gate_up = bf16({6, 2}, {0, 0, 1, 0, 0, 0, 1, 0, -1e-20f, 0, 1, 0});
  // Chain over k = 1, 0, padding, 2: -7.3e-41 is flushed to -0, -0 added, +0 added, -0 added.
  experts[0].down = bf16({2, 3}, {-1, 1e-20f, -1, -1, 1e-20f, -1});
  auto engine = Make(descriptor, experts);
  ASSERT_TRUE(engine.ok());
  ASSERT_TRUE((*engine)->Prepare().ok());
  Tensor rows(DType::kF32, {1, 2});
  rows.as<float>()[0] = 1;
  rows.as<float>()[1] = 0;
  const std::vector<int32_t> ids = {0}, gather = {0};
  const std::vector<int64_t> m_sizes = {1};
  Tensor output(DType::kF32, {1, 2});
  ASSERT_TRUE((*engine)->Forward({rows, ids, m_sizes, gather}, output.data()).ok());
  EXPECT_EQ(output.as<uint32_t>()[0], 0u) << "the sign of zero";
  EXPECT_EQ(output.as<uint32_t>()[1], 0u) << "the sign of zero";
}

TEST(ForLoopExperts, RefusesBatchesThatDoNotFit) {
  const Tensor rows(DType::kF32, {2, 4});
  const std::vector<int32_t> ids = {0};
  const auto check = [&](const Tensor& r, std::vector<int32_t> experts, std::vector<int64_t> sizes,
                         std::vector<int32_t> gather) {
    const ExpertBatch batch = {r, experts, sizes, gather};
    return std::string(ValidateBatch(batch, 4, 3).message());
  };
  EXPECT_EQ(check(rows, {0}, {2}, {0, 1}), "");
  EXPECT_EQ(check(Tensor(DType::kF32, {2, 5}), {0}, {2}, {0, 1}),
            "rows.shape: expected [R, 4], got [2, 5]");
  EXPECT_EQ(check(Tensor(DType::kI32, {2, 4}), {0}, {2}, {0, 1}),
            "rows.dtype: expected F32, BF16 or F16, got I32");
  EXPECT_NE(check(rows, {3}, {2}, {0, 1}).find("experts"), std::string::npos);
  EXPECT_NE(check(rows, {0}, {3}, {0, 1}).find("gather: expected 3"), std::string::npos);
  EXPECT_NE(check(rows, {0}, {1}, {0, 1}).find("gather: expected 1"), std::string::npos);
  EXPECT_NE(check(rows, {0}, {-1}, {}).find("m_sizes"), std::string::npos);
  EXPECT_NE(check(rows, {0}, {2}, {0, 2}).find("gather"), std::string::npos);
  EXPECT_NE(check(rows, {0}, {2}, {-2, 0}).find("gather"), std::string::npos);
  EXPECT_NE(check(rows, {0, 1}, {2}, {0, 1}).find("m_sizes"), std::string::npos);
  EXPECT_NE(check(rows, {0, 1}, {INT64_MAX, 3}, {0, 1}).find("m_sizes"), std::string::npos);
}

TEST(CheckComputed, RefusesWhatIsNoExpert) {
  for (const Activation activation : AllActivations()) {
    ExpertDescriptor descriptor = Expert(activation, true, DType::kBF16, 8, 4);
    EXPECT_TRUE(CheckComputed(descriptor).ok());
    descriptor.gated = !descriptor.gated;
    EXPECT_EQ(CheckComputed(descriptor).code(), absl::StatusCode::kInvalidArgument);
    descriptor.gated = !descriptor.gated;
    descriptor.activation_limit = 0.0f;
    const bool limited = activation == Activation::kClampedSwishGlu ||
                         activation == Activation::kClampedSiluGlu ||
                         activation == Activation::kSiluClampedGlu;
    EXPECT_EQ(CheckComputed(descriptor).ok(), !limited);
    descriptor.activation_limit = INFINITY;
    EXPECT_FALSE(CheckComputed(descriptor).ok());
  }
}

TEST(CheckComputed, WeightsAreInTheFormatOfTheRows) {
  ExpertDescriptor descriptor = Expert(Activation::kSiluGlu, true, DType::kBF16, 8, 4);
  for (const QuantizedFormat format : {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                       QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil}) {
    descriptor.row_format = format;
    descriptor.weight_format = WeightFormat::kPlain;
    EXPECT_EQ(CheckComputed(descriptor).message(),
              absl::StrCat("experts: expected weights in ", NameOf(WeightFormatOf(format)),
                           " for rows in ", NameOf(format), ", got plain"));
    descriptor.weight_format = WeightFormatOf(format);
    descriptor.weight_dtype = DType::kF8_E4M3;
    EXPECT_TRUE(CheckComputed(descriptor).ok());
  }
}

TEST(CheckWeights, NamesTheTensorThatDoesNotFit) {
  const ExpertDescriptor gated = Expert(Activation::kSiluGlu, true, DType::kBF16, 8, 4);
  std::mt19937 rng(4);
  const ExpertWeights good = RandomExpert(gated, 1.0f, rng);
  EXPECT_TRUE(CheckWeights(gated, good).ok());
  const auto refusal = [&](Tensor ExpertWeights::*which, const Tensor& tensor) {
    ExpertWeights weights = good;
    weights.*which = tensor;
    return std::string(CheckWeights(gated, weights).message());
  };
  EXPECT_EQ(refusal(&ExpertWeights::gate_up, Tensor(DType::kBF16, {4, 8})),
            "gate_up: expected BF16 [8, 8], got BF16 [4, 8]");
  EXPECT_EQ(refusal(&ExpertWeights::down, Tensor(DType::kF32, {8, 4})),
            "down: expected BF16 [8, 4], got F32 [8, 4]");
  EXPECT_EQ(refusal(&ExpertWeights::gate_up_bias, Tensor()),
            "gate_up_bias: expected F32 [8], got F32 [0]");
  EXPECT_EQ(refusal(&ExpertWeights::down_bias, Tensor(DType::kF32, {4})),
            "down_bias: expected F32 [8], got F32 [4]");
}

}  // namespace
}  // namespace expertmesh
