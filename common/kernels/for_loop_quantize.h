// The plain reference of quantisation, kept for ever: scalar loops, sharing no more with the vector
// kernels than how amax gives a scale.
#pragma once

#include "common/kernels/quantize.h"

namespace expertmesh {

// As QuantizeRows and QuantizeWeights.
QuantizeCounts ForLoopQuantizeRows(const QuantizeArgs& args);
QuantizeCounts ForLoopQuantizeWeights(const QuantizeArgs& args);

// What a GEMM reads of a quantised row of k channels: FloatFromMxfp8 where the format's scales are
// exponents (`scales`, e8m0), and the codes' values where they are factors, which are applied to
// sums (ForLoopMatVec's x_scales). values: [k]. With denormals flushed or not.
void ForLoopDequantizeRow(QuantizedFormat format, const uint8_t* codes, const void* scales,
                          int64_t k, float* values);

}  // namespace expertmesh
