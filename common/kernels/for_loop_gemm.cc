#include "common/kernels/for_loop_gemm.h"

#include <cmath>

#include "common/numerics/flush_denormals.h"

namespace expertmesh {
namespace {

// Chains that run side by side, so that the processor need not wait for one addition before the
// next. Each chain keeps its own order, so this changes no bit.
constexpr int64_t kChains = 8;

template <DType kWeights>
KERNEL_NOINLINE KERNEL_FMA void MatVec(const float* x, const void* weights, int64_t rows,
                                       int64_t columns, float* y) {
  for (int64_t n0 = 0; n0 < rows; n0 += kChains) {
    const int64_t chains = rows - n0 < kChains ? rows - n0 : kChains;
    float sum[kChains] = {};
    if constexpr (kWeights == DType::kF32) {
      for (int64_t k = 0; k < columns; ++k) {
        for (int64_t c = 0; c < chains; ++c) {
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, (n0 + c) * columns + k), sum[c]);
        }
      }
    } else {
      for (int64_t k = 0; k + 1 < columns; k += 2) {
        for (int64_t c = 0; c < chains; ++c) {
          const int64_t at = (n0 + c) * columns + k;
          sum[c] = std::fma(x[k + 1], LoadFloat(kWeights, weights, at + 1), sum[c]);
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, at), sum[c]);
        }
      }
      if (columns % 2 == 1) {
        const int64_t k = columns - 1;
        for (int64_t c = 0; c < chains; ++c) {
          sum[c] = std::fma(0.0f, 0.0f, sum[c]);
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, (n0 + c) * columns + k), sum[c]);
        }
      }
    }
    for (int64_t c = 0; c < chains; ++c) y[n0 + c] = sum[c];
  }
}

}  // namespace

void ForLoopMatVec(const float* x, const TensorView& weights, float* y) {
  const int64_t rows = weights.shape[0];
  const int64_t columns = weights.shape[1];
  switch (weights.dtype) {
    case DType::kBF16:
      return MatVec<DType::kBF16>(x, weights.data, rows, columns, y);
    case DType::kF16:
      return MatVec<DType::kF16>(x, weights.data, rows, columns, y);
    default:
      return MatVec<DType::kF32>(x, weights.data, rows, columns, y);
  }
}

}  // namespace expertmesh
