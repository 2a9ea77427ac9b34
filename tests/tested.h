// What tests run over. ThreadSanitizer makes everything many times slower and looks for races
// alone: there it is one instruction set, one dtype, and more than one thread.
#pragma once

#include <vector>

#include "common/dtype.h"
#include "common/kernels/isa.h"

namespace expertmesh {

#ifdef __SANITIZE_THREAD__
inline std::vector<Isa> TestedIsas() { return {BestIsa()}; }
inline std::vector<int> TestedThreads() { return {2}; }
inline std::vector<DType> TestedDTypes() { return {DType::kBF16}; }
#else
inline std::vector<Isa> TestedIsas() { return SupportedIsas(); }
inline std::vector<int> TestedThreads() { return {1, 2}; }
inline std::vector<DType> TestedDTypes() { return {DType::kF32, DType::kBF16, DType::kF16}; }
#endif

}  // namespace expertmesh
