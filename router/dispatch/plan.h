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
#include "router/permutation/permute.h"

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

// Instead of a server's index: nobody has the expert; the router gives its result itself.
inline constexpr int32_t kNoServer = -1;
inline constexpr int32_t kRouterItself = -2;

// Where the result of one (token, slot) pair comes back.
struct PairResult {
  int32_t slice = 0;  // index in RoundPlan::slices, or -1: the router has it
  int64_t row = 0;    // row of that slice's reply
};

struct RoundPlan {
  std::vector<ServerSlice> slices;  // by server, ascending; servers without rows are left out
  std::vector<PairResult> pairs;    // [T * K]
};

// What the slots of a round's tokens ask for: the K routed ones of each token, then S shared
// experts.
struct RoundSlots {
  std::vector<int32_t> ids;           // [T, K + S]; an id stands for an expert on one server
  std::vector<int32_t> server_of_id;  // by id; kRouterItself: an expert that returns its input
  int32_t num_experts = 0;            // E: ids below are those of experts
  int32_t num_shared = 0;             // S: from E on they take turns

  // The expert that an id stands for: shared ones are E, E + 1, ...
  int32_t ExpertOf(int32_t id) const {
    return id < num_experts ? id : num_experts + (id - num_experts) % num_shared;
  }
};

// Adds the shared experts. A token's are computed where its first routed slot is that a server
// computes; if there is none, or that server has no shared experts, tokens are split contiguously
// over the servers that do. topk_ids: [T, K], ids from num_experts on are experts that return their
// input; server_of_expert: [E] or more; shared_servers: not empty if num_shared is not 0.
RoundSlots AddSharedSlots(absl::Span<const int32_t> topk_ids, int64_t tokens, int32_t top_k,
                          int32_t num_experts, int32_t num_shared,
                          absl::Span<const int32_t> server_of_expert,
                          absl::Span<const int32_t> shared_servers);

// Plans a round of T tokens: a token's row goes once to each server that needs it, however many of
// its experts live there; positions are grouped by expert, within an expert in token order.
//
// topk_ids: [T, K] row-major, K at least 1; server_of_expert: [E], every entry that is used is at
// least 0, or kRouterItself: such a pair is in no slice; pad_multiple >= 1 pads every expert's
// group, and with kOneBlock the empty groups, too, of servers that have rows. At most 2^31 - 1 rows
// a server (INVALID_ARGUMENT). Thread-safe.
absl::StatusOr<RoundPlan> PlanRound(absl::Span<const int32_t> topk_ids, int32_t top_k,
                                    absl::Span<const int32_t> server_of_expert,
                                    int64_t pad_multiple,
                                    EmptyExperts empty_experts = EmptyExperts::kZeroRows);

// By slice, for each position what its row is weighed by: the topk_weights of its slot, 1 for
// shared slots and for padding. pairs, [T, K + S], and slices are those of a plan; topk_weights:
// [T, K].
std::vector<std::vector<float>> InputWeights(const RoundPlan& plan, int32_t top_k,
                                             int32_t num_shared,
                                             absl::Span<const float> topk_weights);

// The rows [R, D] of a slice, copied from where the round's tokens are: tokens[t] is the hidden
// state of token t, D elements.
Tensor GatherRows(DType dtype, int64_t hidden_size, absl::Span<const std::byte* const> tokens,
                  absl::Span<const int64_t> row_tokens);

// What is combined: T tokens of K routed and S shared slots.
struct CombineInput {
  absl::Span<const PairResult> pairs;  // [T, K + S] of a plan
  // For each slice of the plan its rows [num_pairs, D] in the dtype of the output, or in F32 where
  // that is F16.
  absl::Span<const Tensor> replies;
  absl::Span<const float> topk_weights;    // [T, K]
  absl::Span<const float> shared_weights;  // [T, S]; empty: all are 1
  // [T, D] in the dtype of the output: the rows of pairs that no server computes.
  const std::byte* hidden_states = nullptr;
  int32_t top_k = 0;       // K
  int32_t num_shared = 0;  // S
  float routed_scale = 1.0f;
  bool averaged = false;
  bool input_weighed = false;  // by topk_weights: the rows of servers count once
  int64_t hidden_size = 0;     // D
};

// The combine of the bit contract: a chain of fused multiply-adds in fp32 from +0 over the routed
// slots in their order, acc = fma(topk_weights[t, k], row(t, k), acc), or fma(1, row, acc) if the
// server has weighed its input; times routed_scale unless
// that is 1; the chain goes on over the shared slots; times 1/2 if averaged; rounded once.
// output: [T, D] F32, BF16 or F16.
void Combine(const CombineInput& input, DType dtype, void* output, Isa isa = BestIsa());

}  // namespace expertmesh
