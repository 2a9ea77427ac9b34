#include "common/kernels/for_loop_gemm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/numerics/flush_denormals.h"

namespace expertmesh {
namespace {

// Chains that run side by side, so that the processor need not wait for one addition before the
// next. Each chain keeps its own order, so this changes no bit.
constexpr int64_t kChains = 8;

// sum[c] = the chain of row n0 + c over k in [begin, end), in pairs, with zero products up to a
// multiple of `pad`.
template <typename Weight>
KERNEL_NOINLINE KERNEL_FMA void PairChains(const float* x, int64_t begin, int64_t end, int64_t pad,
                                           int64_t n0, int64_t chains, const Weight& weight,
                                           float* sum) {
  std::fill_n(sum, chains, 0.0f);
  const int64_t padded_end = begin + (end - begin + pad - 1) / pad * pad;
  for (int64_t pair = begin; pair < padded_end; pair += 2) {
    for (const int64_t k : {pair + 1, pair}) {
      for (int64_t c = 0; c < chains; ++c) {
        sum[c] = k < end ? std::fma(x[k], weight(n0 + c, k), sum[c]) : std::fma(0.0f, 0.0f, sum[c]);
      }
    }
  }
}

template <typename Weight>
void PairMatVec(const float* x, int64_t rows, int64_t columns, int64_t pad, const Weight& weight,
                float* y) {
  for (int64_t n = 0; n < rows; n += kChains) {
    PairChains(x, 0, columns, pad, n, std::min(kChains, rows - n), weight, y + n);
  }
}

KERNEL_NOINLINE KERNEL_FMA void F32MatVec(const float* x, const float* weights, int64_t rows,
                                          int64_t columns, float* y) {
  for (int64_t n0 = 0; n0 < rows; n0 += kChains) {
    const int64_t chains = std::min(kChains, rows - n0);
    float sum[kChains] = {};
    for (int64_t k = 0; k < columns; ++k) {
      for (int64_t c = 0; c < chains; ++c) {
        sum[c] = std::fma(x[k], weights[(n0 + c) * columns + k], sum[c]);
      }
    }
    std::copy_n(sum, chains, y + n0);
  }
}

// y[n] = chain[n] * (scales[n] * x_scale).
KERNEL_NOINLINE void ScaleRows(const float* scales, float x_scale, int64_t rows, float* y) {
  for (int64_t n = 0; n < rows; ++n) y[n] *= scales[n] * x_scale;
}

// y[c] = fma(chain[c], scales[c * stride] * x_scale, y[c]).
KERNEL_NOINLINE KERNEL_FMA void AddScaled(const float* chain, const float* scales, int64_t stride,
                                          float x_scale, int64_t chains, float* y) {
  for (int64_t c = 0; c < chains; ++c)
    y[c] = std::fma(chain[c], scales[c * stride] * x_scale, y[c]);
}

template <typename Weight>
void BlockMatVec(const float* x, int64_t rows, int64_t columns, const Weight& weight,
                 const float* scales, const float* x_scales, float* y) {
  const int64_t blocks = ScalesPerRow(WeightFormat::kFp8Block128, columns);
  std::fill_n(y, rows, 0.0f);
  for (int64_t n = 0; n < rows; n += kChains) {
    const int64_t chains = std::min(kChains, rows - n);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kFp8BlockK;
      float chain[kChains];
      PairChains(x, begin, std::min(columns, begin + kFp8BlockK), 4, n, chains, weight, chain);
      AddScaled(chain, scales + n * blocks + block, blocks,
                x_scales == nullptr ? 1.0f : x_scales[block], chains, y + n);
    }
  }
}

std::array<float, 256> E4M3Values() {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) values[code] = FloatFromE4M3(static_cast<uint8_t>(code));
  return values;
}

}  // namespace

void ForLoopMatVec(const float* x, const WeightView& weights, float* y, const float* x_scales) {
  static const std::array<float, 256> kE4M3 = E4M3Values();
  const int64_t rows = weights.n();
  const int64_t columns = weights.k();
  const void* const data = weights.values.data;
  const auto* const codes = static_cast<const uint8_t*>(data);
  const auto e4m3 = [&](int64_t n, int64_t k) { return kE4M3[codes[n * columns + k]]; };
  switch (weights.format) {
    case WeightFormat::kFp8Block128:
      return BlockMatVec(x, rows, columns, e4m3, static_cast<const float*>(weights.scales.data),
                         x_scales, y);
    case WeightFormat::kFp8Row:
      PairMatVec(x, rows, columns, 4, e4m3, y);
      return ScaleRows(static_cast<const float*>(weights.scales.data),
                       x_scales == nullptr ? 1.0f : *x_scales, rows, y);
    case WeightFormat::kMxfp4: {
      const auto* const scales = static_cast<const uint8_t*>(weights.scales.data);
      const int64_t blocks = ScalesPerRow(WeightFormat::kMxfp4, columns);
      const auto mxfp4 = [&](int64_t n, int64_t k) {
        const int byte = codes[(n * columns + k) / 2];
        const auto code = static_cast<uint8_t>(k % 2 == 0 ? byte & 15 : byte >> 4);
        return FloatFromMxfp4(code, scales[n * blocks + k / kMxBlockK]);
      };
      return PairMatVec(x, rows, columns, 8, mxfp4, y);
    }
    case WeightFormat::kMxfp8: {
      const auto* const scales = static_cast<const uint8_t*>(weights.scales.data);
      const int64_t blocks = ScalesPerRow(WeightFormat::kMxfp8, columns);
      static const std::array<double, 256> kPowers = [] {
        std::array<double, 256> powers;
        for (int scale = 0; scale < 256; ++scale) powers[scale] = std::ldexp(1.0, scale - 127);
        return powers;
      }();
      // FloatFromMxfp8: what is denormal in fp32 is flushed.
      const auto mxfp8 = [&](int64_t n, int64_t k) {
        const double power = kPowers[scales[n * blocks + k / kMxBlockK]];
        return static_cast<float>(kE4M3[codes[n * columns + k]] * power);
      };
      return PairMatVec(x, rows, columns, 4, mxfp8, y);
    }
    case WeightFormat::kPlain:
      break;
  }
  switch (weights.values.dtype) {
    case DType::kBF16: {
      const auto* const words = static_cast<const uint16_t*>(data);
      const auto bf16 = [&](int64_t n, int64_t k) { return FloatFromBF16(words[n * columns + k]); };
      return PairMatVec(x, rows, columns, 2, bf16, y);
    }
    case DType::kF16: {
      const auto* const words = static_cast<const uint16_t*>(data);
      const auto f16 = [&](int64_t n, int64_t k) { return FloatFromF16(words[n * columns + k]); };
      return PairMatVec(x, rows, columns, 2, f16, y);
    }
    default:
      return F32MatVec(x, static_cast<const float*>(data), rows, columns, y);
  }
}

}  // namespace expertmesh
