#include "expert_server/engine/engine.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<EngineKind> ParseEngineKind(const std::string& name) {
  if (name == "grouped") return EngineKind::kGrouped;
  if (name == "for_loop") return EngineKind::kForLoop;
  return absl::InvalidArgumentError(
      absl::StrCat("engine: expected grouped or for_loop, got \"", name, "\""));
}

ExpertsFactory MakeEngine(const EngineOptions& options) {
  (void)options;
  return MakeForLoopExperts;
}

}  // namespace expertmesh
