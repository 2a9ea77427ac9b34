#include "common/kernels/for_loop_quantize.h"

#include <algorithm>
#include <cmath>

#include "common/numerics/flush_denormals.h"
#include "common/numerics/keep_denormals.h"
#include "common/numerics/quantize.h"

namespace expertmesh {
namespace {

// The block of rows [r0, r1) and channels [k0, k1), the block-th of its rows. Adds to saturated[r -
// r0] the values that are.
KERNEL_NOINLINE void QuantizeBlock(const QuantizeArgs& args, int64_t r0, int64_t r1, int64_t k0,
                                   int64_t k1, int64_t block, int64_t* saturated) {
  float amax = 0.0f;
  for (int64_t r = r0; r < r1; ++r) {
    for (int64_t k = k0; k < k1; ++k) {
      amax = std::max(amax, std::fabs(LoadFloat(args.dtype, args.values, r * args.k + k)));
    }
  }
  const BlockScale scale = ScaleOf(args.format, amax);
  const int64_t scales_per_row = ScalesPerRow(args.format, args.k);
  for (int64_t r = r0; r < r1; ++r) {
    const int64_t at = r * scales_per_row + block;
    if (ScaleDType(args.format) == DType::kF32) {
      static_cast<float*>(args.scales)[at] = scale.scale;
    } else {
      static_cast<uint8_t*>(args.scales)[at] = scale.exponent;
    }
    for (int64_t k = k0; k < k1; ++k) {
      const float x = LoadFloat(args.dtype, args.values, r * args.k + k);
      const float scaled =
          args.format == QuantizedFormat::kFp8Block128 ? x / scale.factor : x * scale.factor;
      const uint32_t code = RoundToE4M3(std::fabs(scaled));
      if (code > scale.largest_code) ++saturated[r - r0];
      args.codes[r * args.k + k] = static_cast<uint8_t>(
          std::min<uint32_t>(code, scale.largest_code) | (std::signbit(x) ? kE4M3Sign : 0));
    }
  }
}

QuantizeCounts Quantize(const QuantizeArgs& args, int64_t rows_per_scale) {
  const ScopedKeepDenormals keep;
  const int64_t channels = ChannelsPerScale(args.format, args.k);
  QuantizeCounts counts;
  for (int64_t r0 = 0; r0 < args.rows; r0 += rows_per_scale) {
    const int64_t r1 = std::min(r0 + rows_per_scale, args.rows);
    int64_t saturated[kFp8BlockRows] = {};
    for (int64_t block = 0; block < ScalesPerRow(args.format, args.k); ++block) {
      const int64_t k0 = block * channels;
      QuantizeBlock(args, r0, r1, k0, std::min(k0 + channels, args.k), block, saturated);
    }
    for (int64_t r = r0; r < r1; ++r) {
      counts.saturated_values += saturated[r - r0];
      counts.saturated_rows += saturated[r - r0] > 0;
      bool zero = true;
      for (int64_t k = 0; k < args.k; ++k) {
        zero = zero && LoadFloat(args.dtype, args.values, r * args.k + k) == 0.0f;
      }
      counts.zero_rows += zero;
    }
  }
  return counts;
}

}  // namespace

QuantizeCounts ForLoopQuantizeRows(const QuantizeArgs& args) { return Quantize(args, 1); }

QuantizeCounts ForLoopQuantizeWeights(const QuantizeArgs& args) {
  return Quantize(args, WeightRowsPerScale(args.format));
}

void ForLoopDequantizeRow(QuantizedFormat format, const uint8_t* codes, const void* scales,
                          int64_t k, float* values) {
  const bool exponents = ScaleDType(format) == DType::kF8_E8M0;
  for (int64_t i = 0; i < k; ++i) {
    values[i] = exponents
                    ? FloatFromMxfp8(codes[i], static_cast<const uint8_t*>(scales)[i / kMxBlockK])
                    : FloatFromE4M3(codes[i]);
  }
}

}  // namespace expertmesh
