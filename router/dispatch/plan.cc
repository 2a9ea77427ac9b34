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

absl::StatusOr<RoundPlan> PlanRound(absl::Span<const int32_t> topk_ids, int32_t top_k,
                                    absl::Span<const int32_t> server_of_expert,
                                    int64_t pad_multiple) {
  const int64_t num_pairs = static_cast<int64_t>(topk_ids.size());
  const int32_t num_experts = static_cast<int32_t>(server_of_expert.size());
  std::vector<int64_t> count(num_experts, 0);  // pairs of each expert
  for (const int32_t expert : topk_ids) {
    if (expert < 0 || expert >= num_experts || server_of_expert[expert] < 0) {
      return absl::InternalError(absl::StrCat("expert ", expert, " has no server in the plan"));
    }
    ++count[expert];
  }

  // A server's pairs, sorted by expert and within an expert by token, are numbered from 0: these
  // are the rows of its reply. next[e]: number of the next pair of expert e.
  int32_t num_servers = 0;
  for (const int32_t server : server_of_expert) num_servers = std::max(num_servers, server + 1);
  std::vector<ServerSlice> slices(num_servers);
  std::vector<int64_t> next(num_experts, 0);
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    if (count[expert] == 0) continue;  // the empty stay unpadded and unsent
    ServerSlice& slice = slices[server_of_expert[expert]];
    slice.expert_ids.push_back(expert);
    next[expert] = slice.num_pairs;
    slice.num_pairs += count[expert];
  }
  std::vector<int32_t> slice_of_server(num_servers, -1);
  std::vector<int64_t> first_pair(num_servers, 0);  // of the server's pairs in row_of_pair
  int32_t num_slices = 0;
  int64_t before = 0;
  for (int32_t s = 0; s < num_servers; ++s) {
    if (slices[s].num_pairs == 0) continue;
    slices[s].server = s;
    slices[s].row_tokens.reserve(std::min(slices[s].num_pairs, num_pairs / top_k));
    slice_of_server[s] = num_slices++;
    first_pair[s] = before;
    before += slices[s].num_pairs;
  }

  RoundPlan plan;
  plan.pairs.resize(num_pairs);
  std::vector<int32_t> row_of_pair(num_pairs);  // by server, then by number
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t token = pair / top_k;
    const int32_t expert = topk_ids[pair];
    const int32_t server = server_of_expert[expert];
    std::vector<int64_t>& row_tokens = slices[server].row_tokens;
    if (row_tokens.empty() || row_tokens.back() != token) {
      if (row_tokens.size() >= std::numeric_limits<int32_t>::max()) {
        return absl::InvalidArgumentError("hidden_states: more than 2^31 - 1 rows for one server");
      }
      row_tokens.push_back(token);
    }
    const int64_t number = next[expert]++;
    row_of_pair[first_pair[server] + number] = static_cast<int32_t>(row_tokens.size() - 1);
    plan.pairs[pair] = {slice_of_server[server], number};
  }

  std::vector<int64_t> counts;
  for (ServerSlice& slice : slices) {
    if (slice.num_pairs == 0) continue;
    counts.clear();
    for (const int32_t expert : slice.expert_ids) counts.push_back(count[expert]);
    ASSIGN_OR_RETURN(
        PermuteIndices permuted,
        GeneratePermuteIndices(counts, static_cast<int64_t>(counts.size()),
                               /*num_ranks=*/1, pad_multiple, EmptyExperts::kZeroRows));
    const int32_t* const rows = row_of_pair.data() + first_pair[slice.server];
    slice.gather.resize(permuted.permuted_indices.size());
    for (size_t p = 0; p < slice.gather.size(); ++p) {
      const int64_t index = permuted.permuted_indices[p];
      slice.gather[p] = index < 0 ? -1 : rows[index];
    }
    slice.m_sizes = std::move(permuted.m_sizes);
    plan.slices.push_back(std::move(slice));
  }
  return plan;
}

Tensor GatherRows(DType dtype, int64_t hidden_size, absl::Span<const std::byte* const> tokens,
                  absl::Span<const int64_t> row_tokens) {
  Tensor rows(dtype, {static_cast<int64_t>(row_tokens.size()), hidden_size});
  const size_t row_bytes = static_cast<size_t>(hidden_size * BytesOf(dtype));
  for (size_t r = 0; r < row_tokens.size(); ++r) {
    std::memcpy(rows.data() + r * row_bytes, tokens[row_tokens[r]], row_bytes);
  }
  return rows;
}

void Combine(absl::Span<const PairResult> pairs, absl::Span<const Tensor> replies,
             absl::Span<const float> topk_weights, int32_t top_k, float routed_scale,
             int64_t hidden_size, DType dtype, void* output, Isa isa) {
  const ScopedFlushDenormals flush;
  const Kernels& kernels = KernelsOf(isa);
  const int64_t tokens = static_cast<int64_t>(pairs.size()) / top_k;
  const int64_t row_bytes = hidden_size * BytesOf(ReplyDType(dtype));
  auto* to = static_cast<std::byte*>(output);
  std::vector<const void*> rows(top_k);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int32_t slot = 0; slot < top_k; ++slot) {
      const PairResult& result = pairs[token * top_k + slot];
      rows[slot] = replies[result.slice].data() + result.row * row_bytes;
    }
    kernels.combine(ReplyDType(dtype), rows.data(), &topk_weights[token * top_k], top_k,
                    routed_scale, dtype, hidden_size, to);
    to += hidden_size * BytesOf(dtype);
  }
}

}  // namespace expertmesh
