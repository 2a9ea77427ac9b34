// ForLoopExperts against a restatement of the bit contract that knows nothing of it: every fused
// multiply-add by libm's fma on the thread's own floating-point environment, in the order that
// the weight format fixes.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "common/numerics/math.h"
#include "expert_server/engine/cpu/for_loop_experts.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

struct Shape {
  int64_t hidden_size;
  int64_t intermediate_size;
};

// Weight [n, k], unscaled for fp8.
float Weight(const RandomWeights& weights, int64_t n, int64_t k) {
  const int64_t columns = weights.View().k();
  const auto byte = [&](int64_t i) { return int{weights.values.as<uint8_t>()[i]}; };
  switch (weights.format) {
    case WeightFormat::kPlain:
      return LoadFloat(weights.values.dtype(), weights.values.data(), n * columns + k);
    case WeightFormat::kMxfp4: {
      const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int code = byte((n * columns + k) / 2) >> (k % 2 * 4) & 15;
      const int scale = weights.scales.as<uint8_t>()[n * weights.scales.dim(1) + k / 32];
      const auto magnitude = static_cast<float>(std::ldexp(magnitudes[code & 7], scale - 127));
      return code > 8 ? -magnitude : magnitude;
    }
    default: {
      const int code = byte(n * columns + k);
      const int exponent = code >> 3 & 15;
      const int mantissa = code & 7;
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      return static_cast<float>(code >= 128 ? -magnitude : magnitude);
    }
  }
}

// One chain over [begin, end), by the order of the weight format.
float Chain(const std::vector<float>& x, const RandomWeights& weights, int64_t n, int64_t begin,
            int64_t end) {
  std::vector<int64_t> order;
  if (weights.values.dtype() == DType::kF32) {
    for (int64_t k = begin; k < end; ++k) order.push_back(k);
  } else {
    const int64_t pad = weights.format == WeightFormat::kPlain   ? 2
                        : weights.format == WeightFormat::kMxfp4 ? 8
                                                                 : 4;
    for (int64_t k = begin; k < end || (k - begin) % pad != 0; k += 2) {
      order.push_back(k + 1);  // may be a zero that pads
      order.push_back(k);
    }
  }
  volatile float sum = 0.0f;
  for (const int64_t k : order) {
    sum = k < end ? fmaf(x[k], Weight(weights, n, k), sum) : fmaf(0.0f, 0.0f, sum);
  }
  return sum;
}

// Output n of a projection.
float Project(const std::vector<float>& x, const RandomWeights& weights, int64_t n) {
  const int64_t columns = weights.View().k();
  const float* const scales = weights.scales.as<float>();
  if (weights.format == WeightFormat::kFp8Row) {
    volatile float chain = Chain(x, weights, n, 0, columns);
    return chain * scales[n];
  }
  if (weights.format != WeightFormat::kFp8Block128) return Chain(x, weights, n, 0, columns);
  volatile float y = 0.0f;
  const int64_t blocks = weights.scales.dim(1);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = 128 * block;
    const int64_t end = std::min(columns, begin + 128);
    y = fmaf(Chain(x, weights, n, begin, end), scales[n * blocks + block], y);
  }
  return y;
}

// The whole expert for one row, under FTZ and DAZ.
std::vector<float> Reference(WeightFormat format, const ExpertWeights& expert, DType dtype,
                             const Tensor& rows, int64_t row) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  const int64_t hidden_size = rows.dim(1);
  const RandomWeights gate_up = {format, expert.gate_up, expert.gate_up_scales};
  const RandomWeights down = {format, expert.down, expert.down_scales};
  const int64_t intermediate_size = down.View().k();
  std::vector<float> x(hidden_size), h(intermediate_size), y(hidden_size);
  for (int64_t d = 0; d < hidden_size; ++d)
    x[d] = LoadFloat(dtype, rows.data(), row * hidden_size + d);
  for (int64_t f = 0; f < intermediate_size; ++f) {
    const float g = Project(x, gate_up, f);
    const float u = Project(x, gate_up, intermediate_size + f);
    volatile float silu = g / (1.0f + Exp(-g));
    h[f] = silu * u;
    if (dtype == DType::kBF16) h[f] = FloatFromBF16(BF16FromFloat(h[f]));
  }
  for (int64_t d = 0; d < hidden_size; ++d) {
    y[d] = Project(h, down, d);
    if (dtype == DType::kBF16) y[d] = FloatFromBF16(BF16FromFloat(y[d]));
  }
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
  for (const Shape shape : {Shape{160, 96}, Shape{33, 17}, Shape{300, 134}, Shape{8, 1}}) {
    if (shape.intermediate_size % 2 == 1 && type.format == WeightFormat::kMxfp4) continue;
    ExpertDescriptor descriptor;
    descriptor.hidden_size = shape.hidden_size;
    descriptor.intermediate_size = shape.intermediate_size;
    descriptor.weight_dtype = type.dtype;
    descriptor.weight_format = type.format;
    std::vector<ExpertWeights> experts(3), copies(3);
    for (int e = 0; e < 3; ++e) {
      const RandomWeights gate_up =
          MakeWeights(type, 2 * shape.intermediate_size, shape.hidden_size, scale, rng);
      const RandomWeights down =
          MakeWeights(type, shape.hidden_size, shape.intermediate_size, scale, rng);
      experts[e].gate_up = gate_up.values;
      experts[e].gate_up_scales = gate_up.scales;
      experts[e].down = down.values;
      experts[e].down_scales = down.scales;
      copies[e] = experts[e];  // shares the memory
    }
    auto engine = Make(descriptor, experts);
    ASSERT_TRUE(engine.ok());
    const Tensor rows = RandomTensor(dtype, {4, shape.hidden_size}, 1.0f, rng);
    const std::vector<int32_t> ids = {0, 2};
    const std::vector<int64_t> m_sizes = {4, 4};
    const std::vector<int32_t> gather = {1, 0, 3, -1, 2, 1, -1, -1};
    const ExpertBatch batch = {rows, ids, m_sizes, gather};
    Tensor output(ReplyDType(dtype), {5, shape.hidden_size});
    EXPECT_EQ((*engine)->Forward(batch, output.data()).code(),
              absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE((*engine)->Prepare().ok());
    ASSERT_TRUE((*engine)->Prepare().ok());
    ASSERT_TRUE((*engine)->Forward(batch, output.data()).ok());
    const std::vector<std::pair<int, int>> expected = {{0, 1}, {0, 0}, {0, 3}, {2, 2}, {2, 1}};
    int64_t nonzero = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto [expert, row] = expected[i];
      const std::vector<float> y = Reference(type.format, copies[expert], dtype, rows, row);
      for (int64_t d = 0; d < shape.hidden_size; ++d) {
        const float got = LoadFloat(output.dtype(), output.data(), i * shape.hidden_size + d);
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
    const std::vector<float> y = Reference(WeightFormat::kPlain, copy, DType::kF32, rows, i);
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

}  // namespace
}  // namespace expertmesh
