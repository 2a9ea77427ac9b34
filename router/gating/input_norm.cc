#include "router/gating/input_norm.h"

#include <cmath>

#include "common/dtype.h"
#include "common/numerics/flush_denormals.h"

namespace expertmesh {
namespace {

// Normalises a row in place; see RmsNorm::Apply.
KERNEL_FMA KERNEL_NOINLINE void NormaliseRow(const InputNorm& norm,
                                             const std::vector<float>& weight, float* x) {
  constexpr size_t kChains = 8;
  const size_t size = weight.size();
  float s[kChains] = {};
  size_t k = 0;
  for (; k + kChains <= size; k += kChains) {
    for (size_t j = 0; j < kChains; ++j) s[j] = std::fma(x[k + j], x[k + j], s[j]);
  }
  for (size_t j = 0; k + j < size; ++j) s[j] = std::fma(x[k + j], x[k + j], s[j]);
  const float sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  const float r = 1.0f / std::sqrt(sum / static_cast<float>(size) + norm.epsilon);
  for (size_t i = 0; i < size; ++i) x[i] = x[i] * r * weight[i] * norm.factor;
}

}  // namespace

absl::StatusOr<RmsNorm> RmsNorm::Create(const InputNorm& norm, const char* name,
                                        int64_t hidden_size, const Tensor& weight) {
  const std::vector<int64_t> expected = {norm.present ? hidden_size : 0};
  if (weight.dtype() != DType::kF32 || weight.shape() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must be F32 ", ShapeToString(expected),
                                                   ", got ", NameOf(weight.dtype()), " ",
                                                   ShapeToString(weight.shape())));
  }
  RmsNorm result;
  if (!norm.present) return result;
  // With an epsilon, a row of zeros stays one.
  if (!std::isfinite(norm.epsilon) || norm.epsilon <= 0.0f || !std::isfinite(norm.factor)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": epsilon must be finite and positive, the factor finite, got ",
                     norm.epsilon, " and ", norm.factor));
  }
  result.norm_ = norm;
  result.weight_.assign(weight.as<float>(), weight.as<float>() + hidden_size);
  for (size_t i = 0; i < result.weight_.size(); ++i) {
    if (!std::isfinite(result.weight_[i])) {
      return absl::InvalidArgumentError(absl::StrCat(name, "[", i, "] is not finite"));
    }
  }
  return result;
}

Tensor RmsNorm::Apply(const TensorView& x, int64_t rows, DType out) const {
  const int64_t size = static_cast<int64_t>(weight_.size());
  Tensor result(out, {x.shape[0], size});
  std::vector<float> row(weight_.size());
  const ScopedFlushDenormals flush;
  for (int64_t first = 0; first < rows * size; first += size) {
    for (int64_t k = 0; k < size; ++k) {
      row[static_cast<size_t>(k)] = LoadFloat(x.dtype, x.data, first + k);
    }
    NormaliseRow(norm_, weight_, row.data());
    for (int64_t k = 0; k < size; ++k) {
      StoreFloat(out, result.data(), first + k, row[static_cast<size_t>(k)]);
    }
  }
  return result;
}

}  // namespace expertmesh
