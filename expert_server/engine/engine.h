// Which implementation computes the experts of a server.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/kernels/isa.h"
#include "expert_server/engine/experts.h"

namespace expertmesh {

enum class EngineKind {
  kGrouped,  // vectorised grouped GEMMs
  kForLoop,  // the plain reference: the same bits, slowly, on one thread a slice
};

// "grouped" or "for_loop"; INVALID_ARGUMENT naming the choices.
absl::StatusOr<EngineKind> ParseEngineKind(const std::string& name);

struct EngineOptions {
  EngineKind kind = EngineKind::kGrouped;
  Isa isa = BestIsa();
  int threads = 1;  // that compute one slice together
};

// Makes the experts of one layer; experts[i] are the weights of local expert i.
using ExpertsFactory = std::function<absl::StatusOr<std::unique_ptr<Experts>>(
    const ExpertDescriptor& descriptor, std::vector<ExpertWeights> experts)>;

// All layers that one factory makes share its threads and its workspace: one slice is computed at a
// time, others wait for it.
ExpertsFactory MakeEngine(const EngineOptions& options);

}  // namespace expertmesh
