// The plain reference of the experts, kept for ever.
#pragma once

#include "expert_server/engine/experts.h"

namespace expertmesh {

// Scalar loops in the order of the bit contract, on the caller's thread. Errors of CheckComputed.
absl::StatusOr<std::unique_ptr<Experts>> MakeForLoopExperts(const ExpertDescriptor& descriptor,
                                                            int64_t num_experts);

}  // namespace expertmesh
