// How a weight matrix is stored: formats of fewer than 16 bits are kept as they are and widened
// where they are multiplied.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace expertmesh {

// k that share a scale.
constexpr int64_t kFp8BlockK = 128;
constexpr int64_t kMxBlockK = 32;

// A matrix [N, K] is a tensor of values and, for the quantised formats, one of scales. Scales of
// blocks of rows are repeated for every row, so that rows can be arranged in any way.
enum class WeightFormat {
  kPlain,        // F32, BF16 or F16 [N, K]
  kFp8Block128,  // F8_E4M3 [N, K]; F32 scales [N, ceil(K / 128)]
  kFp8Row,       // F8_E4M3 [N, K]; F32 scales [N, 1]
  // U8 [N, K / 2] (K is even): two e2m1 codes a byte, the even k in the low nibble; U8 scales
  // [N, ceil(K / 32)], exponents as e8m0.
  kMxfp4,
  kMxfp8,  // F8_E4M3 [N, K]; U8 scales [N, ceil(K / 32)], exponents as e8m0
};

// "plain", "fp8_block128", "fp8_row", "mxfp4", "mxfp8".
inline const char* NameOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block128:
      return "fp8_block128";
    case WeightFormat::kFp8Row:
      return "fp8_row";
    case WeightFormat::kMxfp4:
      return "mxfp4";
    case WeightFormat::kMxfp8:
      return "mxfp8";
    case WeightFormat::kPlain:
      break;
  }
  return "plain";
}

// Dtype of the tensor of values for weights whose elements have the dtype `element`.
inline DType StorageDType(DType element) { return element == DType::kF4 ? DType::kU8 : element; }

// Scales of one row of K weights; 0 for kPlain.
inline int64_t ScalesPerRow(WeightFormat format, int64_t k) {
  switch (format) {
    case WeightFormat::kFp8Block128:
      return (k + kFp8BlockK - 1) / kFp8BlockK;
    case WeightFormat::kFp8Row:
      return 1;
    case WeightFormat::kMxfp4:
    case WeightFormat::kMxfp8:
      return (k + kMxBlockK - 1) / kMxBlockK;
    case WeightFormat::kPlain:
      break;
  }
  return 0;
}

// F32, or U8 for kMxfp4 and kMxfp8.
inline DType ScaleDType(WeightFormat format) {
  const bool exponents = format == WeightFormat::kMxfp4 || format == WeightFormat::kMxfp8;
  return exponents ? DType::kU8 : DType::kF32;
}

// Somebody else's matrix.
struct WeightView {
  WeightFormat format = WeightFormat::kPlain;
  TensorView values;
  TensorView scales;  // empty for kPlain

  WeightView() = default;
  WeightView(const TensorView& v) : values(v) {}  // NOLINT: implicit, a plain one
  WeightView(const Tensor& t) : values(t) {}      // NOLINT: the same
  WeightView(WeightFormat f, const TensorView& v, const TensorView& s)
      : format(f), values(v), scales(s) {}

  int64_t n() const { return values.shape[0]; }
  int64_t k() const { return values.shape[1] * (format == WeightFormat::kMxfp4 ? 2 : 1); }
};

}  // namespace expertmesh
