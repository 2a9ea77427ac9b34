// Which rows go to which server, and where the results come back: the plan of one round. Pure
// computation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/kernels/isa.h"
#include "common/tensor.h"

namespace expertmesh {

// What one server gets of a round. P positions, R unique rows.
struct ServerSlice {
  int32_t server = 0;               // index chosen by the caller of PlanRound
  std::vector<int32_t> expert_ids;  // global ids with at least one position, ascending
  std::vector<int64_t> m_sizes;     // positions of each, padding included
  std::vector<int32_t> gather;      // [P]: row of each position, or -1 for padding
  std::vector<int64_t> row_tokens;  // [R]: token of each row, ascending
  int64_t num_pairs = 0;            // P without padding: rows that come back
};

// Where the result of one (token, slot) pair comes back.
struct PairResult {
  int32_t slice = 0;  // index in RoundPlan::slices
  int64_t row = 0;    // row of that slice's reply
};

struct RoundPlan {
  std::vector<ServerSlice> slices;  // by server, ascending; servers without rows are left out
  std::vector<PairResult> pairs;    // [T * K]
};

// Plans a round of T tokens: a token's row goes once to each server that needs it, however many of
// its experts live there; positions are grouped by expert, within an expert in token order.
//
// topk_ids: [T, K] row-major; server_of_expert: [E], every entry that is used is at least 0;
// pad_multiple >= 1 pads every expert's group. At most 2^31 - 1 rows a server (INVALID_ARGUMENT).
// Thread-safe.
absl::StatusOr<RoundPlan> PlanRound(absl::Span<const int32_t> topk_ids, int32_t top_k,
                                    absl::Span<const int32_t> server_of_expert,
                                    int64_t pad_multiple);

// The rows [R, D] of a slice, copied from where the round's tokens are: tokens[t] is the hidden
// state of token t, D elements.
Tensor GatherRows(DType dtype, int64_t hidden_size, absl::Span<const std::byte* const> tokens,
                  absl::Span<const int64_t> row_tokens);

// The combine of the bit contract: output[t] = round(sum over slots k of topk_weights[t, k] *
// row(t, k)), as one chain of fused multiply-adds in fp32 in slot order, times routed_scale,
// rounded once.
//
// pairs: [T, K] of a plan; replies: for each slice of the plan its rows [num_pairs, D] in the dtype
// of `output`, or in F32 where that is F16. topk_weights: [T, K]. output: [T, D] F32, BF16 or F16.
void Combine(absl::Span<const PairResult> pairs, absl::Span<const Tensor> replies,
             absl::Span<const float> topk_weights, int32_t top_k, float routed_scale,
             int64_t hidden_size, DType dtype, void* output, Isa isa = BestIsa());

}  // namespace expertmesh
