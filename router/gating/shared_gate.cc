#include "router/gating/shared_gate.h"

#include <utility>

#include "common/kernels/kernels.h"
#include "common/numerics/flush_denormals.h"
#include "common/numerics/math.h"
#include "common/status.h"

namespace expertmesh {
namespace {

KERNEL_NOINLINE KERNEL_FMA void Sigmoids(int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = Sigmoid(values[i]);
}

}  // namespace

absl::StatusOr<SharedGate> SharedGate::Create(Tensor weight, int32_t num_shared, EngineKind kind,
                                              Isa isa) {
  // A gate whose logits are all that is used of it.
  RouterDescriptor router;
  router.num_experts = num_shared;
  router.top_k = 1;
  router.score = ScoreFunction::kSigmoid;
  RouterWeights weights;
  weights.weight = std::move(weight);
  absl::StatusOr<Gate> logits = Gate::Create(router, std::move(weights), kind, isa);
  if (!logits.ok()) {
    return absl::Status(logits.status().code(),
                        absl::StrCat("shared_gate: ", std::string(logits.status().message())));
  }
  return SharedGate(*std::move(logits));
}

absl::StatusOr<Tensor> SharedGate::Weigh(const TensorView& hidden_states, int64_t first_row) const {
  ASSIGN_OR_RETURN(Routing routing, logits_.Route(hidden_states, first_row, "shared_gate logits"));
  Tensor& weights = routing.logits;
  const ScopedFlushDenormals flush;
  Sigmoids(weights.num_elements(), weights.as<float>());
  return weights;
}

absl::StatusOr<Routing> RouteNowhere(const TensorView& hidden_states, int64_t hidden_size,
                                     int64_t first_row, Isa isa) {
  const int64_t tokens = hidden_states.shape[0];
  const int64_t bad_value =
      KernelsOf(isa).find_not_finite(hidden_states.dtype, hidden_states.data, tokens * hidden_size);
  if (bad_value >= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_states: row ", first_row + bad_value / hidden_size,
                     " is not finite at column ", bad_value % hidden_size));
  }
  return Routing{Tensor(DType::kI32, {tokens, 0}), Tensor(DType::kF32, {tokens, 0}),
                 Tensor(DType::kF32, {tokens, 0})};
}

}  // namespace expertmesh
