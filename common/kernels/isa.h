// What computes: which implementation, and with which instruction set. All give the same bits.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace expertmesh {

enum class EngineKind {
  kGrouped,  // vectorised grouped GEMMs
  kForLoop,  // the plain reference: scalar loops, on one thread
};

// "grouped" or "for_loop".
const char* NameOf(EngineKind kind);

// The kind with that name; INVALID_ARGUMENT naming the choices.
absl::StatusOr<EngineKind> ParseEngineKind(const std::string& name);

// Instruction sets that the kernels are written for.
enum class Isa {
  kAvx2,        // AVX2, FMA and F16C: vectors of 8 floats
  kAvx512,      // AVX-512 F, BW, VL and DQ: vectors of 16 floats
  kAvx512Bf16,  // the same and AVX512_BF16, whose dot product has twice the rate of fp32's FMA
};

// "avx2", "avx512", "avx512bf16".
const char* NameOf(Isa isa);

// Those that this processor has and that compute as the bit contract says, ascending; never empty
// after InitProcess.
const std::vector<Isa>& SupportedIsas();

// The last of SupportedIsas(); kAvx2 where there is none, which InitProcess refuses.
Isa BestIsa();

// "auto" is BestIsa(). INVALID_ARGUMENT naming the choices for a name that is none, or that this
// processor does not have.
absl::StatusOr<Isa> ParseIsa(const std::string& name);

}  // namespace expertmesh
