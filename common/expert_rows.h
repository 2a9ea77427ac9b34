// Rows on their way from a router to experts: as the request has them, or quantised.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "common/quantized_format.h"
#include "common/tensor.h"

namespace expertmesh {

struct ExpertRows {
  ExpertRows() = default;
  ExpertRows(Tensor rows) : dtype(rows.dtype()), values(std::move(rows)) {}  // NOLINT: implicit

  DType dtype = DType::kF32;                 // A, the dtype of the request
  Tensor values;                             // [R, D] of A; F8_E4M3 codes where there is a format
  std::optional<QuantizedFormat> format;     // of codes and scales
  Tensor scales = Tensor(DType::kF32, {0});  // ScaleDType [R, ScalesPerRow]; [0] without a format

  int64_t num_bytes() const {
    return static_cast<int64_t>(values.num_bytes() + scales.num_bytes());
  }
};

// Checks that dtypes and shapes fit together. INVALID_ARGUMENT naming the field, the expected and
// the given value.
absl::Status ValidateRows(const ExpertRows& rows);

// round_A(code * scale): the rows that quantised ones stand for, in their dtype A. They have passed
// ValidateRows.
Tensor DequantizeRows(const ExpertRows& rows);

}  // namespace expertmesh
