// The norm of rows against its formula in double precision, and what a token's bits depend on.

#include "router/gating/input_norm.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr int64_t kHidden = 37;
constexpr int64_t kTokens = 5;

Tensor Fill(DType dtype, const std::vector<int64_t>& shape, float factor) {
  Tensor tensor(dtype, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    StoreFloat(dtype, tensor.data(), i, factor * std::sin(static_cast<float>(7 * i + 1)));
  }
  return tensor;
}

RowNorm Make(const InputNorm& norm, const Tensor& weight) {
  auto created = RowNorm::Create(norm, weight, kHidden);
  EXPECT_TRUE(created.ok()) << created.status();
  return *std::move(created);
}

TEST(RowNorm, IsTheFormula) {
  const Tensor weight = Fill(DType::kF32, {kHidden}, 2.0f);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const float epsilon : {1e-6f, 0.5f}) {
      const RowNorm norm = Make({true, epsilon, 0.25f}, weight);
      const Tensor rows = Fill(dtype, {kTokens, kHidden}, 3.0f);
      const Tensor got = norm.Apply(rows, DType::kF32);
      for (int64_t t = 0; t < kTokens; ++t) {
        const auto x = [&](int64_t k) {
          return static_cast<double>(LoadFloat(dtype, rows.data(), t * kHidden + k));
        };
        double sum = 0;
        for (int64_t k = 0; k < kHidden; ++k) sum += x(k) * x(k);
        for (int64_t k = 0; k < kHidden; ++k) {
          const double expected = x(k) / std::sqrt(sum / kHidden + epsilon) *
                                  static_cast<double>(weight.as<float>()[k]) * 0.25;
          EXPECT_NEAR(got.as<float>()[t * kHidden + k], expected, 1e-6);
        }
      }
    }
  }
}

TEST(RowNorm, RoundsOnceAndDoesNotDependOnOtherRows) {
  const RowNorm norm = Make({true, 1e-6f, 1.0f}, Fill(DType::kF32, {kHidden}, 2.0f));
  const Tensor rows = Fill(DType::kBF16, {kTokens, kHidden}, 3.0f);
  const Tensor wide = norm.Apply(rows, DType::kF32);
  const Tensor narrow = norm.Apply(rows, DType::kBF16);
  for (int64_t i = 0; i < wide.num_elements(); ++i) {
    EXPECT_EQ(narrow.as<uint16_t>()[i], BF16FromFloat(wide.as<float>()[i]));
  }
  const std::vector<int64_t> one_row = {1, kHidden};
  for (int64_t t = 0; t < kTokens; ++t) {
    const TensorView row(DType::kBF16, one_row, rows.as<uint16_t>() + t * kHidden);
    const Tensor alone = norm.Apply(row, DType::kF32);
    EXPECT_EQ(std::memcmp(alone.data(), wide.as<float>() + t * kHidden, alone.num_bytes()), 0);
  }
}

TEST(RowNorm, ZerosStayZeroAndWhatIsNotFiniteStaysSo) {
  const RowNorm norm = Make({true, 1e-6f, 1.0f}, Fill(DType::kF32, {kHidden}, 2.0f));
  Tensor rows(DType::kF32, {3, kHidden});
  std::memset(rows.data(), 0, rows.num_bytes());
  rows.as<float>()[kHidden + 3] = std::numeric_limits<float>::infinity();
  rows.as<float>()[2 * kHidden + 5] = std::nanf("");
  const Tensor got = norm.Apply(rows, DType::kF32);
  for (int64_t k = 0; k < kHidden; ++k) EXPECT_EQ(got.as<float>()[k], 0.0f);
  for (const int64_t t : {1, 2}) {
    bool finite = true;
    for (int64_t k = 0; k < kHidden; ++k) finite &= std::isfinite(got.as<float>()[t * kHidden + k]);
    EXPECT_FALSE(finite) << t;
  }
  EXPECT_EQ(norm.Apply(Tensor(DType::kF32, {0, kHidden}), DType::kBF16).num_elements(), 0);
}

TEST(RowNorm, RefusesWhatDoesNotFit) {
  const Tensor weight = Fill(DType::kF32, {kHidden}, 1.0f);
  EXPECT_FALSE(RowNorm::Create({true, 1e-6f, 1.0f}, weight, kHidden + 1).ok());
  EXPECT_FALSE(RowNorm::Create({true, 1e-6f, 1.0f}, Tensor(), kHidden).ok());
  EXPECT_FALSE(
      RowNorm::Create({true, 1e-6f, 1.0f}, Fill(DType::kBF16, {kHidden}, 1.0f), kHidden).ok());
  EXPECT_FALSE(RowNorm::Create({true, -1.0f, 1.0f}, weight, kHidden).ok());
  EXPECT_FALSE(
      RowNorm::Create({true, std::numeric_limits<float>::quiet_NaN(), 1.0f}, weight, kHidden).ok());
}

}  // namespace
}  // namespace expertmesh
