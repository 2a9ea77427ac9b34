#include "router/dispatch/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/numerics/flush_denormals.h"
#include "common/status.h"
#include "router/permutation/permute.h"

namespace expertmesh {
namespace {

// A (token, slot) pair on its way to its server, before permutation.
struct Pair {
  int64_t pair = 0;  // t * K + k
  int32_t row = 0;   // of the server's unique rows
};

// The pairs of one server, collected in token order.
struct Collected {
  std::vector<std::vector<Pair>> by_expert;  // indexed by rank of the expert among the server's
  std::vector<int64_t> row_tokens;
};

}  // namespace

absl::StatusOr<RoundPlan> PlanRound(absl::Span<const int32_t> topk_ids, int32_t top_k,
                                    absl::Span<const int32_t> server_of_expert,
                                    int64_t pad_multiple) {
  const int64_t num_pairs = static_cast<int64_t>(topk_ids.size());
  int32_t num_servers = 0;
  for (const int32_t server : server_of_expert) num_servers = std::max(num_servers, server + 1);

  // Rank of each expert among those of its server, so that a server's counts are dense.
  std::vector<std::vector<int32_t>> experts_of_server(num_servers);
  std::vector<int32_t> rank_of_expert(server_of_expert.size(), -1);
  for (size_t expert = 0; expert < server_of_expert.size(); ++expert) {
    if (server_of_expert[expert] < 0) continue;
    std::vector<int32_t>& experts = experts_of_server[server_of_expert[expert]];
    rank_of_expert[expert] = static_cast<int32_t>(experts.size());
    experts.push_back(static_cast<int32_t>(expert));
  }

  std::vector<Collected> collected(num_servers);
  for (int32_t s = 0; s < num_servers; ++s) {
    collected[s].by_expert.resize(experts_of_server[s].size());
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int32_t expert = topk_ids[pair];
    if (expert < 0 || expert >= static_cast<int32_t>(server_of_expert.size()) ||
        server_of_expert[expert] < 0) {
      return absl::InternalError(absl::StrCat("expert ", expert, " has no server in the plan"));
    }
    Collected& target = collected[server_of_expert[expert]];
    const int64_t token = pair / top_k;
    if (target.row_tokens.empty() || target.row_tokens.back() != token) {
      if (target.row_tokens.size() >= std::numeric_limits<int32_t>::max()) {
        return absl::InvalidArgumentError("hidden_states: more than 2^31 - 1 rows for one server");
      }
      target.row_tokens.push_back(token);
    }
    target.by_expert[rank_of_expert[expert]].push_back(
        {pair, static_cast<int32_t>(target.row_tokens.size() - 1)});
  }

  RoundPlan plan;
  plan.pairs.resize(num_pairs);
  for (int32_t s = 0; s < num_servers; ++s) {
    Collected& source = collected[s];
    if (source.row_tokens.empty()) continue;
    std::vector<int64_t> counts;
    std::vector<Pair> pairs;  // sorted by expert, in token order
    ServerSlice slice;
    slice.server = s;
    for (size_t rank = 0; rank < source.by_expert.size(); ++rank) {
      if (source.by_expert[rank].empty()) continue;  // the empty stay unpadded and unsent
      slice.expert_ids.push_back(experts_of_server[s][rank]);
      counts.push_back(static_cast<int64_t>(source.by_expert[rank].size()));
      pairs.insert(pairs.end(), source.by_expert[rank].begin(), source.by_expert[rank].end());
    }
    ASSIGN_OR_RETURN(
        PermuteIndices permuted,
        GeneratePermuteIndices(counts, static_cast<int64_t>(counts.size()),
                               /*num_ranks=*/1, pad_multiple, EmptyExperts::kZeroRows));
    slice.gather.reserve(permuted.permuted_indices.size());
    for (const int64_t index : permuted.permuted_indices) {
      if (index < 0) {
        slice.gather.push_back(-1);
        continue;
      }
      slice.gather.push_back(pairs[index].row);
      plan.pairs[pairs[index].pair] = {static_cast<int32_t>(plan.slices.size()), slice.num_pairs++};
    }
    slice.m_sizes = std::move(permuted.m_sizes);
    slice.row_tokens = std::move(source.row_tokens);
    plan.slices.push_back(std::move(slice));
  }
  return plan;
}

Tensor GatherRows(const TensorView& hidden_states, absl::Span<const int64_t> row_tokens) {
  const int64_t hidden_size = hidden_states.shape[1];
  Tensor rows(hidden_states.dtype, {static_cast<int64_t>(row_tokens.size()), hidden_size});
  const size_t row_bytes = static_cast<size_t>(hidden_size * BytesOf(hidden_states.dtype));
  const auto* source = static_cast<const std::byte*>(hidden_states.data);
  for (size_t r = 0; r < row_tokens.size(); ++r) {
    std::memcpy(rows.data() + r * row_bytes, source + row_tokens[r] * row_bytes, row_bytes);
  }
  return rows;
}

void Combine(const RoundPlan& plan, absl::Span<const Tensor> replies,
             absl::Span<const float> topk_weights, int32_t top_k, float routed_scale,
             int64_t hidden_size, DType dtype, void* output, Isa isa) {
  const ScopedFlushDenormals flush;
  const Kernels& kernels = KernelsOf(isa);
  const int64_t tokens = static_cast<int64_t>(plan.pairs.size()) / top_k;
  const int64_t row_bytes = hidden_size * BytesOf(ReplyDType(dtype));
  auto* to = static_cast<std::byte*>(output);
  std::vector<const void*> rows(top_k);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int32_t slot = 0; slot < top_k; ++slot) {
      const PairResult& result = plan.pairs[token * top_k + slot];
      rows[slot] = replies[result.slice].data() + result.row * row_bytes;
    }
    kernels.combine(ReplyDType(dtype), rows.data(), &topk_weights[token * top_k], top_k,
                    routed_scale, dtype, hidden_size, to);
    to += hidden_size * BytesOf(dtype);
  }
}

}  // namespace expertmesh
