// What does not depend on the routed experts: the weights of shared experts, and the routing of a
// layer that has no others.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/kernels/isa.h"
#include "common/tensor.h"
#include "router/gating/gate.h"

namespace expertmesh {

// The sigmoid gate of a layer's S shared experts. Immutable; Weigh may be called concurrently.
class SharedGate {
 public:
  // weight: F32, BF16 or F16 [S, D]. `kind` and `isa` choose who computes the logits, and change no
  // bit. INVALID_ARGUMENT naming the tensor if it does not fit.
  static absl::StatusOr<SharedGate> Create(Tensor weight, int32_t num_shared,
                                           EngineKind kind = EngineKind::kGrouped,
                                           Isa isa = BestIsa());

  // F32 [T, S]: 1 / (1 + Exp(-z)) of the logits z, which are chains as the gate's. Errors of
  // Gate::Route, of "shared_gate logits".
  absl::StatusOr<Tensor> Weigh(const TensorView& hidden_states, int64_t first_row = 0) const;

 private:
  explicit SharedGate(Gate logits) : logits_(std::move(logits)) {}

  Gate logits_;
};

// The routing of T tokens where there is nothing to choose from: all [T, 0]. Errors of Gate::Route.
absl::StatusOr<Routing> RouteNowhere(const TensorView& hidden_states, int64_t hidden_size,
                                     int64_t first_row = 0, Isa isa = BestIsa());

}  // namespace expertmesh
