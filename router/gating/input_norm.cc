#include "router/gating/input_norm.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/numerics/flush_denormals.h"

namespace expertmesh {
namespace {

// `row`: D values; they are replaced.
KERNEL_NOINLINE KERNEL_FMA void Normalise(const InputNorm& norm, const std::vector<float>& weight,
                                          float* row) {
  float sum = 0.0f;
  for (size_t k = 0; k < weight.size(); ++k) sum = std::fma(row[k], row[k], sum);
  const float mean = sum / static_cast<float>(weight.size());
  const float scale = 1.0f / std::sqrt(mean + norm.epsilon);
  for (size_t k = 0; k < weight.size(); ++k) row[k] = row[k] * scale * weight[k] * norm.factor;
}

}  // namespace

absl::StatusOr<RowNorm> RowNorm::Create(const InputNorm& norm, const Tensor& weight,
                                        int64_t hidden_size) {
  if (weight.dtype() != DType::kF32 || weight.num_elements() != hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat("input_norm: expected F32 [", hidden_size,
                                                   "], got ", NameOf(weight.dtype()), " ",
                                                   ShapeToString(weight.shape())));
  }
  if (!std::isfinite(norm.epsilon) || norm.epsilon < 0.0f || !std::isfinite(norm.factor)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "input_norm: expected a finite epsilon of at least 0 and a finite factor, got ",
        norm.epsilon, " and ", norm.factor));
  }
  RowNorm result;
  result.norm_ = norm;
  result.weight_.assign(weight.as<float>(), weight.as<float>() + hidden_size);
  return result;
}

Tensor RowNorm::Apply(const TensorView& rows, DType dtype) const {
  const int64_t hidden = static_cast<int64_t>(weight_.size());
  const int64_t tokens = rows.shape[0];
  Tensor result(dtype, {tokens, hidden});
  std::vector<float> row(weight_.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < hidden; ++k) {
      row[k] = LoadFloat(rows.dtype, rows.data, t * hidden + k);
    }
    {
      const ScopedFlushDenormals flush;
      Normalise(norm_, weight_, row.data());
    }
    for (int64_t k = 0; k < hidden; ++k) {
      StoreFloat(dtype, result.data(), t * hidden + k, row[k]);
    }
  }
  return result;
}

}  // namespace expertmesh
