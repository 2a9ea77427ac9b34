// The plain reference of quantisation, kept for ever: scalar loops, sharing no more with the vector
// kernels than how amax gives a scale.
#pragma once

#include "common/kernels/quantize.h"

namespace expertmesh {

// As QuantizeRows and QuantizeWeights.
QuantizeCounts ForLoopQuantizeRows(const QuantizeArgs& args);
QuantizeCounts ForLoopQuantizeWeights(const QuantizeArgs& args);

}  // namespace expertmesh
