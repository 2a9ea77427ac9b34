// The gate: which experts a token goes to, and with what weight.
//
// Everything is computed in fp32 with FTZ and DAZ, each operation rounded, so that the result of a
// token has the same bits on every machine and does not depend on the other tokens of the batch.
// The families' formulas are tests/golden/make_gating_golden.py.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/kernels/isa.h"
#include "common/kernels/packed_weights.h"
#include "common/model/checkpoint.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

// Below, N = num_experts + identity_experts of the descriptor: the ids that can be selected, one
// logit each.

// Routing of T tokens.
struct Routing {
  Tensor topk_ids;      // I32 [T, K], distinct ids of a token in slot order
  Tensor topk_weights;  // F32 [T, K]
  Tensor logits;        // F32 [T, N], logits bias added, before the soft cap
};

// Selects experts from logits. Pure; thread-safe; sets the floating-point environment itself.
//
// logits: fp32 [T, N] row-major, T from its length; biases and per_expert_scale: fp32 [N] where the
// descriptor has them, else empty. Writes topk_ids and topk_weights [T, K]; slots are ordered by
// descending selection score, ties by the lower id. The descriptor has passed ValidateRouter.
// INVALID_ARGUMENT if a length does not fit, or naming the logits (by logits_name) and the first
// row where they are not finite; nothing is promised about the outputs then.
//
// The order of operations, per token: a softmax subtracts the maximum, sums in ascending id over
// all ids (in slot order over the selected ones) and divides; a sigmoid is 1 / (1 + Exp(-z)); the
// renormalisation sums in slot order, divides, and then come scale and per-expert scale. Where the
// descriptor's norm_epsilon is 0 it is taken as 1e-20, which changes no sum that a softmax can give
// and keeps the weights finite where every selected score underflows.
//
// The sparsemixer's slots are the best two logits. With m the slot's logit, its weight is 1 / sum
// of Exp(z_i - m), in ascending id over the ids not chosen before whose distance
// (m - z_i) / max(|z_i|, m) does not exceed 2 jitter; 0 / 0 does not exceed it.
absl::Status SelectExperts(const RouterDescriptor& router, absl::Span<const float> logits,
                           absl::Span<const float> selection_bias,
                           absl::Span<const float> per_expert_scale, absl::Span<int32_t> topk_ids,
                           absl::Span<float> topk_weights, int64_t first_row = 0,
                           const char* logits_name = "router logits");

// Refuses descriptors that cannot be computed. INVALID_ARGUMENT: N < 1, K < 1 or K > N, N not
// divisible by the groups, topk_groups outside [1, num_groups], K > topk_groups * N / num_groups,
// groups of one expert with top-2 group scores, scales or epsilons that are not finite; with the
// sparsemixer K other than 2, a selection bias or groups. UNIMPLEMENTED naming the feature: what
// SelectExperts does not compute, which is norms with p other than 1 and 2. The group fields are
// not looked at where there is no group score.
absl::Status ValidateRouter(const RouterDescriptor& router);

// The gate of one layer. Immutable; Route may be called concurrently.
class Gate {
 public:
  // Takes the weights, rearranged for the kernels; `kind` and `isa` choose who computes the logits,
  // and change no bit. INVALID_ARGUMENT naming the tensor whose shape or dtype does not fit the
  // descriptor; what ValidateRouter refuses.
  static absl::StatusOr<Gate> Create(const RouterDescriptor& router, RouterWeights weights,
                                     EngineKind kind = EngineKind::kGrouped, Isa isa = BestIsa());

  // hidden_states: F32, BF16 or F16 [T, D], normalised already where the descriptor has an
  // input_norm (see RowNorm); first_row, logits_name: what row 0 and the logits are called in error
  // texts.
  // INVALID_ARGUMENT naming the first row with a hidden state or a logit that is not finite, or a
  // shape or dtype that does not fit.
  //
  // A logit is one chain of fused multiply-adds from +0, over pairs of neighbouring k, the odd one
  // first, for BF16 and F16 weights (K padded with zeros to a multiple of 2), over ascending k for
  // F32 weights; then the logits bias is added.
  absl::StatusOr<Routing> Route(const TensorView& hidden_states, int64_t first_row = 0,
                                const char* logits_name = "router logits") const;

  // D of the hidden states.
  int64_t hidden_size() const { return hidden_size_; }

 private:
  Gate() = default;

  // logits: [rows, N]; the rows are finite.
  void ComputeLogits(const TensorView& hidden_states, int64_t rows, float* logits) const;

  RouterDescriptor router_;
  int64_t hidden_size_ = 0;
  EngineKind kind_ = EngineKind::kGrouped;
  Isa isa_ = Isa::kAvx2;
  PackedWeights packed_;                 // [N, D], unless kForLoop
  Tensor weight_;                        // [N, D] where kForLoop
  std::vector<float> logits_bias_;       // [N] or empty
  std::vector<float> selection_bias_;    // [N] or empty
  std::vector<float> per_expert_scale_;  // [N] or empty
};

}  // namespace expertmesh
