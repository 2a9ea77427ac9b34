// The plain reference of the GEMMs, kept for ever: scalar loops in the order of the bit contract,
// sharing nothing with the vector kernels.
#pragma once

#include "common/tensor.h"

namespace expertmesh {

// y[n] = sum over k of x[k] * weights[n, k]: one chain of fp32 fused multiply-adds from +0 for each
// n. F32 weights: k ascending. BF16 and F16 weights: pairs of neighbouring k, the odd one first; an
// odd number of k is padded with a zero product, which turns -0 into +0. x: [K], weights: [N, K],
// y: [N]. Under ScopedFlushDenormals.
void ForLoopMatVec(const float* x, const TensorView& weights, float* y);

}  // namespace expertmesh
