// Quantisation of rows and of weights by vector kernels. common/numerics/quantize.h has the
// arithmetic; for_loop_quantize.h is the plain reference, with the same bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/kernels/isa.h"
#include "common/quantized_format.h"

namespace expertmesh {

// A matrix to quantise and where to put what comes of it; all memory is the caller's, dense and row
// after row.
struct QuantizeArgs {
  QuantizedFormat format = QuantizedFormat::kFp8Rowwise;
  DType dtype = DType::kF32;     // of the values: F32, BF16 or F16
  const void* values = nullptr;  // [rows, k], finite
  int64_t rows = 0;
  int64_t k = 0;
  uint8_t* codes = nullptr;  // e4m3 [rows, k]
  void* scales = nullptr;    // ScaleDType(format) [rows, ScalesPerRow(format, k)]
};

struct QuantizeCounts {
  int64_t saturated_values = 0;  // nearer to a code beyond the largest one, had there been more
  int64_t saturated_rows = 0;    // those with such values
  int64_t zero_rows = 0;         // all zeros

  QuantizeCounts& operator+=(const QuantizeCounts& other) {
    saturated_values += other.saturated_values;
    saturated_rows += other.saturated_rows;
    zero_rows += other.zero_rows;
    return *this;
  }
};

// Rows of activations: codes and scales of a row depend on that row alone, so that any part of the
// rows can be a call of its own. Allocates nothing; thread-safe, on one thread; with FTZ and DAZ or
// without. `isa` is one of SupportedIsas().
QuantizeCounts QuantizeRows(Isa isa, const QuantizeArgs& args);

// Weights [n, k], the rows being output channels: the same, but that kFp8Block128 has blocks of 128
// rows too, counted from the first one, whose scales are repeated for every row: what
// WeightFormat::kFp8Block128 wants. A call of its own begins at a multiple of 128 rows.
QuantizeCounts QuantizeWeights(Isa isa, const QuantizeArgs& args);

// Rows that share a scale in QuantizeWeights.
constexpr int64_t kFp8BlockRows = 128;
constexpr int64_t WeightRowsPerScale(QuantizedFormat format) {
  return format == QuantizedFormat::kFp8Block128 ? kFp8BlockRows : 1;
}

}  // namespace expertmesh
