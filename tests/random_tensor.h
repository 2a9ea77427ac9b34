// Random data for tests: the same on every machine and in every run.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/tensor.h"

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

}  // namespace expertmesh
