#include "router/dispatch/round.h"

#include <algorithm>
#include <cstddef>
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
  std::vector<int32_t> topk_ids;
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
    const int64_t row_bytes = hidden_size * BytesOf(dtype);
    for (int64_t t = 0; t < part.tokens; ++t) {
      tokens.push_back(rows.data() + (part.begin + t) * row_bytes);
    }
    part_of_token.resize(tokens.size(), p);
  }
  ASSIGN_OR_RETURN(round->plan, PlanRound(topk_ids, layer.router.top_k, placement.server_of_expert,
                                          /*pad_multiple=*/1));
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
    out.deadline = deadline;
    dispatched.push_back(std::move(out));
  }
  round->replies.resize(round->slices.size());
  return dispatched;
}

void CombinePart(const LayerDescription& layer, const Round& round, const Round::Part& part,
                 Isa isa) {
  const int32_t top_k = layer.router.top_k;
  BatchedCall& call = *part.call;
  const auto pairs =
      absl::MakeConstSpan(round.plan.pairs).subspan(part.offset * top_k, part.tokens * top_k);
  Tensor& output = call.result.output;
  const absl::Span<const float> weights(
      call.result.routing.topk_weights.as<float>() + part.begin * top_k, pairs.size());
  Combine(pairs, round.replies, weights, top_k, layer.router.routed_scale,
          layer.experts.hidden_size, output.dtype(),
          output.data() + part.begin * layer.experts.hidden_size * BytesOf(output.dtype()), isa);
}

absl::Status DescribeFailure(int32_t layer, const Round::Part& part, const Round::Slice& slice) {
  if (!absl::IsUnavailable(slice.failure)) return slice.failure;
  std::vector<int32_t> lost;
  for (const int32_t expert : slice.expert_ids) {
    const absl::Span<const int32_t> ids = part.topk_ids();
    if (std::find(ids.begin(), ids.end(), expert) != ids.end()) lost.push_back(expert);
  }
  return absl::UnavailableError(absl::StrCat("layer ", layer, ": lost the server of expert",
                                             lost.size() == 1 ? " " : "s ", IdRanges(lost), ": ",
                                             std::string(slice.failure.message())));
}

std::vector<int32_t> NeededExperts(absl::Span<const int32_t> topk_ids, int32_t num_experts) {
  std::vector<bool> used(num_experts);
  for (const int32_t id : topk_ids) used[id] = true;
  std::vector<int32_t> needed;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (used[e]) needed.push_back(e);
  }
  return needed;
}

}  // namespace expertmesh
