// The formats of low precision that rows of activations and of weights are quantised to: e4m3 codes
// and the scales that dequantise them, value = code * scale.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/weight_format.h"

namespace expertmesh {

// Rows [rows, k] become F8_E4M3 codes [rows, k] and scales [rows, ScalesPerRow]. A last block of
// fewer channels has a scale of its own.
enum class QuantizedFormat {
  kFp8Rowwise,   // one F32 scale, a power of two, for a row
  kFp8Block128,  // an F32 scale for 128 channels of a row; of weights, for 128 x 128
  kMxfp8,        // an e8m0 exponent for 32 channels, rounded down as OCP has it
  kMxfp8Rceil,   // the same, rounded up as cuBLAS has it
};

// "fp8_rowwise", "fp8_block128", "mxfp8", "mxfp8_rceil".
inline const char* NameOf(QuantizedFormat format) {
  switch (format) {
    case QuantizedFormat::kFp8Rowwise:
      return "fp8_rowwise";
    case QuantizedFormat::kFp8Block128:
      return "fp8_block128";
    case QuantizedFormat::kMxfp8:
      return "mxfp8";
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return "mxfp8_rceil";
}

// Neighbouring channels of a row of k that share a scale.
constexpr int64_t ChannelsPerScale(QuantizedFormat format, int64_t k) {
  switch (format) {
    case QuantizedFormat::kFp8Rowwise:
      return k;
    case QuantizedFormat::kFp8Block128:
      return kFp8BlockK;
    case QuantizedFormat::kMxfp8:
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return kMxBlockK;
}

// Scales of one row of k > 0 channels.
constexpr int64_t ScalesPerRow(QuantizedFormat format, int64_t k) {
  const int64_t channels = ChannelsPerScale(format, k);
  return (k + channels - 1) / channels;
}

// What weights quantised so are.
constexpr WeightFormat WeightFormatOf(QuantizedFormat format) {
  switch (format) {
    case QuantizedFormat::kFp8Rowwise:
      return WeightFormat::kFp8Row;
    case QuantizedFormat::kFp8Block128:
      return WeightFormat::kFp8Block128;
    case QuantizedFormat::kMxfp8:
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return WeightFormat::kMxfp8;
}

// What the rows of every expert are padded to a multiple of.
constexpr int64_t PadMultipleOf(QuantizedFormat format) {
  switch (format) {
    case QuantizedFormat::kFp8Rowwise:
      return 16;
    case QuantizedFormat::kFp8Block128:
      return 128;
    case QuantizedFormat::kMxfp8:
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return 32;
}

// F32 or F8_E8M0.
constexpr DType ScaleDType(QuantizedFormat format) {
  const bool exponents =
      format == QuantizedFormat::kMxfp8 || format == QuantizedFormat::kMxfp8Rceil;
  return exponents ? DType::kF8_E8M0 : DType::kF32;
}

}  // namespace expertmesh
