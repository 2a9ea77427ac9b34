#include "common/expert_rows.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/numerics/flush_denormals.h"

namespace expertmesh {
namespace {

std::array<float, 256> E4M3Values() {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) values[code] = FloatFromE4M3(static_cast<uint8_t>(code));
  return values;
}

// values[i] = table[codes[i]] * scale, rounded in fp32.
KERNEL_NOINLINE void Scale(const float* table, const uint8_t* codes, float scale, int64_t n,
                           float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = table[codes[i]] * scale;
}

}  // namespace

absl::Status ValidateRows(const ExpertRows& rows) {
  const auto check = [](const char* field, const Tensor& tensor, DType dtype,
                        const std::vector<int64_t>& shape) {
    if (tensor.dtype() == dtype && tensor.shape() == shape) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": expected ", NameOf(dtype), " ", ShapeToString(shape), ", got ",
                     NameOf(tensor.dtype()), " ", ShapeToString(tensor.shape())));
  };
  if (!IsActivationDType(rows.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows.dtype: expected F32, BF16 or F16, got ", NameOf(rows.dtype)));
  }
  if (!rows.format) {
    if (rows.values.dtype() != rows.dtype) {
      return check("rows", rows.values, rows.dtype, rows.values.shape());
    }
    return check("row_scales", rows.scales, DType::kF32, {0});
  }
  if (rows.values.shape().size() != 2 || rows.values.dim(1) < 1) {
    return absl::InvalidArgumentError(absl::StrCat("rows.shape: expected [R, hidden_size], got ",
                                                   ShapeToString(rows.values.shape())));
  }
  if (absl::Status status = check("rows", rows.values, DType::kF8_E4M3, rows.values.shape());
      !status.ok()) {
    return status;
  }
  return check("row_scales", rows.scales, ScaleDType(*rows.format),
               {rows.values.dim(0), ScalesPerRow(*rows.format, rows.values.dim(1))});
}

Tensor DequantizeRows(const ExpertRows& rows) {
  static const std::array<float, 256> kE4M3 = E4M3Values();
  const ScopedFlushDenormals flush;
  const int64_t k = rows.values.dim(1);
  const int64_t channels = ChannelsPerScale(*rows.format, k);
  const int64_t scales_per_row = ScalesPerRow(*rows.format, k);
  const bool exponents = ScaleDType(*rows.format) == DType::kF8_E8M0;
  Tensor plain(rows.dtype, rows.values.shape());
  std::vector<float> values(k);
  for (int64_t r = 0; r < rows.values.dim(0); ++r) {
    const uint8_t* const codes = rows.values.as<uint8_t>() + r * k;
    for (int64_t block = 0; block < scales_per_row; ++block) {
      const int64_t at = r * scales_per_row + block;
      const float scale =
          exponents ? FloatFromE8M0(rows.scales.as<uint8_t>()[at]) : rows.scales.as<float>()[at];
      const int64_t begin = block * channels;
      Scale(kE4M3.data(), codes + begin, scale, std::min(channels, k - begin),
            values.data() + begin);
    }
    for (int64_t i = 0; i < k; ++i) StoreFloat(rows.dtype, plain.data(), r * k + i, values[i]);
  }
  return plain;
}

}  // namespace expertmesh
