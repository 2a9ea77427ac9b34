#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/numerics/activation.h"
#include "common/numerics/flush_denormals.h"
#include "common/numerics/math.h"
#include "common/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// ---- Elementary functions ----------------------------------------------------------------------

// Distance of `given` from `exact` in units of the last place of a float of that size.
double Ulps(float given, long double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return static_cast<double>(std::fabs(given - exact) / std::ldexp(1.0L, exponent - 24));
}

struct Worst {
  double ulps = 0.0;
  float at = 0.0f;
  int64_t decreasing = 0;  // places where the function is not monotone
};

// Every `step`-th float from `first` to `last` by magnitude; both have the same sign.
template <typename Function, typename Exact>
KERNEL_NOINLINE Worst Sweep(float first, float last, uint32_t step, Function function,
                            Exact exact) {
  Worst worst;
  float previous = function(first);
  const bool rising =
      exact(static_cast<long double>(first)) < exact(static_cast<long double>(last));
  for (uint64_t bits = Bits(first); bits <= Bits(last); bits += step) {
    const float x = FromBits(static_cast<uint32_t>(bits));
    const float y = function(x);
    const double ulps = Ulps(y, exact(static_cast<long double>(x)));
    if (!(ulps <= worst.ulps)) {
      worst.ulps = ulps;
      worst.at = x;
    }
    if (rising ? y < previous : y > previous) ++worst.decreasing;
    previous = y;
  }
  return worst;
}

constexpr float kSmallest = 0x1p-126f;  // normal
constexpr float kLargest = std::numeric_limits<float>::max();

TEST(Exp, WithinItsStatedErrorAndMonotone) {
  const ScopedFlushDenormals flush;
  const auto exact = [](long double x) { return std::exp(x); };
  // Coarsely over all exponents, densely where the error is largest, and around each change of n.
  for (const auto& [first, last, step] :
       std::vector<std::tuple<float, float, uint32_t>>{{kSmallest, 88.72283f, 1009},
                                                       {-kSmallest, -87.33654f, 1009},
                                                       {-5.8f, -5.95f, 1},
                                                       {-0.3f, -0.4f, 7},
                                                       {0.3f, 0.4f, 7}}) {
    const Worst worst = Sweep(
        first, last, step, [](float x) { return Exp(x); }, exact);
    EXPECT_LE(worst.ulps, 1.02) << "at " << worst.at;
    EXPECT_EQ(worst.decreasing, 0);
  }
  // The largest error, so that the stated one stays honest.
  EXPECT_GT(Ulps(Exp(-0x1.782f42p+2f), std::exp(-0x1.782f42p+2L)), 1.0);
}

TEST(Exp, MonotoneAcrossEveryChangeOfTheExponent) {
  const ScopedFlushDenormals flush;
  for (int n = -126; n <= 127; ++n) {
    const float boundary = static_cast<float>((n + 0.5) * 0.69314718055994531);
    float x = boundary;
    for (int i = 0; i < 200; ++i) x = std::nextafter(x, -kInfinity);
    for (int i = 0; i < 400; ++i) {
      const float next = std::nextafter(x, kInfinity);
      ASSERT_LE(Exp(x), Exp(next)) << "at " << x;
      x = next;
    }
  }
}

TEST(Exp, SpecialValuesAndTheEndsOfTheRange) {
  const ScopedFlushDenormals flush;
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-0.0f), 1.0f);
  EXPECT_EQ(Exp(FromBits(1)), 1.0f);  // denormals are zero
  EXPECT_EQ(Exp(FromBits(0x80000001u)), 1.0f);
  EXPECT_EQ(Exp(kInfinity), kInfinity);
  EXPECT_EQ(Exp(-kInfinity), 0.0f);
  EXPECT_EQ(Exp(kLargest), kInfinity);
  EXPECT_EQ(Exp(-kLargest), 0.0f);
  EXPECT_TRUE(std::isnan(Exp(kNan)));
  EXPECT_TRUE(std::isnan(Exp(-kNan)));
  // The largest argument with a finite result, and the smallest with one that is not 0.
  const float top = 0x1.62e42ep+6f;
  EXPECT_NEAR(Exp(top), std::exp(static_cast<double>(top)), 1e32);
  EXPECT_EQ(Exp(std::nextafter(top, kInfinity)), kInfinity);
  const float bottom = -0x1.5d589ep+6f;
  EXPECT_GE(Exp(bottom), kSmallest);
  EXPECT_EQ(Exp(std::nextafter(bottom, -kInfinity)), 0.0f);
  // Nothing between 0 and the smallest normal number.
  for (float x = -88.0f; x < -87.0f; x += 0x1p-12f) {
    const float y = Exp(x);
    EXPECT_TRUE(y == 0.0f || y >= kSmallest) << x;
  }
}

TEST(Log1p, WithinItsStatedErrorAndMonotone) {
  const ScopedFlushDenormals flush;
  const auto function = [](float x) { return Log1p(x); };
  const auto exact = [](long double x) { return std::log1p(x); };
  for (const auto& [first, last, step] :
       std::vector<std::tuple<float, float, uint32_t>>{{kSmallest, kLargest, 1009},
                                                       {-kSmallest, -0.99999994f, 1009},
                                                       {0.41f, 0.42f, 1},
                                                       {-0.31f, -0.29f, 1}}) {
    const Worst worst = Sweep(first, last, step, function, exact);
    EXPECT_LE(worst.ulps, 1.5) << "at " << worst.at;
    EXPECT_EQ(worst.decreasing, 0);
  }
  EXPECT_EQ(Log1p(0.0f), 0.0f);
  EXPECT_EQ(Log1p(-1.0f), -kInfinity);
  EXPECT_EQ(Log1p(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(Log1p(-1.5f)));
  EXPECT_TRUE(std::isnan(Log1p(kNan)));
}

TEST(Tanh, WithinItsStatedErrorAndMonotone) {
  const ScopedFlushDenormals flush;
  const auto function = [](float x) { return Tanh(x); };
  const auto exact = [](long double x) { return std::tanh(x); };
  for (const auto& [first, last, step] :
       std::vector<std::tuple<float, float, uint32_t>>{{kSmallest, 20.0f, 1009},
                                                       {-kSmallest, -20.0f, 1009},
                                                       {0.62f, 0.63f, 1},
                                                       {-0.62f, -0.63f, 1}}) {
    const Worst worst = Sweep(first, last, step, function, exact);
    EXPECT_LE(worst.ulps, 1.5) << "at " << worst.at;
    EXPECT_EQ(worst.decreasing, 0);
  }
  EXPECT_EQ(Tanh(-0.0f), 0.0f);
  EXPECT_EQ(Tanh(kInfinity), 1.0f);
  EXPECT_EQ(Tanh(-kInfinity), -1.0f);
  EXPECT_TRUE(std::isnan(Tanh(kNan)));
}

TEST(Erf, WithinItsStatedErrorAndMonotone) {
  const ScopedFlushDenormals flush;
  const auto function = [](float x) { return Erf(x); };
  const auto exact = [](long double x) { return std::erf(x); };
  for (const auto& [first, last, step] :
       std::vector<std::tuple<float, float, uint32_t>>{{2 * kSmallest, 20.0f, 1009},
                                                       {-2 * kSmallest, -20.0f, 1009},
                                                       {0.99f, 1.01f, 1},
                                                       {-0.99f, -1.01f, 1}}) {
    const Worst worst = Sweep(first, last, step, function, exact);
    EXPECT_LE(worst.ulps, 1.5) << "at " << worst.at;
    EXPECT_EQ(worst.decreasing, 0);
  }
  EXPECT_EQ(Erf(0.0f), 0.0f);
  EXPECT_EQ(Erf(4.0f), 1.0f);
  EXPECT_EQ(Erf(kInfinity), 1.0f);
  EXPECT_EQ(Erf(-kInfinity), -1.0f);
  EXPECT_TRUE(std::isnan(Erf(kNan)));
}

// What double-precision formulas give, for pairs on either side of every limit.
TEST(Activate, Goldens) {
  const ScopedFlushDenormals flush;
  const std::vector<std::pair<float, float>> inputs = {
      {1.5f, -0.5f}, {-2.0f, 3.0f}, {8.0f, 9.0f}, {12.0f, -11.0f}};
  const std::vector<std::pair<ActivationFunction, std::vector<double>>> cases = {
      {{Activation::kSiluGlu}, {-0.613180857, -0.715217532, 71.975854791, -131.999188969}},
      {{Activation::kClampedSwishGlu, 1.702f, 7.0f},
       {0.695831099, -0.257365507, 55.999625026, -41.999718770}},
      {{Activation::kClampedSiluGlu, 1.0f, 10.0f},
       {-0.613180857, -0.715217532, 71.975854791, -99.995460213}},
      {{Activation::kSiluClampedGlu, 1.0f, 7.0f}, {-0.613180857, -0.715217532, 49.0, -49.0}},
      {{Activation::kGeluTanhGlu}, {-0.699785788, -0.136206918, 72.0, -132.0}},
      {{Activation::kGeluErfGlu}, {-0.699894599, -0.136500792, 72.0, -132.0}},
      {{Activation::kRelu2}, {2.25, 0.0, 64.0, 144.0}}};
  for (const auto& [function, expected] : cases) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_NEAR(Activate(function, inputs[i].first, inputs[i].second), expected[i],
                  1e-6 * std::fabs(expected[i]))
          << "activation " << static_cast<int>(function.kind) << ", input " << i;
    }
    EXPECT_EQ(Bits(Activate(function, 0.0f, 0.0f)), 0u);
  }
}

TEST(Math, SigmoidSiluAndSoftplusAtTheirLimits) {
  const ScopedFlushDenormals flush;
  EXPECT_EQ(Sigmoid(0.0f), 0.5f);
  EXPECT_EQ(Sigmoid(100.0f), 1.0f);
  EXPECT_EQ(Sigmoid(-100.0f), 0.0f);
  EXPECT_EQ(Silu(0.0f), 0.0f);
  EXPECT_EQ(Silu(100.0f), 100.0f);
  EXPECT_EQ(Silu(-100.0f), 0.0f);
  EXPECT_EQ(Softplus(100.0f), 100.0f);
  EXPECT_EQ(Softplus(-100.0f), 0.0f);
  for (float x = -80.0f; x < 80.0f; x += 0.37f) {
    const double e = std::exp(-static_cast<double>(x));
    EXPECT_NEAR(Sigmoid(x), 1.0 / (1.0 + e), 3e-7 / (1.0 + e)) << x;
    EXPECT_NEAR(Silu(x), x / (1.0 + e), 3e-7 * std::fabs(x) / (1.0 + e)) << x;
    const double softplus = std::log1p(1.0 / e);
    EXPECT_NEAR(Softplus(x), softplus, 5e-7 * softplus) << x;
  }
}

// ---- Conversions -------------------------------------------------------------------------------

TEST(BF16, Goldens) {
  const std::vector<std::pair<uint32_t, uint16_t>> goldens = {
      {0x3f808000u, 0x3f80}, {0x3f818000u, 0x3f82}, {0x3f808001u, 0x3f81}, {0x7f7fffffu, 0x7f80},
      {0x7f7f7fffu, 0x7f7f}, {0x00008001u, 0x0001}, {0x7f800001u, 0x7fc0}, {0x7f800000u, 0x7f80},
      {0xff800000u, 0xff80}, {0x80000000u, 0x8000}, {0x00008000u, 0x0000}, {0x00018000u, 0x0002},
      {0xffffffffu, 0xffff}};
  for (const auto& [in, out] : goldens)
    EXPECT_EQ(BF16FromFloat(FromBits(in)), out) << std::hex << in;
}

TEST(BF16, EveryPatternRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto bf16 = static_cast<uint16_t>(bits);
    ASSERT_EQ(Bits(FloatFromBF16(bf16)), bits << 16);
    const bool nan = (bits & 0x7fff) > 0x7f80;
    ASSERT_EQ(BF16FromFloat(FloatFromBF16(bf16)), nan ? bf16 | 0x40 : bf16);
  }
}

TEST(F16, EveryPatternAgainstTheCompiler) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto f16 = static_cast<uint16_t>(bits);
    const float expected = static_cast<float>(std::bit_cast<_Float16>(f16));
    const float given = FloatFromF16(f16);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(given)) << std::hex << bits;
      ASSERT_EQ(F16FromFloat(given) & 0x7e00, 0x7e00);
      continue;
    }
    ASSERT_EQ(Bits(given), Bits(expected)) << std::hex << bits;
    ASSERT_EQ(F16FromFloat(given), f16);
  }
}

TEST(F16, RoundsAsTheCompilerDoes) {
  const auto check = [](float value) {
    ASSERT_EQ(F16FromFloat(value), std::bit_cast<uint16_t>(static_cast<_Float16>(value)))
        << std::hexfloat << value;
  };
  for (uint64_t bits = 0; bits <= 0x7f800000u; bits += 509) {
    check(FromBits(static_cast<uint32_t>(bits)));
    check(-FromBits(static_cast<uint32_t>(bits)));
  }
  // Half-way points of neighbours, and the floats beside them.
  for (uint16_t f16 = 0; f16 < 0x7c00; ++f16) {
    const float here = FloatFromF16(f16);
    const float next = f16 == 0x7bff ? 65536.0f : FloatFromF16(static_cast<uint16_t>(f16 + 1));
    const float middle = 0.5f * (here + next);
    for (const float v :
         {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity)}) {
      check(v);
      check(-v);
    }
  }
}

// ---- Fewer bits: against ml_dtypes (tests/golden/make_low_precision_golden.py) ------------------

nlohmann::json LowPrecisionGolden() {
  std::ifstream file(EXPERTMESH_TEST_DATA "/low_precision.json");
  return nlohmann::json::parse(file);
}

void ExpectBits(float given, const nlohmann::json& golden, const std::string& what) {
  if (golden.is_null()) {
    EXPECT_TRUE(std::isnan(given)) << what << ": " << given;
  } else {
    EXPECT_EQ(Bits(given), golden.get<uint32_t>()) << what << ": " << given;
  }
}

TEST(LowPrecision, EveryE4M3AndE8M0Code) {
  const nlohmann::json golden = LowPrecisionGolden();
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    ExpectBits(FloatFromE4M3(byte), golden["e4m3"][code], absl::StrCat("e4m3 ", code));
    EXPECT_EQ(IsNaNE4M3(byte), golden["e4m3"][code].is_null()) << code;
    ExpectBits(FloatFromE8M0(byte), golden["e8m0"][code], absl::StrCat("e8m0 ", code));
  }
}

// Equal but for what is smaller than the smallest normal number, and for the sign of zero.
TEST(LowPrecision, EveryMxfp4Weight) {
  const nlohmann::json golden = LowPrecisionGolden();
  for (int code = 0; code < 16; ++code) {
    const float exact = FromBits(golden["e2m1"][code].get<uint32_t>());
    EXPECT_EQ(FloatFromMxfp4(static_cast<uint8_t>(code), 127), exact) << code;
    EXPECT_EQ(FloatFromMxfp4(static_cast<uint8_t>(code | 0xf0), 127), exact) << "other bits";
  }
  EXPECT_EQ(Bits(FloatFromMxfp4(8, 127)), 0u) << "the code -0 has no sign";
  int compared = 0;
  for (const auto& [scale, products] : golden["mxfp4"].items()) {
    for (int code = 0; code < 16; ++code) {
      const float exact = FromBits(products[code].get<uint32_t>());
      const float given =
          FloatFromMxfp4(static_cast<uint8_t>(code), static_cast<uint8_t>(std::stoi(scale)));
      if (std::fabs(exact) < std::numeric_limits<float>::min()) {
        EXPECT_LT(std::fabs(given), std::numeric_limits<float>::min()) << code << ", " << scale;
      } else {
        EXPECT_EQ(Bits(given), Bits(exact)) << code << ", " << scale;
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 10 * 14 - 6 - 2);  // 0.5, 1 and 1.5 at scale 0, 0.5 at scale 1 are denormal
  // Under the contract's environment too, in which -0.5 at scale 0 has no sign but -1 has one.
  const ScopedFlushDenormals flush;
  volatile uint8_t half = 9, one = 10;
  EXPECT_EQ(Bits(FloatFromMxfp4(half, 0)), 0u);
  EXPECT_EQ(Bits(FloatFromMxfp4(one, 0)), 0x80000000u);
  EXPECT_EQ(Bits(FloatFromMxfp4(one, 1)), Bits(-std::numeric_limits<float>::min()));
}

// Equal but for what is smaller than the smallest normal number: zero, with the code's sign.
TEST(LowPrecision, EveryMxfp8Code) {
  const nlohmann::json golden = LowPrecisionGolden();
  const auto check = [&golden] {
    int compared = 0;
    for (const auto& [scale, products] : golden["mxfp8"].items()) {
      for (int code = 0; code < 256; ++code) {
        if (products[code].is_null()) continue;  // not finite
        float exact = FromBits(products[code].get<uint32_t>());
        if ((Bits(exact) & 0x7fffffffu) < 0x00800000u) exact = (code & 0x80) != 0 ? -0.0f : 0.0f;
        const float given =
            FloatFromMxfp8(static_cast<uint8_t>(code), static_cast<uint8_t>(std::stoi(scale)));
        EXPECT_EQ(Bits(given), Bits(exact)) << code << ", " << scale;
        ++compared;
      }
    }
    EXPECT_EQ(compared, 10 * 254 - 2 * 7) << "with scale 247 codes above 240 are not finite";
  };
  check();
  const ScopedFlushDenormals flush;
  check();
}

TEST(Conversions, DoNotDependOnFlushing) {
  const ScopedFlushDenormals flush;
  EXPECT_EQ(Bits(FloatFromBF16(0x0001)), 0x00010000u);
  EXPECT_EQ(BF16FromFloat(FromBits(0x00008001u)), 0x0001);
  EXPECT_EQ(FloatFromF16(0x0001), 0x1p-24f);
  EXPECT_EQ(F16FromFloat(0x1p-24f), 0x0001);
}

TEST(DType, LoadAndStoreRoundOnce) {
  const float value = 1.0f + 0x1p-9f + 0x1p-12f;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Tensor t(dtype, {3});
    for (int64_t i = 0; i < 3; ++i) StoreFloat(dtype, t.data(), i, value + static_cast<float>(i));
    const float expected = dtype == DType::kF32    ? 1.0f + value
                           : dtype == DType::kBF16 ? 2.0f
                                                   : 2.0f + 0x1p-9f;
    EXPECT_EQ(LoadFloat(dtype, t.data(), 1), expected) << NameOf(dtype);
  }
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(BitsOf(DType::kF4), 4);
  EXPECT_EQ(BitsOf(DType::kF6_E2M3), 6);
  EXPECT_EQ(BytesOf(DType::kF8_E4M3), 1);
  EXPECT_EQ(BytesOf(DType::kBF16), 2);
  EXPECT_EQ(BytesOf(DType::kC64), 8);
  for (int i = 0; i <= static_cast<int>(DType::kU64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(DTypeFromName(NameOf(dtype)), dtype);
  }
  EXPECT_EQ(DTypeFromName("bf16"), std::nullopt);
}

// ---- Tensors -----------------------------------------------------------------------------------

TEST(Tensor, NumElements) {
  EXPECT_EQ(NumElements({}), 1);
  EXPECT_EQ(NumElements({2, 3, 4}), 24);
  EXPECT_EQ(NumElements({0, 7}), 0);
  EXPECT_EQ(NumElements({40000, 8, 8192}), 2621440000);
  EXPECT_EQ(NumElements({-1}), -1);
  EXPECT_EQ(NumElements({2, -3}), -1);
  EXPECT_EQ(NumElements({int64_t{1} << 32, int64_t{1} << 31}), -1);
  EXPECT_EQ(NumElements({int64_t{1} << 31, int64_t{1} << 31}), int64_t{1} << 62);
}

TEST(Tensor, AlignedSharedMemory) {
  for (const int64_t n : {0, 1, 15, 16, 17, 1000}) {
    const Tensor t(DType::kBF16, {n, 3});
    EXPECT_NE(t.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data()) % Tensor::kAlignment, 0u);
    EXPECT_EQ(t.num_bytes(), static_cast<size_t>(6 * n));
    EXPECT_THAT(t.shape(), ElementsAre(n, 3));
  }
  Tensor a(DType::kF32, {2});
  const Tensor b = a;
  a.as<float>()[1] = 5.0f;
  EXPECT_EQ(b.as<float>()[1], 5.0f);
  const TensorView view = b;
  EXPECT_EQ(view.data, b.data());
  EXPECT_THAT(view.shape, ElementsAre(2));
  EXPECT_EQ(Tensor().num_elements(), 0);
  EXPECT_EQ(ShapeToString(std::vector<int64_t>{2, 3}), "[2, 3]");
}

// ---- Floating-point environment ----------------------------------------------------------------

KERNEL_NOINLINE float Product(float a, float b) { return a * b; }

TEST(ScopedFlushDenormals, SetsAndRestores) {
  const unsigned before = _mm_getcsr();
  volatile float tiny = 0x1p-126f;
  volatile float denormal = 0x1p-127f;
  EXPECT_EQ(Product(tiny, 0.5f), 0x1p-127f);
  {
    const ScopedFlushDenormals outer;
    EXPECT_EQ(Product(tiny, 0.5f), 0.0f);                  // FTZ
    EXPECT_EQ(Bits(Product(denormal, 4.0f)), Bits(0.0f));  // DAZ
    {
      const ScopedFlushDenormals inner;
      EXPECT_EQ(Product(tiny, 0.5f), 0.0f);
    }
    EXPECT_EQ(Product(tiny, 0.5f), 0.0f) << "the inner scope ended the outer one";
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040u, before & 0x8040u);
  EXPECT_EQ(Bits(Product(tiny, 0.5f)), Bits(0x1p-127f));
  EXPECT_EQ(Product(denormal, 4.0f), 0x1p-125f);
}

}  // namespace
}  // namespace expertmesh
