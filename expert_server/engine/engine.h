// Makes the experts of a server's layers by the implementation that options name.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/kernels/isa.h"
#include "expert_server/engine/experts.h"

namespace expertmesh {

struct EngineOptions {
  EngineKind kind = EngineKind::kGrouped;
  Isa isa = BestIsa();
  int threads = 1;  // that compute one slice together; kForLoop has one
};

// Makes the experts of one layer, without their weights yet.
using ExpertsFactory = std::function<absl::StatusOr<std::unique_ptr<Experts>>(
    const ExpertDescriptor& descriptor, int64_t num_experts)>;

// All layers that one factory makes share its threads and its workspace: one slice is computed at a
// time, others wait for it.
ExpertsFactory MakeEngine(const EngineOptions& options);

}  // namespace expertmesh
