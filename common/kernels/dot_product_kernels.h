// The one instruction that Highway lacks: AVX512_BF16's dot product of pairs.
#pragma once

#include "common/kernels/kernels.h"

namespace expertmesh {

// Tiles of BF16 weights and bf16 rows. To be called only where Isa::kAvx512Bf16 is supported.
TileKernels MakeDotProductTiles();

// True if the instruction, which is there, adds the product of the odd elements first, each rounded
// once, with denormals as zero: what the bit contract relies on.
bool DotProductHasContractOrder();

}  // namespace expertmesh
