#include "router/dispatch/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/numerics/flush_denormals.h"
#include "common/status.h"

namespace expertmesh {

RoundSlots AddSharedSlots(absl::Span<const int32_t> topk_ids, int64_t tokens, int32_t top_k,
                          int32_t num_experts, int32_t num_shared,
                          absl::Span<const int32_t> server_of_expert,
                          absl::Span<const int32_t> shared_servers) {
  // Ids: the routed experts; all shared ones of the first of their servers, of the second, ...; one
  // for whatever the router does itself.
  const int64_t holders = num_shared > 0 ? static_cast<int64_t>(shared_servers.size()) : 0;
  const int32_t identity = num_experts + static_cast<int32_t>(holders) * num_shared;
  RoundSlots slots;
  slots.num_experts = num_experts;
  slots.num_shared = num_shared;
  slots.server_of_id.assign(server_of_expert.begin(), server_of_expert.begin() + num_experts);
  for (int64_t h = 0; h < holders; ++h) {
    slots.server_of_id.insert(slots.server_of_id.end(), num_shared, shared_servers[h]);
  }
  slots.server_of_id.push_back(kRouterItself);

  slots.ids.reserve(tokens * (top_k + num_shared));
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t first_server = kNoServer;
    for (const int32_t expert : topk_ids.subspan(t * top_k, top_k)) {
      slots.ids.push_back(expert < num_experts ? expert : identity);
      if (first_server < 0 && expert < num_experts) first_server = server_of_expert[expert];
    }
    if (num_shared == 0) continue;
    const auto found = std::find(shared_servers.begin(), shared_servers.end(), first_server);
    const int64_t holder =
        found != shared_servers.end() ? found - shared_servers.begin() : t * holders / tokens;
    for (int32_t j = 0; j < num_shared; ++j) {
      slots.ids.push_back(num_experts + static_cast<int32_t>(holder) * num_shared + j);
    }
  }
  return slots;
}

absl::StatusOr<RoundPlan> PlanRound(absl::Span<const int32_t> topk_ids, int32_t top_k,
                                    absl::Span<const int32_t> server_of_expert,
                                    int64_t pad_multiple, EmptyExperts empty_experts) {
  const int64_t num_pairs = static_cast<int64_t>(topk_ids.size());
  const int32_t num_experts = static_cast<int32_t>(server_of_expert.size());
  std::vector<int64_t> count(num_experts, 0);  // pairs of each expert
  for (const int32_t expert : topk_ids) {
    if (expert < 0 || expert >= num_experts || server_of_expert[expert] == kNoServer) {
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
    if (server_of_expert[expert] < 0) continue;  // the router itself, or nobody
    const bool add_block = pad_multiple > 1 && empty_experts == EmptyExperts::kOneBlock;
    if (count[expert] == 0 && !add_block) continue;  // unsent
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
    if (server == kRouterItself) {
      plan.pairs[pair].slice = -1;
      continue;
    }
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
    ASSIGN_OR_RETURN(PermuteIndices permuted,
                     GeneratePermuteIndices(counts, static_cast<int64_t>(counts.size()),
                                            /*num_ranks=*/1, pad_multiple, empty_experts));
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

std::vector<std::vector<float>> InputWeights(const RoundPlan& plan, int32_t top_k,
                                             int32_t num_shared,
                                             absl::Span<const float> topk_weights) {
  const int64_t slots = top_k + num_shared;
  std::vector<std::vector<float>> by_row;  // of the replies
  for (const ServerSlice& slice : plan.slices) by_row.emplace_back(slice.num_pairs, 1.0f);
  for (size_t pair = 0; pair < plan.pairs.size(); ++pair) {
    const int64_t token = static_cast<int64_t>(pair) / slots;
    const int64_t slot = static_cast<int64_t>(pair) % slots;
    const PairResult& result = plan.pairs[pair];
    if (slot >= top_k || result.slice < 0) continue;
    by_row[result.slice][result.row] = topk_weights[token * top_k + slot];
  }
  std::vector<std::vector<float>> weights(plan.slices.size());
  for (size_t s = 0; s < weights.size(); ++s) {
    size_t row = 0;
    for (const int32_t source : plan.slices[s].gather) {
      weights[s].push_back(source < 0 ? 1.0f : by_row[s][row++]);
    }
  }
  return weights;
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

void Combine(const CombineInput& input, DType dtype, void* output, Isa isa) {
  const ScopedFlushDenormals flush;
  const Kernels& kernels = KernelsOf(isa);
  const int32_t top_k = input.top_k;
  const int32_t slots = top_k + input.num_shared;
  const int64_t tokens = static_cast<int64_t>(input.pairs.size()) / slots;
  const DType row_dtype = ReplyDType(dtype);
  const int64_t reply_bytes = input.hidden_size * BytesOf(row_dtype);
  const int64_t row_bytes = input.hidden_size * BytesOf(dtype);
  std::vector<const void*> rows(slots);
  std::vector<float> weights(slots, 1.0f);
  std::vector<float> widened;  // the token's own row, where rows are of another dtype
  CombineRows token = {row_dtype,
                       rows.data(),
                       weights.data(),
                       top_k,
                       input.routed_scale,
                       input.num_shared,
                       input.averaged ? 0.5f : 1.0f};
  for (int64_t t = 0; t < tokens; ++t) {
    bool is_widened = false;
    for (int32_t s = 0; s < slots; ++s) {
      const PairResult& result = input.pairs[t * slots + s];
      if (result.slice >= 0) {
        rows[s] = input.replies[result.slice].data() + result.row * reply_bytes;
        continue;
      }
      rows[s] = input.hidden_states + t * row_bytes;
      if (dtype == row_dtype) continue;
      widened.resize(input.hidden_size);
      if (!is_widened) kernels.widen(dtype, rows[s], input.hidden_size, widened.data());
      is_widened = true;
      rows[s] = widened.data();
    }
    for (int32_t s = 0; s < top_k; ++s) {
      const bool weighed = input.input_weighed && input.pairs[t * slots + s].slice >= 0;
      weights[s] = weighed ? 1.0f : input.topk_weights[t * top_k + s];
    }
    if (!input.shared_weights.empty()) {
      std::copy_n(input.shared_weights.begin() + t * input.num_shared, input.num_shared,
                  weights.begin() + top_k);
    }
    kernels.combine(token, dtype, input.hidden_size,
                    static_cast<std::byte*>(output) + t * row_bytes);
  }
}

}  // namespace expertmesh
