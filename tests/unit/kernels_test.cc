// The vector kernels against scalar loops, for every instruction set of this machine.
#include "common/kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/compute_pool.h"
#include "common/kernels/for_loop_gemm.h"
#include "common/kernels/for_loop_quantize.h"
#include "common/kernels/grouped_gemm.h"
#include "common/numerics/flush_denormals.h"
#include "common/numerics/math.h"
#include "common/numerics/quantize.h"
#include "tests/random_tensor.h"
#include "tests/tested.h"

namespace expertmesh {
namespace {

// What the data is like: `kTiny` has products around the smallest normal number, where a kernel
// that keeps denormals, or an order that is not the contract's, shows in most elements.
enum class Data { kTame, kTiny };

// `other`: dtype of the other factor. F16 has no exponents below -24, so the other side of it makes
// up for that.
Tensor RandomData(DType dtype, DType other, std::vector<int64_t> shape, Data data,
                  std::mt19937& rng) {
  Tensor tensor = RandomTensor(dtype, std::move(shape), 0.3f, rng);
  if (data == Data::kTame) return tensor;
  const int lowest = dtype == DType::kF16 ? -12 : other == DType::kF16 ? -116 : -64;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const float value = LoadFloat(dtype, tensor.data(), i);
    const int exponent = lowest + static_cast<int>(rng() % 8);
    StoreFloat(dtype, tensor.data(), i, std::ldexp(value, exponent));
  }
  return tensor;
}

// Rows [T, n] widened to fp32.
std::vector<float> Widened(const Tensor& tensor) {
  std::vector<float> values(tensor.num_elements());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = LoadFloat(tensor.dtype(), tensor.data(), i);
  }
  return values;
}

// Whether scales are exponents, which are part of what is multiplied.
bool HasExponents(const WeightType& type) { return ScaleDType(type.format) == DType::kU8; }

// Weights of which kTiny activations make products as small as RandomData does.
RandomWeights RandomMatrix(const WeightType& type, DType activations, int64_t n, int64_t k,
                           Data data, std::mt19937& rng) {
  if (type.format == WeightFormat::kPlain) {
    return {type.format, RandomData(type.dtype, activations, {n, k}, data, rng), Tensor()};
  }
  const float tiny = HasExponents(type) ? std::ldexp(1.0f, -64) : 2.0f;
  return MakeWeights(type, n, k, data == Data::kTame ? 0.3f : tiny, rng);
}

// The other factor that RandomData should make small numbers for.
DType FactorOf(const WeightType& type) {
  // Chains of fp8 are those of the unscaled codes, which have no small exponents either.
  return type.dtype == DType::kF8_E4M3 && !HasExponents(type) ? DType::kF16 : type.dtype;
}

// Brings codes of MXFP8 down to 240 where more would not be finite.
void LimitCodes(RandomWeights& weights) {
  const int64_t k = weights.values.dim(1);
  for (int64_t i = 0; i < weights.values.num_elements(); ++i) {
    uint8_t& code = weights.values.as<uint8_t>()[i];
    const int64_t block = i / k * weights.scales.dim(1) + i % k / kMxBlockK;
    if (weights.scales.as<uint8_t>()[block] == kMaxMxfp8Scale && (code & 0x7f) > kE4M3Code240) {
      code = static_cast<uint8_t>((code & 0x80) | kE4M3Code240);
    }
  }
}

struct Matrices {
  PackedWeights packed;
  std::vector<RandomWeights> weights;
};

Matrices MakeMatrices(const WeightType& type, DType activations, int64_t num, int64_t n, int64_t k,
                      Data data, std::mt19937& rng) {
  Matrices m;
  m.packed = PackedWeights(type.format, type.dtype, num, n, k);
  for (int64_t i = 0; i < num; ++i) {
    m.weights.push_back(RandomMatrix(type, activations, n, k, data, rng));
    m.packed.Pack(i, m.weights.back().View());
  }
  return m;
}

// y = x W_e^T by the kernels; rows of x are sorted by expert.
std::vector<float> MultiplyLoaded(Isa isa, ComputePool& pool, const Matrices& m,
                                  const std::byte* rows, DType row_dtype, const float* x_scales,
                                  absl::Span<const int64_t> rows_per_expert,
                                  const GroupedGemm::Tuning& tuning) {
  const int64_t n = m.packed.n();
  std::vector<GemmGroup> groups;
  int64_t first_row = 0;
  for (size_t e = 0; e < rows_per_expert.size(); ++e) {
    AddGroups(static_cast<int64_t>(e), first_row, rows_per_expert[e], &groups);
    first_row += rows_per_expert[e];
  }
  std::vector<float> y(first_row * n, std::numeric_limits<float>::quiet_NaN());
  GroupedGemm::Args args = {
      isa, &m.packed, groups, rows, row_dtype, GemmOutput::kRows, RowFormat::kF32, y.data(), n};
  args.x_scales = x_scales;
  GroupedGemm gemm(args, tuning);
  std::vector<Workspace> scratch(pool.threads());
  pool.Run([&](int thread) { gemm.Run(scratch[thread], [] { return false; }); });
  EXPECT_FALSE(gemm.stopped());
  return y;
}

std::vector<float> Multiply(Isa isa, ComputePool& pool, const Matrices& m, const Tensor& x,
                            absl::Span<const int64_t> rows_per_expert,
                            const GroupedGemm::Tuning& tuning) {
  const int64_t k = m.packed.k();
  const DType row_dtype = GemmRowDType(isa, m.packed.dtype(), x.dtype());
  const int64_t row_bytes = GemmRowBytes(row_dtype, k);
  Workspace memory;
  std::byte* const rows = memory.Get(x.dim(0) * row_bytes);
  for (int64_t r = 0; r < x.dim(0); ++r) {
    LoadGemmRow(isa, x.dtype(), x.data() + r * k * BytesOf(x.dtype()), k, row_dtype,
                rows + r * row_bytes);
  }
  return MultiplyLoaded(isa, pool, m, rows, row_dtype, nullptr, rows_per_expert, tuning);
}

std::vector<float> Reference(const Matrices& m, const Tensor& x,
                             absl::Span<const int64_t> rows_per_expert) {
  const ScopedFlushDenormals flush;
  const std::vector<float> rows = Widened(x);
  const int64_t n = m.packed.n();
  std::vector<float> y(x.dim(0) * n);
  int64_t row = 0;
  for (size_t e = 0; e < rows_per_expert.size(); ++e) {
    for (int64_t i = 0; i < rows_per_expert[e]; ++i, ++row) {
      ForLoopMatVec(rows.data() + row * x.dim(1), m.weights[e].View(), y.data() + row * n);
    }
  }
  return y;
}

void ExpectSameBits(const std::vector<float>& got, const std::vector<float>& expected,
                    const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  size_t differ = 0, nonzero = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    nonzero += expected[i] != 0.0f;
    differ += std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(expected[i]);
  }
  EXPECT_GT(nonzero, got.size() / 16) << what;
  EXPECT_EQ(differ, 0u) << "of " << got.size() << " elements: " << what;
}

struct Formats {
  WeightType weights;
  DType activations;
};

// No products of two F16 numbers are as small as kTiny wants.
bool Possible(const Formats& formats, Data data) {
  return data == Data::kTame || FactorOf(formats.weights) != DType::kF16 ||
         formats.activations != DType::kF16;
}

class GemmTest : public testing::TestWithParam<std::tuple<Isa, Formats, Data>> {};

// Every number of rows up to two more than the highest tile twice over, and some larger ones.
TEST_P(GemmTest, HasTheBitsOfTheScalarChain) {
  const auto& [isa, formats, data] = GetParam();
  if (!Possible(formats, data)) return;
  std::mt19937 rng(11);
  ComputePool one(1), two(2);
  for (const auto& [n, k] :
       std::vector<std::pair<int64_t, int64_t>>{{200, 301}, {64, 512}, {70, 650}, {7, 2}}) {
    if (k % 2 == 1 && formats.weights.format == WeightFormat::kMxfp4) continue;
    const std::vector<int64_t> rows = {1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 33};
    int64_t total = 0;
    for (const int64_t r : rows) total += r;
    const Matrices m =
        MakeMatrices(formats.weights, formats.activations, rows.size(), n, k, data, rng);
    const Tensor x =
        RandomData(formats.activations, FactorOf(formats.weights), {total, k}, data, rng);
    const std::vector<float> expected = Reference(m, x, rows);
    for (const GroupedGemm::Tuning tuning :
         {GroupedGemm::Tuning{}, GroupedGemm::Tuning{6, 0, 16}, GroupedGemm::Tuning{3, 1, 7},
          GroupedGemm::Tuning{1, 0, 1000}, GroupedGemm::Tuning{5, 5, 64}}) {
      for (ComputePool* pool : {&one, &two}) {
        const std::vector<float> got = Multiply(isa, *pool, m, x, rows, tuning);
        ExpectSameBits(got, expected,
                       absl::StrCat(n, "x", k, ", ", pool->threads(), " threads, tile rows ",
                                    tuning.max_tile_rows, ", single pass ", tuning.single_pass_rows,
                                    ", chunk ", tuning.chunk_lines));
      }
    }
  }
}

// Neighbouring k change places on both sides: the same products in another order. What the other
// tests compare would not notice a kernel that adds them so, if no bit depended on it.
TEST_P(GemmTest, AnotherOrderIsSeen) {
  const auto& [isa, formats, data] = GetParam();
  if (!Possible(formats, data)) return;
  std::mt19937 rng(13);
  ComputePool one(1);
  const int64_t n = 64, k = 256;
  const std::vector<int64_t> rows = {5};
  const Matrices m = MakeMatrices(formats.weights, formats.activations, 1, n, k, data, rng);
  const Tensor x = RandomData(formats.activations, FactorOf(formats.weights), {5, k}, data, rng);
  const std::vector<float> y = Multiply(isa, one, m, x, rows, {});
  const auto swap = [](Tensor& tensor) {
    const int64_t bytes = BytesOf(tensor.dtype());
    for (std::byte* at = tensor.data(); at < tensor.data() + tensor.num_bytes(); at += 2 * bytes) {
      std::swap_ranges(at, at + bytes, at + bytes);
    }
  };
  Matrices swapped = m;
  Tensor swapped_x = x;
  swap(swapped_x);
  if (formats.weights.format == WeightFormat::kMxfp4) {
    for (int64_t i = 0; i < n * k / 2; ++i) {
      uint8_t& byte = swapped.weights[0].values.as<uint8_t>()[i];
      byte = static_cast<uint8_t>(byte >> 4 | byte << 4);
    }
  } else {
    swap(swapped.weights[0].values);
  }
  const std::vector<float> other = Reference(swapped, swapped_x, rows);
  int64_t differ = 0;
  for (size_t i = 0; i < y.size(); ++i) differ += y[i] != other[i];
  EXPECT_GT(differ, n * 5 / 8);
}

// Scales belong to their rows and blocks.
TEST_P(GemmTest, SwappedScalesAreSeen) {
  const auto& [isa, formats, data] = GetParam();
  if (formats.weights.format == WeightFormat::kPlain || !Possible(formats, data)) return;
  std::mt19937 rng(14);
  ComputePool one(1);
  const int64_t n = 130, k = 512;
  const std::vector<int64_t> rows = {3};
  Matrices m = MakeMatrices(formats.weights, formats.activations, 1, n, k, data, rng);
  const Tensor x = RandomData(formats.activations, FactorOf(formats.weights), {3, k}, data, rng);
  const std::vector<float> y = Multiply(isa, one, m, x, rows, {});
  Tensor& scales = m.weights[0].scales;
  std::byte* const row = scales.data() + 5 * scales.num_bytes() / n;
  std::swap_ranges(row, row + scales.num_bytes() / n, row + scales.num_bytes() / n);
  m.packed.Pack(0, m.weights[0].View());
  const std::vector<float> other = Multiply(isa, one, m, x, rows, {});
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      EXPECT_EQ(y[r * n + c] != other[r * n + c], c == 5 || c == 6) << r << ", " << c;
    }
  }
}

TEST_P(GemmTest, SplitsLargeGroups) {
  const auto& [isa, formats, data] = GetParam();
  if (!Possible(formats, data)) return;
  std::mt19937 rng(12);
  ComputePool two(2);
  const std::vector<int64_t> rows = {300, 0, 1100};
  const Matrices m =
      MakeMatrices(formats.weights, formats.activations, rows.size(), 16, 34, data, rng);
  const Tensor x =
      RandomData(formats.activations, FactorOf(formats.weights), {1400, 34}, data, rng);
  ExpectSameBits(Multiply(isa, two, m, x, rows, {}), Reference(m, x, rows), "large groups");
}

std::vector<Formats> AllFormats() {
  std::vector<Formats> all;
  for (const WeightType& weights : AllWeightTypes()) {
    for (const DType activations : {DType::kF32, DType::kBF16, DType::kF16}) {
      all.push_back({weights, activations});
    }
  }
  return all;
}

std::string GemmName(const testing::TestParamInfo<GemmTest::ParamType>& test) {
  const auto& [isa, formats, data] = test.param;
  return absl::StrCat(NameOf(isa), "_", NameOf(formats.weights), "_x_", NameOf(formats.activations),
                      data == Data::kTiny ? "_tiny" : "");
}

INSTANTIATE_TEST_SUITE_P(All, GemmTest,
                         testing::Combine(testing::ValuesIn(TestedIsas()),
                                          testing::ValuesIn(AllFormats()),
                                          testing::Values(Data::kTame, Data::kTiny)),
                         GemmName);

// ---- Quantised rows ----------------------------------------------------------------------------

// What the codes and the scales of both factors are like.
enum class Codes {
  kTame,  // those of rows whose values are of many sizes
  kWild,  // any, with scales of any size
  kTiny,  // any; products of scales (of MXFP8, of values) are around the smallest normal number
};

struct QuantizedRows {
  QuantizedFormat format;
  Tensor codes;   // [T, K]
  Tensor scales;  // [T, ScalesPerRow]

  const uint8_t* Row(int64_t row) const { return codes.as<uint8_t>() + row * codes.dim(1); }
  const std::byte* Scales(int64_t row) const {
    return scales.data() + row * scales.dim(1) * BytesOf(scales.dtype());
  }
  // Of ForLoopMatVec and of a GEMM.
  const float* Factors(int64_t row) const {
    return scales.dtype() == DType::kF32 ? scales.as<float>() + row * scales.dim(1) : nullptr;
  }
};

QuantizedRows MakeRows(QuantizedFormat format, int64_t rows, int64_t k, Codes kind,
                       std::mt19937& rng) {
  QuantizedRows x = {format, Tensor(DType::kF8_E4M3, {rows, k}),
                     Tensor(ScaleDType(format), {rows, ScalesPerRow(format, k)})};
  if (kind == Codes::kTame) {
    Tensor values = RandomTensor(DType::kBF16, {rows, k}, 1.0f, rng);
    for (int64_t i = 0; i < values.num_elements();
         ++i) {  // many small ones, so that sums are rounded
      const float value = LoadFloat(DType::kBF16, values.data(), i);
      StoreFloat(DType::kBF16, values.data(), i, std::ldexp(value, -static_cast<int>(rng() % 16)));
    }
    QuantizeRows(BestIsa(), {format, DType::kBF16, values.data(), rows, k, x.codes.as<uint8_t>(),
                             x.scales.data()});
    return x;
  }
  for (int64_t i = 0; i < x.codes.num_elements(); ++i) {
    const auto code = static_cast<uint8_t>(rng());
    x.codes.as<uint8_t>()[i] = IsNaNE4M3(code) ? 0x80 : code;
  }
  for (int64_t i = 0; i < x.scales.num_elements(); ++i) {
    if (x.scales.dtype() == DType::kF8_E8M0) {
      x.scales.as<uint8_t>()[i] =
          static_cast<uint8_t>(kind == Codes::kTiny ? 60 + rng() % 8 : 97 + rng() % 60);
    } else {
      const int exponent = static_cast<int>(kind == Codes::kTiny ? rng() % 6 : 32 + rng() % 60);
      x.scales.as<float>()[i] =
          std::ldexp(1.0f + static_cast<float>(rng() % 1000) / 1000, exponent - 62);
    }
  }
  return x;
}

std::vector<float> Multiply(Isa isa, ComputePool& pool, const Matrices& m, const QuantizedRows& x,
                            absl::Span<const int64_t> rows_per_expert,
                            const GroupedGemm::Tuning& tuning) {
  const int64_t k = m.packed.k();
  const DType row_dtype = GemmRowDType(isa, m.packed.dtype(), DType::kBF16);
  const int64_t row_bytes = GemmRowBytes(row_dtype, k);
  Workspace memory;
  std::byte* const rows = memory.Get(x.codes.dim(0) * row_bytes);
  std::memset(rows, 0xff, x.codes.dim(0) * row_bytes);
  for (int64_t r = 0; r < x.codes.dim(0); ++r) {
    LoadQuantizedGemmRow(isa, x.format, x.Row(r), x.Scales(r), k, row_dtype, rows + r * row_bytes);
  }
  return MultiplyLoaded(isa, pool, m, rows, row_dtype, x.Factors(0), rows_per_expert, tuning);
}

std::vector<float> Reference(const Matrices& m, const QuantizedRows& x,
                             absl::Span<const int64_t> rows_per_expert) {
  const ScopedFlushDenormals flush;
  const int64_t n = m.packed.n(), k = m.packed.k();
  std::vector<float> y(x.codes.dim(0) * n), values(k);
  int64_t row = 0;
  for (size_t e = 0; e < rows_per_expert.size(); ++e) {
    for (int64_t i = 0; i < rows_per_expert[e]; ++i, ++row) {
      ForLoopDequantizeRow(x.format, x.Row(row), x.Scales(row), k, values.data());
      ForLoopMatVec(values.data(), m.weights[e].View(), y.data() + row * n, x.Factors(row));
    }
  }
  return y;
}

class QuantizedGemmTest : public testing::TestWithParam<std::tuple<Isa, QuantizedFormat, Codes>> {
 protected:
  Matrices Make(int64_t num, int64_t n, int64_t k) {
    const WeightType type = {WeightFormatOf(format_), DType::kF8_E4M3};
    Matrices m;
    m.packed = PackedWeights(type.format, type.dtype, num, n, k);
    for (int64_t i = 0; i < num; ++i) {
      m.weights.push_back(
          MakeWeights(type, n, k, kind_ == Codes::kTiny ? std::ldexp(1.0f, -64) : 0.3f, rng_));
      m.packed.Pack(i, m.weights.back().View());
    }
    return m;
  }

  const Isa isa_ = std::get<0>(GetParam());
  const QuantizedFormat format_ = std::get<1>(GetParam());
  const Codes kind_ = std::get<2>(GetParam());
  std::mt19937 rng_{17};
  ComputePool one_{1}, two_{2};
};

TEST_P(QuantizedGemmTest, HasTheBitsOfTheScalarChain) {
  const std::vector<int64_t> rows = {1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 33};
  int64_t total = 0;
  for (const int64_t r : rows) total += r;
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {200, 301}, {64, 512}, {70, 650}, {33, 131}, {7, 2}, {17, 1}}) {
    const Matrices m = Make(static_cast<int64_t>(rows.size()), n, k);
    const QuantizedRows x = MakeRows(format_, total, k, kind_, rng_);
    const std::vector<float> expected = Reference(m, x, rows);
    for (const GroupedGemm::Tuning tuning :
         {GroupedGemm::Tuning{}, GroupedGemm::Tuning{6, 0, 16}, GroupedGemm::Tuning{3, 1, 7},
          GroupedGemm::Tuning{1, 0, 1000}, GroupedGemm::Tuning{5, 5, 64}}) {
      for (ComputePool* pool : {&one_, &two_}) {
        ExpectSameBits(Multiply(isa_, *pool, m, x, rows, tuning), expected,
                       absl::StrCat(n, "x", k, ", ", pool->threads(), " threads, tile rows ",
                                    tuning.max_tile_rows, ", single pass ", tuning.single_pass_rows,
                                    ", chunk ", tuning.chunk_lines));
      }
    }
  }
}

TEST_P(QuantizedGemmTest, SplitsLargeGroups) {
  const std::vector<int64_t> rows = {300, 0, 1100};
  const Matrices m = Make(static_cast<int64_t>(rows.size()), 16, 162);
  const QuantizedRows x = MakeRows(format_, 1400, 162, kind_, rng_);
  ExpectSameBits(Multiply(isa_, two_, m, x, rows, {}), Reference(m, x, rows), "large groups");
}

TEST_P(QuantizedGemmTest, AnotherOrderIsSeen) {
  const int64_t n = 64, k = 256;
  const std::vector<int64_t> rows = {5};
  Matrices m = Make(1, n, k);
  QuantizedRows x = MakeRows(format_, 5, k, kind_, rng_);
  const std::vector<float> y = Multiply(isa_, one_, m, x, rows, {});
  for (Tensor* codes : {&m.weights[0].values, &x.codes}) {
    for (int64_t i = 0; i < codes->num_elements(); i += 2) {
      std::swap(codes->as<uint8_t>()[i], codes->as<uint8_t>()[i + 1]);
    }
  }
  const std::vector<float> other = Reference(m, x, rows);
  int64_t differ = 0;
  for (size_t i = 0; i < y.size(); ++i) differ += y[i] != other[i];
  EXPECT_GT(differ, n * 5 / 8);
}

// One block, of which the sum is scaled twice: by the weights' scale and then by the row's. Scales
// that are powers of two, as those of tame rows may be, would not show it.
TEST_P(QuantizedGemmTest, ScalesMultipliedInTurnAreSeen) {
  if (ScaleDType(format_) != DType::kF32 || kind_ == Codes::kTame) return;
  const int64_t n = 64, k = 128;
  const std::vector<int64_t> rows = {5};
  const Matrices m = Make(1, n, k);
  const QuantizedRows x = MakeRows(format_, 5, k, kind_, rng_);
  const std::vector<float> y = Multiply(isa_, one_, m, x, rows, {});
  const ScopedFlushDenormals flush;
  std::vector<float> values(k), scaled(n);
  int64_t differ = 0;
  for (int64_t r = 0; r < 5; ++r) {
    ForLoopDequantizeRow(format_, x.Row(r), x.Scales(r), k, values.data());
    ForLoopMatVec(values.data(), m.weights[0].View(), scaled.data());
    for (int64_t i = 0; i < n; ++i) differ += scaled[i] * *x.Factors(r) != y[r * n + i];
  }
  EXPECT_GT(differ, n * 5 / 8);
}

TEST_P(QuantizedGemmTest, SwappedScalesOfRowsAreSeen) {
  const int64_t n = 70, k = 301;
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{5}, {9}}) {
    const Matrices m = Make(1, n, k);
    QuantizedRows x = MakeRows(format_, rows[0], k, Codes::kWild, rng_);
    const std::vector<float> y = Multiply(isa_, one_, m, x, rows, {});
    const int64_t bytes = x.scales.dim(1) * BytesOf(x.scales.dtype());
    std::byte* const second = x.scales.data() + bytes;
    std::swap_ranges(second, second + bytes, second + bytes);
    const std::vector<float> other = Multiply(isa_, one_, m, x, rows, {});
    for (int64_t r = 0; r < rows[0]; ++r) {
      int64_t differ = 0;
      for (int64_t i = 0; i < n; ++i) differ += y[r * n + i] != other[r * n + i];
      EXPECT_EQ(differ > 0, r == 1 || r == 2) << "row " << r << " of " << rows[0];
    }
  }
}

std::string QuantizedName(const testing::TestParamInfo<QuantizedGemmTest::ParamType>& test) {
  const auto& [isa, format, kind] = test.param;
  const char* const kinds[] = {"", "_wild", "_tiny"};
  return absl::StrCat(NameOf(isa), "_", NameOf(format), kinds[static_cast<int>(kind)]);
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedGemmTest,
    testing::Combine(testing::ValuesIn(TestedIsas()),
                     testing::Values(QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                     QuantizedFormat::kMxfp8),
                     testing::Values(Codes::kTame, Codes::kWild, Codes::kTiny)),
    QuantizedName);

class KernelTest : public testing::TestWithParam<Isa> {
 protected:
  const Kernels& kernels_ = KernelsOf(GetParam());
  const ScopedFlushDenormals flush_;
};

INSTANTIATE_TEST_SUITE_P(All, KernelTest, testing::ValuesIn(SupportedIsas()),
                         [](const testing::TestParamInfo<Isa>& test) {
                           return std::string(NameOf(test.param));
                         });

// Not inlined into a test, where the compiler could compute it before the environment is set.
KERNEL_NOINLINE KERNEL_FMA float ScalarActivate(const ActivationFunction& function, float g,
                                                float u) {
  return Activate(function, g, u);
}

// The lines of BF16 that those of the first panel of a matrix become.
Tensor Widened(const TileKernels& kernels, const PackedWeights& packed) {
  const int64_t k = packed.lines() * packed.k_per_line();
  Tensor wide(DType::kBF16, {kBlockPanels, k, kPanelColumns});
  const std::byte* const head = packed.Block(0, 0);
  if (kernels.widen != nullptr) {
    kernels.widen(head + packed.head_bytes(), head, packed.lines(), wide.data());
    return wide;
  }
  Tensor x(DType::kBF16, {1, k});
  std::memset(x.data(), 0, x.num_bytes());
  Tensor sums(DType::kF32, {kBlockPanels, 1, kPanelColumns});
  TileArgs args;
  args.weights = head + packed.head_bytes();
  args.panel_bytes = args.scale_bytes = args.prefetch_bytes = packed.panel_bytes();
  args.scales = head;
  args.x = x.data();
  args.c = sums.as<float>();
  args.c_stride = kPanelColumns;
  args.lines = packed.lines();
  args.wide = wide.data();
  args.wide_bytes = k * kPanelColumns * BytesOf(DType::kBF16);
  args.prefetch = args.weights;
  kernels.widening.tile[1](args);
  return wide;
}

// Every code (and every scale that there may be) in every place of a line.
TEST_P(KernelTest, WideningAgreesWithTheScalarConversions) {
  const auto flushed = [](float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? 0.0f : value;
  };
  for (const TileKernels* tiles : {&kernels_.fp8, &kernels_.fp8_pairs}) {
    if (tiles->empty()) continue;
    for (int shift = 0; shift < 256; ++shift) {
      PackedWeights packed(WeightFormat::kFp8Row, DType::kF8_E4M3, 1, 16, 4);
      Tensor codes(DType::kF8_E4M3, {16, 4}), scales(DType::kF32, {16, 1});
      std::fill_n(scales.as<float>(), 16, 1.0f);
      for (int i = 0; i < 64; ++i) {
        const auto code = static_cast<uint8_t>(i + shift);
        codes.as<uint8_t>()[i] = IsNaNE4M3(code) ? 0 : code;
      }
      packed.Pack(0, {WeightFormat::kFp8Row, codes, scales});
      const Tensor wide = Widened(*tiles, packed);
      for (int n = 0; n < 16; ++n) {
        for (int k = 0; k < 4; ++k) {  // lines of [16 columns][2 k]
          ASSERT_EQ(wide.as<uint16_t>()[k / 2 * 32 + 2 * n + k % 2],
                    BF16FromFloat(FloatFromE4M3(codes.as<uint8_t>()[4 * n + k])))
              << "code " << int{codes.as<uint8_t>()[4 * n + k]};
        }
      }
    }
  }
  for (const TileKernels* tiles : {&kernels_.mxfp4, &kernels_.mxfp4_pairs}) {
    if (tiles->empty()) continue;
    for (int scale = 0; scale <= kMaxMxfp4Scale; ++scale) {
      PackedWeights packed(WeightFormat::kMxfp4, DType::kF4, 1, 16, 32);
      Tensor codes(DType::kU8, {16, 16}), scales(DType::kU8, {16, 1});
      for (int i = 0; i < 256; ++i) codes.as<uint8_t>()[i] = static_cast<uint8_t>(37 * i);
      for (int n = 0; n < 16; ++n) {
        scales.as<uint8_t>()[n] = static_cast<uint8_t>((scale + 17 * n) % (kMaxMxfp4Scale + 1));
      }
      packed.Pack(0, {WeightFormat::kMxfp4, codes, scales});
      const Tensor wide = Widened(*tiles, packed);
      for (int n = 0; n < 16; ++n) {
        for (int k = 0; k < 32; ++k) {
          const int code = codes.as<uint8_t>()[16 * n + k / 2] >> (k % 2 * 4) & 15;
          const float expected =
              FloatFromMxfp4(static_cast<uint8_t>(code), scales.as<uint8_t>()[n]);
          const uint16_t got = wide.as<uint16_t>()[k / 2 * 32 + 2 * n + k % 2];
          ASSERT_EQ(flushed(FloatFromBF16(got)), flushed(expected)) << code << ", scale " << scale;
          ASSERT_EQ(got >> 15, std::signbit(expected)) << code << ", scale " << scale;
        }
      }
    }
  }
  for (const TileKernels* tiles : {&kernels_.mxfp8, &kernels_.mxfp8_pairs}) {
    if (tiles->empty()) continue;
    for (int scale = 0; scale <= kMaxMxfp8Scale; ++scale) {
      PackedWeights packed(WeightFormat::kMxfp8, DType::kF8_E4M3, 1, 16, 32);
      Tensor codes(DType::kF8_E4M3, {16, 32}), scales(DType::kU8, {16, 1});
      for (int i = 0; i < 512; ++i) {
        const auto code = static_cast<uint8_t>(37 * i);
        codes.as<uint8_t>()[i] = IsNaNE4M3(code) ? 0 : code;
      }
      for (int n = 0; n < 16; ++n) {
        scales.as<uint8_t>()[n] = static_cast<uint8_t>((scale + 17 * n) % (kMaxMxfp8Scale + 1));
      }
      packed.Pack(0, {WeightFormat::kMxfp8, codes, scales});
      const Tensor wide = Widened(*tiles, packed);
      for (int n = 0; n < 16; ++n) {
        for (int k = 0; k < 32; ++k) {
          const uint8_t code = codes.as<uint8_t>()[32 * n + k];
          const float expected = FloatFromMxfp8(code, scales.as<uint8_t>()[n]);
          const uint16_t got = wide.as<uint16_t>()[k / 2 * 32 + 2 * n + k % 2];
          if (!std::isfinite(expected)) continue;
          ASSERT_EQ(flushed(FloatFromBF16(got)), expected) << int{code} << ", scale " << scale;
          ASSERT_EQ(got >> 15, code >> 7) << int{code} << ", scale " << scale;
        }
      }
    }
  }
}

// Scales at the ends of their range: weights that are denormal, and the largest there are.
TEST_P(KernelTest, ExponentsAtTheEndsOfTheirRange) {
  std::mt19937 rng(15);
  ComputePool one(1);
  const std::vector<int64_t> rows = {2, 9};
  for (const auto& [type, most] : std::vector<std::pair<WeightType, uint8_t>>{
           {{WeightFormat::kMxfp4, DType::kF4}, kMaxMxfp4Scale},
           {{WeightFormat::kMxfp8, DType::kF8_E4M3}, kMaxMxfp8Scale}}) {
    for (const bool high : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Matrices m;
        m.packed = PackedWeights(type.format, type.dtype, 2, 80, 96);
        for (int e = 0; e < 2; ++e) {
          RandomWeights weights = MakeWeights(type, 80, 96, 1.0f, rng);
          for (int64_t i = 0; i < weights.scales.num_elements(); ++i) {
            weights.scales.as<uint8_t>()[i] = static_cast<uint8_t>(high ? most - i % 3 : i % 3);
          }
          if (type.format == WeightFormat::kMxfp8) LimitCodes(weights);
          m.packed.Pack(e, weights.View());
          m.weights.push_back(std::move(weights));
        }
        const Tensor x = RandomTensor(dtype, {11, 96}, high ? std::ldexp(1.0f, -125) : 1.0f, rng);
        ExpectSameBits(Multiply(GetParam(), one, m, x, rows, {}), Reference(m, x, rows),
                       absl::StrCat(NameOf(type), " x ", NameOf(dtype), high ? ", high" : ", low"));
      }
    }
  }
}

// Every code with every scale, as rows have them.
TEST_P(KernelTest, QuantizedRowsAreTheScalarValues) {
  for (const QuantizedFormat format :
       {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128, QuantizedFormat::kMxfp8}) {
    const bool exponents = ScaleDType(format) == DType::kF8_E8M0;
    for (int scale = 0; scale <= (exponents ? kMaxMxfp8Scale : 0); ++scale) {
      for (const int64_t k : {256, 77}) {
        Tensor codes(DType::kF8_E4M3, {k}), scales(ScaleDType(format), {8});
        for (int64_t i = 0; i < k; ++i) {
          const auto code = static_cast<uint8_t>(i + 5 * scale);
          const bool finite = !IsNaNE4M3(code) && (code & 0x7f) <= kE4M3Code240;
          codes.as<uint8_t>()[i] = finite ? code : 0x80;
        }
        for (int i = 0; i < 8; ++i) {
          if (exponents) {
            scales.as<uint8_t>()[i] = static_cast<uint8_t>((scale + i) % (kMaxMxfp8Scale + 1));
          } else {
            scales.as<float>()[i] = 3.0f;  // not applied
          }
        }
        std::vector<float> expected(k);
        ForLoopDequantizeRow(format, codes.as<uint8_t>(), scales.data(), k, expected.data());
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          Tensor row(DType::kU8, {GemmRowBytes(dtype, k)});
          std::memset(row.data(), 0xff, row.num_bytes());
          LoadQuantizedGemmRow(GetParam(), format, codes.as<uint8_t>(), scales.data(), k, dtype,
                               row.data());
          for (int64_t i = 0; i < GemmRowBytes(dtype, k) / BytesOf(dtype); ++i) {
            const float value = LoadFloat(dtype, row.data(), i);
            ASSERT_EQ(std::bit_cast<uint32_t>(value),
                      std::bit_cast<uint32_t>(i < k ? expected[i] : 0.0f))
                << NameOf(format) << " to " << NameOf(dtype) << ", scale " << scale << ", " << i;
          }
        }
      }
    }
  }
}

// Rows and weights with scales at the ends of their range, so that products are finite.
TEST_P(KernelTest, QuantizedRowsAtTheEndsOfTheirExponents) {
  std::mt19937 rng(16);
  ComputePool one(1);
  const WeightType type = {WeightFormat::kMxfp8, DType::kF8_E4M3};
  const std::vector<int64_t> rows = {2, 9};
  const auto set = [](Tensor& scales, bool high) {
    for (int64_t i = 0; i < scales.num_elements(); ++i) {
      scales.as<uint8_t>()[i] = static_cast<uint8_t>(high ? kMaxMxfp8Scale - i % 3 : i % 12);
    }
  };
  for (const bool high_weights : {false, true}) {
    Matrices m;
    m.packed = PackedWeights(type.format, type.dtype, 2, 80, 97);
    for (int e = 0; e < 2; ++e) {
      RandomWeights weights = MakeWeights(type, 80, 97, 1.0f, rng);
      set(weights.scales, high_weights);
      LimitCodes(weights);
      m.packed.Pack(e, weights.View());
      m.weights.push_back(std::move(weights));
    }
    QuantizedRows x = MakeRows(QuantizedFormat::kMxfp8, 11, 97, Codes::kWild, rng);
    set(x.scales, !high_weights);
    RandomWeights limited = {type.format, x.codes, x.scales};
    LimitCodes(limited);
    x.codes = limited.values;
    ExpectSameBits(Multiply(GetParam(), one, m, x, rows, {}), Reference(m, x, rows),
                   high_weights ? "high weights" : "high rows");
  }
}

TEST_P(KernelTest, PackedLinesHaveTheirPlaces) {
  // Bytes 1, 2, 3, ... whose places are known; rows of a width that is no multiple of anything.
  constexpr int64_t kRowBytes = 70;
  for (const int64_t rows : {1, 7, 16}) {
    Tensor from(DType::kU8, {rows, kRowBytes}), lines(DType::kU8, {18, 64});
    for (int64_t i = 0; i < from.num_elements(); ++i) {
      from.as<uint8_t>()[i] = static_cast<uint8_t>(i % 251 + 1);
    }
    const auto byte = [&](int64_t row, int64_t i) -> int {
      return row < rows && i < kRowBytes ? from.as<uint8_t>()[row * kRowBytes + i] : 0;
    };
    for (const WeightType& type : AllWeightTypes()) {
      std::memset(lines.data(), 0xff, lines.num_bytes());
      kernels_.pack_lines(type.format, type.dtype, from.data(), rows, kRowBytes, lines.data());
      for (int64_t i = 0; i < 18 * 64; ++i) {
        const int64_t word = i / 64;
        const int64_t at = i % 64;
        int64_t column = at / 4, source = 4 * word + at % 4;
        if (type.dtype == DType::kF16) {
          column = at % 32 / 2;
          source = 4 * word + at / 32 * 2 + at % 2;
        } else if (type.format != WeightFormat::kPlain) {
          column = at / 16 * 4 + at % 8 / 2;
          source = 4 * word + at % 16 / 8 * 2 + at % 2;
        }
        int expected = byte(column, source);
        if (type.format == WeightFormat::kMxfp4) {  // nibble k of a word, and k + 4
          const int64_t k = source % 4;
          const auto nibble = [&](int64_t j) {
            return byte(column, 4 * word + j / 2) >> (j % 2 * 4) & 15;
          };
          expected = nibble(k) | nibble(k + 4) << 4;
        }
        ASSERT_EQ(int{lines.as<uint8_t>()[i]}, expected) << NameOf(type) << ", byte " << i;
      }
    }
  }
}

TEST_P(KernelTest, FindsCodesThatAreNaN) {
  std::vector<uint8_t> codes(700, 0x7e);
  const auto find = [&] {
    return kernels_.find_not_finite(DType::kF8_E4M3, codes.data(), codes.size());
  };
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>(i);
    if (IsNaNE4M3(codes[i])) codes[i] = 0;
  }
  EXPECT_EQ(find(), -1);
  for (const int at : {0, 1, 63, 64, 255, 256, 300, 698, 699}) {
    for (const uint8_t nan : {0x7f, 0xff}) {
      const uint8_t before = codes[at];
      codes[at] = nan;
      EXPECT_EQ(find(), at);
      codes[at] = before;
    }
  }
}

TEST_P(KernelTest, ActivationsAreTheScalarOnes) {
  // Floats of every magnitude and sign, and all special ones; u = 1 shows the gate's part itself.
  std::vector<float> gates;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 40'009) {
    gates.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  for (float g = -90; g < 91; g += 0.01f) gates.push_back(g);
  for (const float g : {0.0f, -0.0f, INFINITY, -INFINITY, 1e-40f, 88.722839f, -88.722839f,
                        87.336544f, -87.336544f, 87.33655f, -87.33655f, 7.0f, -7.0f}) {
    gates.push_back(g);
  }
  while (gates.size() % 64 != 0) gates.push_back(0.5f);
  std::vector<float> ups(gates.size());
  for (size_t i = 0; i < ups.size(); ++i)
    ups[i] = i % 3 == 0 ? 1.0f : 3.7f * static_cast<float>(i % 5) - 8;
  for (const ActivationFunction& function : {ActivationFunction{Activation::kSiluGlu},
                                             {Activation::kClampedSwishGlu, 1.702f, 7.0f},
                                             {Activation::kClampedSiluGlu, 1.0f, 7.0f},
                                             {Activation::kSiluClampedGlu, 1.0f, 7.0f},
                                             {Activation::kGeluTanhGlu},
                                             {Activation::kGeluErfGlu},
                                             {Activation::kRelu2}}) {
    SCOPED_TRACE(static_cast<int>(function.kind));
    const bool gated = IsGated(function.kind);
    const int64_t columns = gated ? 32 : 64;
    const int64_t rows = static_cast<int64_t>(gates.size()) / columns;
    // Panels g, u, g, u of 16 columns, or g, g, g, g.
    Tensor c(DType::kF32, {4, rows, 16});
    const auto at = [rows, &c](int64_t panel, int64_t row, int64_t column) -> float& {
      return c.as<float>()[(panel * rows + row) * 16 + column];
    };
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        at(j / 16 * (gated ? 2 : 1), r, j % 16) = gates[r * columns + j];
        if (gated) at(j / 16 * 2 + 1, r, j % 16) = ups[r * columns + j];
      }
    }
    std::vector<float> plain(gates.size()), rounded(gates.size());
    std::vector<uint16_t> words(gates.size());
    kernels_.activate(function, c.as<float>(), rows, columns, RowFormat::kF32, plain.data(),
                      columns);
    kernels_.activate(function, c.as<float>(), rows, columns, RowFormat::kF32OfBF16, rounded.data(),
                      columns);
    kernels_.activate(function, c.as<float>(), rows, columns, RowFormat::kBF16, words.data(),
                      columns);
    for (size_t i = 0; i < gates.size(); ++i) {
      const float expected = ScalarActivate(function, gates[i], ups[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(plain[i])) << gates[i];
        continue;
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(plain[i]), std::bit_cast<uint32_t>(expected)) << gates[i];
      ASSERT_EQ(words[i], BF16FromFloat(expected)) << gates[i];
      ASSERT_EQ(std::bit_cast<uint32_t>(rounded[i]),
                std::bit_cast<uint32_t>(FloatFromBF16(BF16FromFloat(expected))))
          << gates[i];
    }
  }
}

// In the store, whatever the columns' arrangement.
TEST_P(KernelTest, BiasesAreAddedToTheirColumns) {
  std::mt19937 rng(8);
  const int64_t rows = 3;
  for (const int64_t n : {2, 34, 64, 100, 130}) {
    for (const auto columns :
         {PackedWeights::Columns::kPlain, PackedWeights::Columns::kInterleavedHalves}) {
      const bool halves = columns == PackedWeights::Columns::kInterleavedHalves;
      const Tensor bias = RandomTensor(DType::kF32, {2, n}, 1.0f, rng);
      PackedBias packed(2, n, columns);
      for (int64_t i = 0; i < 2; ++i) packed.Pack(i, bias.as<float>() + i * n);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t column = halves ? i % (n / 2) : i;
        const int64_t panel = halves ? column / 16 * 2 + i / (n / 2) : column / 16;
        const Tensor sums = RandomTensor(DType::kF32, {4, rows, 16}, 1.0f, rng);
        Tensor c(DType::kF32, {4, rows, 16});
        std::memcpy(c.data(), sums.data(), sums.num_bytes());
        kernels_.add_bias(c.as<float>(), rows, packed.Block(1, panel / 4));
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (panel % 4 * rows + r) * 16 + column % 16;
          ASSERT_EQ(c.as<float>()[at], sums.as<float>()[at] + bias.as<float>()[n + i])
              << "n " << n << ", column " << i << (halves ? " of halves" : "");
        }
      }
    }
  }
}

TEST_P(KernelTest, StoreWritesTheColumnsThatExistAndNoOther) {
  std::mt19937 rng(5);
  const int64_t rows = 3;
  const Tensor c = RandomTensor(DType::kF32, {4, rows, 16}, 1.0f, rng);
  for (int64_t columns = 1; columns <= kBlockColumns; ++columns) {
    std::vector<float> y(rows * 70, -7.0f);
    std::vector<uint16_t> words(rows * 70, 7);
    kernels_.store(c.as<float>(), rows, columns, RowFormat::kF32, y.data(), 70);
    kernels_.store(c.as<float>(), rows, columns, RowFormat::kBF16, words.data(), 70);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < 70; ++j) {
        const float value = j < columns ? c.as<float>()[(j / 16 * rows + r) * 16 + j % 16] : -7.0f;
        ASSERT_EQ(y[r * 70 + j], value) << columns << " columns, row " << r << ", column " << j;
        ASSERT_EQ(words[r * 70 + j], j < columns ? BF16FromFloat(value) : 7);
      }
    }
  }
}

TEST_P(KernelTest, WidenIsExact) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(all.size());
    kernels_.widen(dtype, all.data(), all.size() - 5, wide.data());  // a ragged end
    for (size_t i = 0; i + 5 < all.size(); ++i) {
      const float expected = LoadFloat(dtype, all.data(), i);
      if (std::isnan(expected)) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected))
          << NameOf(dtype) << " " << i;
    }
  }
}

TEST_P(KernelTest, CombineIsTheScalarChainInSlotOrder) {
  std::mt19937 rng(6);
  const auto restated = [](const CombineRows& token, int64_t i) {
    volatile float acc = 0.0f;
    const auto add = [&](int64_t s) {
      acc = fmaf(token.weights[s], LoadFloat(token.dtype, token.rows[s], i), acc);
    };
    for (int64_t s = 0; s < token.num_routed; ++s) add(s);
    if (token.routed_scale != 1.0f) acc = acc * token.routed_scale;
    for (int64_t s = 0; s < token.num_shared; ++s) add(token.num_routed + s);
    if (token.scale != 1.0f) acc = acc * token.scale;
    return acc;
  };
  constexpr int64_t kSlots = 5;
  for (const DType row_dtype : {DType::kF32, DType::kBF16}) {
    for (const DType out_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int64_t n : {1, 15, 64, 130}) {
        for (const int64_t num_shared : {0, 1, 2, 5}) {
          for (const auto& [routed_scale, scale] :
               std::vector<std::pair<float, float>>{{1, 1}, {2.5f, 1}, {1, 0.5f}, {2.5f, 0.5f}}) {
            for (const Data data : {Data::kTame, Data::kTiny}) {
              const Tensor rows = RandomData(row_dtype, DType::kF32, {kSlots, n}, data, rng);
              const Tensor weights = RandomData(DType::kF32, row_dtype, {kSlots}, data, rng);
              std::vector<const void*> pointers;
              for (int64_t s = 0; s < kSlots; ++s) {
                pointers.push_back(rows.data() + s * n * BytesOf(row_dtype));
              }
              const CombineRows token = {row_dtype,
                                         pointers.data(),
                                         weights.as<float>(),
                                         kSlots - num_shared,
                                         routed_scale,
                                         num_shared,
                                         scale};
              Tensor got(out_dtype, {n}), expected(out_dtype, {n});
              kernels_.combine(token, out_dtype, n, got.data());
              for (int64_t i = 0; i < n; ++i) {
                StoreFloat(out_dtype, expected.data(), i, restated(token, i));
              }
              ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.num_bytes()), 0)
                  << NameOf(row_dtype) << " to " << NameOf(out_dtype) << ", n " << n << ", scales "
                  << routed_scale << " and " << scale << ", " << num_shared << " shared";
            }
          }
        }
      }
    }
  }
}

TEST_P(KernelTest, FindsTheFirstValueThatIsNotFinite) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    constexpr int64_t kSize = 700;
    Tensor values(dtype, {kSize});
    for (int64_t i = 0; i < kSize; ++i) StoreFloat(dtype, values.data(), i, 60000.0f);
    EXPECT_EQ(kernels_.find_not_finite(dtype, values.data(), kSize), -1);
    for (const int64_t at : {0, 1, 31, 255, 256, 300, 511, 698, 699}) {
      for (const float bad : {INFINITY, -INFINITY, NAN}) {
        Tensor copy(dtype, {kSize});
        std::memcpy(copy.data(), values.data(), values.num_bytes());
        StoreFloat(dtype, copy.data(), at, bad);
        StoreFloat(dtype, copy.data(), kSize - 1, NAN);
        EXPECT_EQ(kernels_.find_not_finite(dtype, copy.data(), kSize), at) << NameOf(dtype);
      }
    }
  }
}

TEST(Isa, NamesAreParsedAndOthersRefused) {
  EXPECT_EQ(ParseIsa("auto").value(), BestIsa());
  for (const Isa isa : SupportedIsas()) EXPECT_EQ(ParseIsa(NameOf(isa)).value(), isa);
  const absl::Status status = ParseIsa("sse9").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("avx2"), std::string::npos) << status;
  EXPECT_NE(std::string(status.message()).find("sse9"), std::string::npos) << status;
  EXPECT_EQ(ParseEngineKind("for_loop").value(), EngineKind::kForLoop);
  EXPECT_EQ(ParseEngineKind("fast").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ComputePool, RunsOnEveryThreadUnderFlushedDenormalsAndFromManyCallers) {
  ComputePool pool(3);
  std::atomic<int> calls = 0, tiny = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        std::atomic<int> before = 0;
        pool.Run([&](int thread) {
          volatile float half = 0.5f;
          volatile float product = std::numeric_limits<float>::min() * half;
          tiny += product != 0.0f;
          ++before;
          pool.Barrier();
          EXPECT_EQ(before, 3) << "thread " << thread << " passed the barrier too early";
          ++calls;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(calls, 4 * 50 * 3);
  EXPECT_EQ(tiny, 0);
}

}  // namespace
}  // namespace expertmesh
