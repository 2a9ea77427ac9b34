// Random data for tests: the same on every machine and in every run.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/tensor.h"
#include "common/weight_format.h"

namespace expertmesh {

// Normally distributed values of that standard deviation, rounded to `dtype` (F32, BF16 or F16).
inline Tensor RandomTensor(DType dtype, std::vector<int64_t> shape, float scale,
                           std::mt19937& rng) {
  Tensor tensor(dtype, std::move(shape));
  std::normal_distribution<float> normal(0, scale);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    StoreFloat(dtype, tensor.data(), i, normal(rng));
  }
  return tensor;
}

// A weight matrix with what it needs of scales.
struct RandomWeights {
  WeightFormat format = WeightFormat::kPlain;
  Tensor values;
  Tensor scales;

  WeightView View() const { return {format, values, scales}; }
};

// A format, and what a weight of it is.
struct WeightType {
  WeightType(DType d) : dtype(d) {}  // NOLINT: implicit, plain weights
  WeightType(WeightFormat f, DType d) : format(f), dtype(d) {}

  // The next number of k that such weights can have.
  int64_t Width(int64_t k) const { return format == WeightFormat::kMxfp4 ? k + k % 2 : k; }

  WeightFormat format = WeightFormat::kPlain;
  DType dtype;
};
inline std::vector<WeightType> AllWeightTypes() {
  return {{WeightFormat::kPlain, DType::kF32},      {WeightFormat::kPlain, DType::kBF16},
          {WeightFormat::kPlain, DType::kF16},      {WeightFormat::kFp8Block128, DType::kF8_E4M3},
          {WeightFormat::kFp8Row, DType::kF8_E4M3}, {WeightFormat::kMxfp4, DType::kF4},
          {WeightFormat::kMxfp8, DType::kF8_E4M3}};
}
inline std::string NameOf(const WeightType& type) {
  return type.format == WeightFormat::kPlain ? NameOf(type.dtype) : NameOf(type.format);
}

// [n, k] weights of about that magnitude (k is even for kMxfp4) and of smaller ones, so that sums
// are rounded; the scales differ from row to row and from block to block, and all codes occur.
inline RandomWeights MakeWeights(const WeightType& type, int64_t n, int64_t k, float scale,
                                 std::mt19937& rng) {
  RandomWeights weights;
  weights.format = type.format;
  if (type.format == WeightFormat::kPlain) {
    weights.values = RandomTensor(type.dtype, {n, k}, scale, rng);
    return weights;
  }
  const bool mxfp4 = type.format == WeightFormat::kMxfp4;
  weights.values = Tensor(StorageDType(type.dtype), {n, mxfp4 ? k / 2 : k});
  for (int64_t i = 0; i < weights.values.num_elements(); ++i) {
    auto code = static_cast<uint8_t>(rng());
    // Of e4m3 often 1/4 to 7.5.
    if (!mxfp4 && rng() % 2 != 0) code = static_cast<uint8_t>((code & 0x80) | (40 + code % 40));
    if (!mxfp4 && IsNaNE4M3(code)) code = 0x7e;
    weights.values.as<uint8_t>()[i] = code;
  }
  weights.scales = Tensor(ScaleDType(type.format), {n, ScalesPerRow(type.format, k)});
  for (int64_t i = 0; i < weights.scales.num_elements(); ++i) {
    if (weights.scales.dtype() == DType::kU8) {
      weights.scales.as<uint8_t>()[i] =
          static_cast<uint8_t>(127 + std::ilogb(scale) - static_cast<int>(rng() % 20));
    } else {
      weights.scales.as<float>()[i] = scale * (0.1f + static_cast<float>(rng() % 1000) / 2000);
    }
  }
  return weights;
}

}  // namespace expertmesh
