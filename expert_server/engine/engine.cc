#include "expert_server/engine/engine.h"

#include "expert_server/engine/cpu/for_loop_experts.h"
#include "expert_server/engine/cpu/grouped_experts.h"

namespace expertmesh {

ExpertsFactory MakeEngine(const EngineOptions& options) {
  if (options.kind == EngineKind::kForLoop) return MakeForLoopExperts;
  auto context = std::make_shared<GroupedContext>(options.isa, options.threads);
  return [context](const ExpertDescriptor& descriptor, int64_t num_experts) {
    return MakeGroupedExperts(descriptor, num_experts, context);
  };
}

}  // namespace expertmesh
