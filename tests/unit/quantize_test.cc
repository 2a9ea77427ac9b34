// Quantisation against torchao and ml_dtypes (tests/golden/make_quantize_golden.py), the vector
// kernels against the scalar loops, and what operators and kernels may rely on.
#include "common/kernels/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/for_loop_quantize.h"
#include "common/numerics/flush_denormals.h"
#include "common/numerics/keep_denormals.h"
#include "common/numerics/quantize.h"
#include "common/safetensors/safetensors.h"
#include "common/tensor.h"
#include "gtest/gtest.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

constexpr QuantizedFormat kFormats[] = {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                        QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

enum class Kind { kRows, kWeights };

// Who quantises: the loops, or the kernels of an instruction set.
struct Quantizer {
  std::string name;
  std::function<QuantizeCounts(Kind, const QuantizeArgs&)> run;
};

Quantizer ForLoops() {
  return {"for_loop", [](Kind kind, const QuantizeArgs& args) {
            return kind == Kind::kRows ? ForLoopQuantizeRows(args) : ForLoopQuantizeWeights(args);
          }};
}

std::vector<Quantizer> VectorKernels() {
  std::vector<Quantizer> all;
  for (const Isa isa : SupportedIsas()) {
    all.push_back({NameOf(isa), [isa](Kind kind, const QuantizeArgs& args) {
                     return kind == Kind::kRows ? QuantizeRows(isa, args)
                                                : QuantizeWeights(isa, args);
                   }});
  }
  return all;
}

std::vector<Quantizer> AllQuantizers() {
  std::vector<Quantizer> all = VectorKernels();
  all.push_back(ForLoops());
  return all;
}

struct Quantized {
  Tensor codes;
  Tensor scales;
  QuantizeCounts counts;
};

// Rows [rows, k], with a canary behind each buffer.
Quantized Quantize(const Quantizer& quantizer, Kind kind, QuantizedFormat format,
                   const Tensor& rows) {
  constexpr int64_t kCanary = 64;
  const int64_t n = rows.dim(0), k = rows.dim(1), per_row = ScalesPerRow(format, k);
  const DType scale_dtype = ScaleDType(format);
  Tensor codes(DType::kF8_E4M3, {n * k + kCanary});
  Tensor scales(scale_dtype, {n * per_row + kCanary});
  std::memset(codes.data(), 0x5a, codes.num_bytes());
  std::memset(scales.data(), 0x5a, scales.num_bytes());
  Quantized result;
  result.counts = quantizer.run(
      kind, {format, rows.dtype(), rows.data(), n, k, codes.as<uint8_t>(), scales.data()});
  for (const auto& [tensor, used] : {std::pair{&codes, n * k}, {&scales, n * per_row}}) {
    const auto* bytes = tensor->as<uint8_t>();
    for (size_t i = static_cast<size_t>(used * BytesOf(tensor->dtype())); i < tensor->num_bytes();
         ++i) {
      EXPECT_EQ(bytes[i], 0x5a) << "written beyond the end";
    }
  }
  result.codes = Tensor(DType::kF8_E4M3, {n, k});
  std::memcpy(result.codes.data(), codes.data(), result.codes.num_bytes());
  result.scales = Tensor(scale_dtype, {n, per_row});
  std::memcpy(result.scales.data(), scales.data(), result.scales.num_bytes());
  return result;
}

// The scale of an element, as a float.
float ScaleAt(const Quantized& q, QuantizedFormat format, int64_t row, int64_t k) {
  const int64_t at = row * q.scales.dim(1) + k / ChannelsPerScale(format, q.codes.dim(1));
  return q.scales.dtype() == DType::kF32 ? q.scales.as<float>()[at]
                                         : FloatFromE8M0(q.scales.as<uint8_t>()[at]);
}

void ExpectSameBytes(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.dtype(), expected.dtype()) << what;
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  const auto* a = got.as<uint8_t>();
  const auto* b = expected.as<uint8_t>();
  int64_t differ = 0, first = -1;
  for (size_t i = 0; i < got.num_bytes(); ++i) {
    if (a[i] == b[i]) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    ++differ;
  }
  EXPECT_EQ(differ, 0) << what << ": bytes differ, the first in row "
                       << first / (BytesOf(got.dtype()) * got.dim(1));
}

Tensor RowsOf(std::vector<float> values, int64_t k, DType dtype = DType::kF32) {
  Tensor rows(dtype, {static_cast<int64_t>(values.size()) / k, k});
  for (size_t i = 0; i < values.size(); ++i) {
    StoreFloat(dtype, rows.data(), static_cast<int64_t>(i), values[i]);
  }
  return rows;
}

// ---- Codes -------------------------------------------------------------------------------------

TEST(RoundToE4M3, EveryMiddleOfTwoCodes) {
  for (uint32_t code = 0; code < kE4M3Code448; ++code) {
    const float here = FloatFromE4M3(static_cast<uint8_t>(code));
    const float next = FloatFromE4M3(static_cast<uint8_t>(code + 1));
    const float middle = 0.5f * (here + next);
    EXPECT_EQ(RoundToE4M3(here), code);
    EXPECT_EQ(RoundToE4M3(middle), code + code % 2) << "ties go to the even code";
    EXPECT_EQ(RoundToE4M3(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(RoundToE4M3(std::nextafter(middle, next)), code + 1);
  }
  EXPECT_EQ(RoundToE4M3(464.0f), kE4M3Code448);
  EXPECT_GT(RoundToE4M3(std::nextafter(464.0f, 500.0f)), kE4M3Code448);
  EXPECT_GT(RoundToE4M3(std::numeric_limits<float>::max()), kE4M3Code448);
}

// ---- Others' results ---------------------------------------------------------------------------

class QuantizeGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    auto file = SafetensorsFile::Open(EXPERTMESH_TEST_DATA "/quantize.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
  }
  Tensor Read(const std::string& name) const {
    auto tensor = file_->ReadTensor(name);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return tensor.ok() ? *tensor : Tensor(DType::kF32, {0, 0});
  }
  void Check(Kind kind, const std::string& name, QuantizedFormat format) const {
    const Tensor rows = Read(name + ".rows");
    for (const Quantizer& quantizer : AllQuantizers()) {
      const std::string prefix = absl::StrCat(name, ".", NameOf(format));
      const Quantized q = Quantize(quantizer, kind, format, rows);
      const std::string what = absl::StrCat(prefix, " by ", quantizer.name);
      ExpectSameBytes(q.scales, Read(prefix + ".scales"), what + ", scales");
      ExpectSameBytes(q.codes, Read(prefix + ".codes"), what + ", codes");
    }
  }

 private:
  std::shared_ptr<const SafetensorsFile> file_;
};

TEST_F(QuantizeGolden, Rows) {
  for (const DType dtype : kDTypes) {
    for (const QuantizedFormat format : kFormats) Check(Kind::kRows, NameOf(dtype), format);
  }
}

TEST_F(QuantizeGolden, WeightsInBlocksOf128Rows) {
  Check(Kind::kWeights, "weights", QuantizedFormat::kFp8Block128);
}

// Exponents by the largest magnitude of a block.
TEST(Quantize, ExponentsOfMxfp8) {
  struct Case {
    float amax;
    uint8_t floor, rceil;
  };
  for (const auto& [amax, floor, rceil] : std::vector<Case>{{0.0f, 0, 0},
                                                            {1.0f, 119, 119},
                                                            {1.75f, 119, 119},
                                                            {std::nextafter(1.75f, 2.0f), 119, 120},
                                                            {1.99f, 119, 120},
                                                            {448.0f, 127, 127},
                                                            {449.0f, 127, 128},
                                                            {512.0f, 128, 128},
                                                            {3e38f, 246, 247}}) {
    EXPECT_EQ(ScaleOf(QuantizedFormat::kMxfp8, amax).exponent, floor) << amax;
    EXPECT_EQ(ScaleOf(QuantizedFormat::kMxfp8Rceil, amax).exponent, rceil) << amax;
  }
}

// ---- Kernels against loops ---------------------------------------------------------------------

// Rows of very different sizes, of very different values, some of them zero and some denormal.
Tensor WildRows(DType dtype, int64_t rows, int64_t k, std::mt19937& rng) {
  Tensor tensor(dtype, {rows, k});
  const int highest = dtype == DType::kF16 ? 15 : 127;
  const int lowest = dtype == DType::kF16 ? -24 : -140;
  std::uniform_real_distribution<float> uniform(-1.9f, 1.9f);
  for (int64_t r = 0; r < rows; ++r) {
    const int exponent =
        lowest + static_cast<int>(rng() % static_cast<uint32_t>(highest - lowest + 1));
    const uint32_t spread = 1 + rng() % 16;
    for (int64_t i = 0; i < k; ++i) {
      const float value = std::ldexp(uniform(rng), exponent - static_cast<int>(rng() % spread));
      StoreFloat(dtype, tensor.data(), r * k + i, rng() % 16 == 0 ? 0.0f : value);
    }
  }
  return tensor;
}

TEST(Quantize, KernelsGiveTheBitsOfTheLoops) {
  std::mt19937 rng(1);
  int64_t saturated = 0, zero = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t k : {1, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 129, 257, 1408}) {
      const Tensor rows = WildRows(dtype, k < 1000 ? 150 : 7, k, rng);
      for (const QuantizedFormat format : kFormats) {
        for (const Kind kind : {Kind::kRows, Kind::kWeights}) {
          const Quantized expected = Quantize(ForLoops(), kind, format, rows);
          saturated += expected.counts.saturated_values;
          zero += expected.counts.zero_rows;
          for (const Quantizer& quantizer : VectorKernels()) {
            const std::string what =
                absl::StrCat(NameOf(dtype), " [", rows.dim(0), ", ", k, "] as ", NameOf(format),
                             kind == Kind::kRows ? " rows" : " weights", " by ", quantizer.name);
            const Quantized got = Quantize(quantizer, kind, format, rows);
            ExpectSameBytes(got.codes, expected.codes, what);
            ExpectSameBytes(got.scales, expected.scales, what);
            EXPECT_EQ(got.counts.saturated_values, expected.counts.saturated_values) << what;
            EXPECT_EQ(got.counts.saturated_rows, expected.counts.saturated_rows) << what;
            EXPECT_EQ(got.counts.zero_rows, expected.counts.zero_rows) << what;
          }
        }
      }
    }
  }
  EXPECT_GT(saturated, 0);
  EXPECT_GT(zero, 0);
}

// What a row becomes depends on that row alone, so that a batch can be cut anywhere.
TEST(Quantize, RowsAreIndependent) {
  std::mt19937 rng(2);
  const Tensor rows = WildRows(DType::kBF16, 20, 200, rng);
  for (const QuantizedFormat format : kFormats) {
    const Quantized all = Quantize(VectorKernels().back(), Kind::kRows, format, rows);
    QuantizeCounts counts;
    for (int64_t r = 0; r < rows.dim(0); ++r) {
      Tensor row(DType::kBF16, {1, 200});
      std::memcpy(row.data(), rows.data() + r * 400, 400);
      const Quantized one = Quantize(VectorKernels().back(), Kind::kRows, format, row);
      EXPECT_EQ(std::memcmp(one.codes.data(), all.codes.data() + r * 200, 200), 0);
      const size_t bytes = one.scales.num_bytes();
      EXPECT_EQ(std::memcmp(one.scales.data(), all.scales.data() + r * bytes, bytes), 0);
      counts += one.counts;
    }
    EXPECT_EQ(counts.saturated_values, all.counts.saturated_values) << NameOf(format);
    EXPECT_EQ(counts.saturated_rows, all.counts.saturated_rows) << NameOf(format);
    EXPECT_EQ(counts.zero_rows, all.counts.zero_rows) << NameOf(format);
  }
}

TEST(Quantize, DenormalsCountUnderTheContractsEnvironmentToo) {
  std::mt19937 rng(3);
  Tensor rows = WildRows(DType::kF32, 8, 64, rng);
  for (int64_t i = 0; i < rows.num_elements(); ++i) {  // e = 0 to 2
    rows.as<uint32_t>()[i] = rng() % (11u << 23) | (rng() & 0x80000000u);
  }
  for (const QuantizedFormat format : kFormats) {
    for (const Quantizer& quantizer : AllQuantizers()) {
      const Quantized expected = Quantize(quantizer, Kind::kRows, format, rows);
      const ScopedFlushDenormals flush;
      const unsigned before = _mm_getcsr();
      const Quantized got = Quantize(quantizer, Kind::kRows, format, rows);
      EXPECT_EQ(_mm_getcsr() & 0x8040u, before & 0x8040u) << "restored";
      ExpectSameBytes(got.codes, expected.codes, NameOf(format));
      ExpectSameBytes(got.scales, expected.scales, NameOf(format));
    }
  }
  // 3/4 of 2^-126 in a block of exponent 0 is a code, which a flushed 0 would not be.
  const Tensor tiny = RowsOf(std::vector<float>(32, 0x1.8p-127f), 32);
  for (const Quantizer& quantizer : AllQuantizers()) {
    const ScopedFlushDenormals flush;
    const Quantized floor = Quantize(quantizer, Kind::kRows, QuantizedFormat::kMxfp8, tiny);
    EXPECT_EQ(floor.codes.as<uint8_t>()[31], 0x34) << "0.75";
    const Quantized rceil = Quantize(quantizer, Kind::kRows, QuantizedFormat::kMxfp8Rceil, tiny);
    EXPECT_EQ(rceil.codes.as<uint8_t>()[31], 0x3c) << "1.5";
  }
}

// ---- What comes out ----------------------------------------------------------------------------

// A value comes back within half a step of its code's: 1/16 of it, or half of a denormal's step.
TEST(Quantize, ValuesComeBack) {
  std::mt19937 rng(4);
  for (const DType dtype : kDTypes) {
    Tensor rows = RandomTensor(dtype, {16, 300}, 0.5f, rng);
    for (const QuantizedFormat format : kFormats) {
      const Quantized q = Quantize(VectorKernels().back(), Kind::kRows, format, rows);
      int64_t saturated = 0;
      for (int64_t r = 0; r < 16; ++r) {
        for (int64_t k = 0; k < 300; ++k) {
          const uint8_t code = q.codes.as<uint8_t>()[r * 300 + k];
          const float scale = ScaleAt(q, format, r, k);
          const float x = LoadFloat(dtype, rows.data(), r * 300 + k);
          if (std::fabs(x) > 464 * scale) {
            ++saturated;
            EXPECT_EQ(code & 0x7f, kE4M3Code448);
            continue;
          }
          const float bound = std::max(std::fabs(x) / 16, scale * 0x1p-10f) * 1.0001f;
          EXPECT_NEAR(FloatFromE4M3(code) * scale, x, bound) << NameOf(format);
        }
      }
      EXPECT_EQ(q.counts.saturated_values, saturated) << NameOf(format);
      EXPECT_EQ(saturated > 0, format == QuantizedFormat::kMxfp8) << NameOf(format);
      EXPECT_EQ(q.counts.zero_rows, 0);
    }
  }
}

TEST(Quantize, ZerosGiveZerosAndAreCounted) {
  for (const DType dtype : kDTypes) {
    std::vector<float> values(4 * 48, 0.0f);
    values[48 + 47] = FloatFromF16(0x0001);  // a row that is nearly zero
    values[2 * 48] = -0.0f;
    const Tensor rows = RowsOf(values, 48, dtype);
    for (const QuantizedFormat format : kFormats) {
      for (const Quantizer& quantizer : AllQuantizers()) {
        const Quantized q = Quantize(quantizer, Kind::kRows, format, rows);
        EXPECT_EQ(q.counts.zero_rows, 3) << NameOf(format) << " by " << quantizer.name;
        EXPECT_EQ(q.counts.saturated_values, 0);
        for (int64_t i = 0; i < rows.num_elements(); ++i) {
          if (i == 48 + 47) continue;
          EXPECT_EQ(q.codes.as<uint8_t>()[i], i == 2 * 48 ? 0x80 : 0x00);
          const float scale = ScaleAt(q, format, i / 48, i % 48);
          EXPECT_TRUE(std::isfinite(scale) && scale > 0);
        }
      }
    }
  }
}

// Whatever the size of a row, codes and scales are finite, and what they stand for is, too; but for
// the one number of kFp8Rowwise that is rounded up to 2^128.
TEST(Quantize, EverythingIsFinite) {
  std::mt19937 rng(5);
  for (const DType dtype : kDTypes) {
    Tensor rows = WildRows(dtype, 400, 40, rng);
    for (int64_t k = 0; k < 40; ++k) {  // up to the largest number of the dtype
      const uint32_t bits = dtype == DType::kF32 ? 0x7f7fffffu : 0x7f7f0000u;
      const float largest = dtype == DType::kF16 ? 65504.0f : std::bit_cast<float>(bits);
      StoreFloat(dtype, rows.data(), k, largest * (k % 2 != 0 ? -1.0f : 1.0f));
      StoreFloat(dtype, rows.data(), 40 + k, largest * (static_cast<float>(k) / 40));
    }
    for (const QuantizedFormat format : kFormats) {
      const Quantized q = Quantize(VectorKernels().back(), Kind::kRows, format, rows);
      for (int64_t i = 0; i < rows.num_elements(); ++i) {
        const uint8_t code = q.codes.as<uint8_t>()[i];
        const float scale = ScaleAt(q, format, i / 40, i % 40);
        ASSERT_FALSE(IsNaNE4M3(code));
        ASSERT_TRUE(std::isfinite(scale));
        if (format == QuantizedFormat::kFp8Rowwise && scale == 0x1p120f) {
          ASSERT_LE(std::fabs(FloatFromE4M3(code)), 256.0f);
          continue;
        }
        ASSERT_TRUE(std::isfinite(FloatFromE4M3(code) * scale))
            << NameOf(dtype) << " as " << NameOf(format) << ", element " << i;
      }
    }
  }
}

TEST(Quantize, CountsSaturatedValuesAndRows) {
  std::vector<float> values(3 * 33, 0.25f);
  values[0] = 1.0f;                               // 2^8
  values[1] = 1.8125f;                            // 464, which rounds to 448
  values[2] = std::nextafter(1.8125f, 2.0f);      // beyond
  values[3] = -1.9f;                              // beyond
  values[33 + 32] = -std::nextafter(2.0f, 0.0f);  // beyond, in the last block
  const Tensor rows = RowsOf(values, 33);
  for (const Quantizer& quantizer : AllQuantizers()) {
    const Quantized q = Quantize(quantizer, Kind::kRows, QuantizedFormat::kMxfp8, rows);
    EXPECT_EQ(q.counts.saturated_values, 3) << quantizer.name;
    EXPECT_EQ(q.counts.saturated_rows, 2) << quantizer.name;
    EXPECT_EQ(q.codes.as<uint8_t>()[2], kE4M3Code448);
    EXPECT_EQ(q.codes.as<uint8_t>()[3], kE4M3Code448 | kE4M3Sign);
    EXPECT_EQ(q.codes.as<uint8_t>()[33 + 32], kE4M3Code448 | kE4M3Sign);
    EXPECT_EQ(Quantize(quantizer, Kind::kRows, QuantizedFormat::kMxfp8Rceil, rows)
                  .counts.saturated_values,
              0);
  }
}

TEST(Quantize, NamesAndShapes) {
  EXPECT_STREQ(NameOf(QuantizedFormat::kFp8Rowwise), "fp8_rowwise");
  EXPECT_STREQ(NameOf(QuantizedFormat::kFp8Block128), "fp8_block128");
  EXPECT_STREQ(NameOf(QuantizedFormat::kMxfp8), "mxfp8");
  EXPECT_STREQ(NameOf(QuantizedFormat::kMxfp8Rceil), "mxfp8_rceil");
  EXPECT_EQ(ScalesPerRow(QuantizedFormat::kFp8Rowwise, 2880), 1);
  EXPECT_EQ(ScalesPerRow(QuantizedFormat::kFp8Block128, 2880), 23);
  EXPECT_EQ(ScalesPerRow(QuantizedFormat::kMxfp8, 2880), 90);
  EXPECT_EQ(ScalesPerRow(QuantizedFormat::kMxfp8Rceil, 33), 2);
}

}  // namespace
}  // namespace expertmesh
