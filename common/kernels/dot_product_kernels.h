// The one instruction that Highway lacks: AVX512_BF16's dot product of pairs.
#pragma once

#include "common/kernels/kernels.h"

namespace expertmesh {

// Sets the kernels of bf16 rows; those of fp8 weights only where the processor also has
// AVX512_VBMI, by which they are widened. To be called only where Isa::kAvx512Bf16 is supported.
void AddDotProductKernels(Kernels* kernels);

// True if the instruction, which is there, adds the product of the odd elements first, each rounded
// once, with denormals as zero: what the bit contract relies on.
bool DotProductHasContractOrder();

}  // namespace expertmesh
