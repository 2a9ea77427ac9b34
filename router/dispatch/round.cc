#include "router/dispatch/round.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "common/text.h"

namespace expertmesh {

absl::Span<const int32_t> Round::Part::topk_ids() const {
  const Tensor& ids = call->result.routing.topk_ids;
  const int64_t top_k = ids.dim(1);
  return absl::MakeSpan(ids.as<int32_t>() + begin * top_k, static_cast<size_t>(tokens * top_k));
}

absl::StatusOr<std::vector<ExpertSlice>> PlanSlices(const LayerDescription& layer,
                                                    const LayerPlacement& placement, Round* round) {
  const int64_t hidden_size = layer.experts.hidden_size;
  const bool weigh_input = layer.router.weigh_input;
  std::vector<int32_t> topk_ids;
  std::vector<float> topk_weights;       // where they go to the servers
  std::vector<const std::byte*> tokens;  // of the round: where each is
  std::vector<size_t> part_of_token;
  DType dtype = DType::kF32;
  absl::Time deadline = absl::InfinitePast();
  for (size_t p = 0; p < round->parts.size(); ++p) {
    Round::Part& part = round->parts[p];
    if (part.closed) continue;
    const Tensor& rows = part.call->call.hidden_states;
    dtype = rows.dtype();
    deadline = std::max(deadline, part.call->call.deadline);
    part.offset = static_cast<int64_t>(tokens.size());
    const absl::Span<const int32_t> ids = part.topk_ids();
    topk_ids.insert(topk_ids.end(), ids.begin(), ids.end());
    if (weigh_input) {
      const float* const weights = part.call->result.routing.topk_weights.as<float>();
      const float* const first = weights + part.begin * layer.router.top_k;
      topk_weights.insert(topk_weights.end(), first, first + ids.size());
    }
    const int64_t row_bytes = hidden_size * BytesOf(dtype);
    for (int64_t t = 0; t < part.tokens; ++t) {
      tokens.push_back(rows.data() + (part.begin + t) * row_bytes);
    }
    part_of_token.resize(tokens.size(), p);
  }
  const int32_t top_k = layer.router.top_k;
  if (layer.shared.count == 0 && layer.router.identity_experts == 0) {
    ASSIGN_OR_RETURN(round->plan, PlanRound(topk_ids, top_k, placement.server_of_expert,
                                            /*pad_multiple=*/1));
  } else {
    const RoundSlots slots = AddSharedSlots(topk_ids, static_cast<int64_t>(tokens.size()), top_k,
                                            layer.router.num_experts, layer.shared.count,
                                            placement.server_of_expert, placement.shared_servers);
    ASSIGN_OR_RETURN(round->plan, PlanRound(slots.ids, top_k + layer.shared.count,
                                            slots.server_of_id, /*pad_multiple=*/1));
    for (ServerSlice& slice : round->plan.slices) {
      for (int32_t& id : slice.expert_ids) id = slots.ExpertOf(id);
    }
  }
  std::vector<std::vector<float>> input_weights;
  if (weigh_input) {
    input_weights = InputWeights(round->plan, top_k, layer.shared.count, topk_weights);
  }
  round->planned = absl::Now();
  std::vector<ExpertSlice> dispatched;
  for (ServerSlice& source : round->plan.slices) {
    Round::Slice slice;
    slice.backend = placement.backends[source.server];
    slice.expert_ids = source.expert_ids;
    slice.reply_shape = {source.num_pairs, hidden_size};
    for (const int64_t token : source.row_tokens) {
      const size_t p = part_of_token[token];
      if (!slice.parts.empty() && slice.parts.back() == p) continue;
      slice.parts.push_back(p);
      ++round->parts[p].missing;
    }
    round->slices.push_back(std::move(slice));
    ExpertSlice out;
    out.layer = layer.layer;
    out.placement_epoch = placement.epoch;
    out.rows = GatherRows(dtype, hidden_size, tokens, source.row_tokens);
    out.expert_ids = std::move(source.expert_ids);
    out.m_sizes = std::move(source.m_sizes);
    out.gather = std::move(source.gather);
    if (weigh_input) out.input_weights = std::move(input_weights[dispatched.size()]);
    out.deadline = deadline;
    dispatched.push_back(std::move(out));
  }
  round->replies.resize(round->slices.size());
  return dispatched;
}

void CombinePart(const LayerDescription& layer, const Round& round, const Round::Part& part,
                 Isa isa) {
  const int64_t top_k = layer.router.top_k;
  const int64_t num_shared = layer.shared.count;
  BatchedCall& call = *part.call;
  Tensor& output = call.result.output;
  const int64_t row_bytes = layer.experts.hidden_size * BytesOf(output.dtype());
  const auto rows = [&part](const Tensor& tensor, int64_t width) {
    return absl::MakeConstSpan(tensor.as<float>() + part.begin * width,
                               static_cast<size_t>(part.tokens * width));
  };
  CombineInput input;
  input.pairs =
      absl::MakeConstSpan(round.plan.pairs)
          .subspan(part.offset * (top_k + num_shared), part.tokens * (top_k + num_shared));
  input.replies = round.replies;
  input.topk_weights = rows(call.result.routing.topk_weights, top_k);
  if (call.shared_weights.num_elements() > 0) {
    input.shared_weights = rows(call.shared_weights, num_shared);
  }
  input.hidden_states = call.call.hidden_states.data() + part.begin * row_bytes;
  input.top_k = layer.router.top_k;
  input.num_shared = layer.shared.count;
  input.routed_scale = layer.router.routed_scale;
  input.averaged = layer.shared.averaged;
  input.input_weighed = layer.router.weigh_input;
  input.hidden_size = layer.experts.hidden_size;
  Combine(input, output.dtype(), output.data() + part.begin * row_bytes, isa);
}

absl::Status DescribeFailure(const LayerDescription& layer, const Round::Part& part,
                             const Round::Slice& slice) {
  if (!absl::IsUnavailable(slice.failure)) return slice.failure;
  const absl::Span<const int32_t> ids = part.topk_ids();
  const auto first_shared =
      std::lower_bound(slice.expert_ids.begin(), slice.expert_ids.end(), layer.router.num_experts);
  std::vector<int32_t> lost;
  std::copy_if(slice.expert_ids.begin(), first_shared, std::back_inserter(lost),
               [&ids](int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); });
  if (lost.empty()) lost.assign(first_shared, slice.expert_ids.end());
  return absl::UnavailableError(absl::StrCat("layer ", layer.layer, ": lost the server of expert",
                                             lost.size() == 1 ? " " : "s ", IdRanges(lost), ": ",
                                             std::string(slice.failure.message())));
}

std::vector<int32_t> NeededExperts(const LayerDescription& layer,
                                   absl::Span<const int32_t> topk_ids) {
  const int32_t num_experts = layer.router.num_experts;
  std::vector<bool> used(num_experts);
  for (const int32_t id : topk_ids) {
    if (id < num_experts) used[id] = true;
  }
  used.resize(layer.num_held(), !topk_ids.empty() || layer.router.top_k == 0);
  std::vector<int32_t> needed;
  for (int32_t e = 0; e < layer.num_held(); ++e) {
    if (used[e]) needed.push_back(e);
  }
  return needed;
}

}  // namespace expertmesh
