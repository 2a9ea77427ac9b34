// The plain reference of the GEMMs, kept for ever: scalar loops in the order of the bit contract,
// sharing nothing with the vector kernels.
#pragma once

#include "common/weight_format.h"

namespace expertmesh {

// y[n] = sum over k of x[k] * weights[n, k], each n a chain of fp32 fused multiply-adds from +0.
// F32 weights: k ascending. All others: pairs of neighbouring k, the odd one first, padded with
// zero products (which turn -0 into +0) to a multiple of 2 k (BF16, F16), 4 (fp8, MXFP8) or 8
// (MXFP4). kFp8Block128: one chain of the unscaled codes per 128 k, then y = fma(chain, scale, y)
// from +0, blocks ascending. kFp8Row: one chain of the unscaled codes, then y = chain * scale.
// kMxfp4, kMxfp8: the chain of FloatFromMxfp4 or FloatFromMxfp8. x: [K], weights: [N, K], y: [N].
// x_scales, of the fp8 formats, where x is what codes stand for: [1] for kFp8Row, [ceil(K / 128)]
// for kFp8Block128; then `scale` is that of the weights times that of x, rounded once. Under
// ScopedFlushDenormals.
void ForLoopMatVec(const float* x, const WeightView& weights, float* y,
                   const float* x_scales = nullptr);

}  // namespace expertmesh
