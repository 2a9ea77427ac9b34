// The arithmetic of quantisation, part of the bit contract: how the largest magnitude of a block
// (a row, 128 channels, 32 channels) gives its scale, and how a value and a scale give a code.
// Everything is fp32, rounded to nearest even, with denormals: under ScopedKeepDenormals. Values
// are finite. With amax the largest magnitude of the block:
//
//   kFp8Rowwise    s = 2^floor(log2(448 / max(amax, 1e-12))), the floor that of the rounded
//                  quotient's exponent bits; code = RNE(x * s); the scale is 1 / s. What
//                  torchao's MoE training does, but for its logarithm, which is rounded: a
//                  quotient just below a power of two counts as that power there.
//                  Magnitudes from 1.9375 * 2^127 on become 256 * 2^120, finite only unscaled.
//   kFp8Block128   scale = max(amax, 1e-4) / 448; code = RNE(x / scale) (arXiv:2412.19437, 3.3).
//   kMxfp8         e = floor(log2(amax)) - 8; code = RNE(x / max(2^e, 2^-126)): the OCP
//                  Microscaling formats, the divisor as torchao has it. Magnitudes above 1.8125 *
//                  2^floor(log2(amax)) saturate. Where the exponent is 0 (amax < 2^-118) code *
//                  scale is half of the value.
//   kMxfp8Rceil    e = ceil(log2(amax * fl(1 / 448))), the ceiling exact; code = RNE(x / 2^e), as
//                  cuBLAS has it. torchao rounds its logarithm, and gives zeros where e = -127.
//
// e is at least -127 and stored as e + 127. Codes beyond the largest one are brought down to it:
// 448, or 240 where e = 120, with which 256 and more would not be finite.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/quantized_format.h"

namespace expertmesh {

inline constexpr uint8_t kE4M3Code240 = 0x77;
inline constexpr uint8_t kE4M3Code448 = 0x7e;  // the largest
inline constexpr uint8_t kE4M3Sign = 0x80;

// The e4m3 code nearest to a magnitude, ties to even, as if exponents went on: 464 is still 448,
// greater ones give codes that are none, above kE4M3Code448.
inline uint32_t RoundToE4M3(float magnitude) {
  if (magnitude < 0x1p-6f) {  // denormal codes, multiples of 2^-9
    return static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p9f));
  }
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  return (bits + 0x7ffffu + ((bits >> 20) & 1u) - (120u << 23)) >> 20;
}

// What the values of a block have in common.
struct BlockScale {
  float factor = 1.0f;  // of values: they are multiplied by it, or divided for kFp8Block128
  uint8_t largest_code = kE4M3Code448;
  float scale = 1.0f;    // to store, where ScaleDType is F32
  uint8_t exponent = 0;  // to store, where it is F8_E8M0
};

inline float PowerOfTwo(int biased_exponent) {  // 1 to 254
  return std::bit_cast<float>(static_cast<uint32_t>(biased_exponent) << 23);
}

// `amax`: the largest magnitude of the block. Always inlined: of a constant format one case is
// left.
__attribute__((always_inline)) inline BlockScale ScaleOf(QuantizedFormat format, float amax) {
  BlockScale block;
  switch (format) {
    case QuantizedFormat::kFp8Rowwise: {
      const float quotient = 448.0f / (amax > 1e-12f ? amax : 1e-12f);
      const int exponent = static_cast<int>(std::bit_cast<uint32_t>(quotient) >> 23);
      block.factor = PowerOfTwo(exponent);
      block.scale = PowerOfTwo(254 - exponent);
      break;
    }
    case QuantizedFormat::kFp8Block128:
      block.scale = (amax > 1e-4f ? amax : 1e-4f) / 448.0f;
      block.factor = block.scale;
      break;
    case QuantizedFormat::kMxfp8: {
      const int exponent = static_cast<int>(std::bit_cast<uint32_t>(amax) >> 23) - 8;
      block.exponent = static_cast<uint8_t>(exponent > 0 ? exponent : 0);
      block.factor = PowerOfTwo(254 - (exponent > 1 ? exponent : 1));
      break;
    }
    case QuantizedFormat::kMxfp8Rceil: {
      const uint32_t bits = std::bit_cast<uint32_t>(amax * (1.0f / 448.0f));
      // A denormal above 2^-127, whose highest mantissa bit is 2^-127, rounds up to 2^-126.
      const uint32_t rest = bits & 0x7fffffu;
      block.exponent = static_cast<uint8_t>((bits >> 23) + (rest > (bits >> 23 ? 0 : 0x400000u)));
      block.factor = PowerOfTwo(254 - block.exponent);
      if (block.exponent == 247) block.largest_code = kE4M3Code240;
      break;
    }
  }
  return block;
}

}  // namespace expertmesh
