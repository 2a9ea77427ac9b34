#include "router/dispatch/round.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/kernels/kernels.h"
#include "common/numerics/flush_denormals.h"
#include "common/status.h"
#include "common/text.h"

namespace expertmesh {

absl::Span<const int32_t> Round::Part::topk_ids() const {
  const Tensor& ids = call->result.routing.topk_ids;
  const int64_t top_k = ids.dim(1);
  return absl::MakeSpan(ids.as<int32_t>() + begin * top_k, static_cast<size_t>(tokens * top_k));
}

namespace {

// The tokens of a round, in the order of its parts.
struct RoundTokens {
  std::vector<int32_t> topk_ids;       // [T, K]
  std::vector<float> topk_weights;     // [T, K], where they go into the experts' input
  std::vector<const std::byte*> rows;  // where the hidden state of each is
  std::vector<size_t> parts;           // which part each belongs to
  DType dtype = DType::kF32;
  absl::Time deadline = absl::InfinitePast();

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

RoundTokens TokensOf(const LayerDescription& layer, Round& round) {
  RoundTokens tokens;
  for (size_t p = 0; p < round.parts.size(); ++p) {
    Round::Part& part = round.parts[p];
    if (part.closed) continue;
    const Tensor& rows = part.call->call.hidden_states;
    tokens.dtype = rows.dtype();
    tokens.deadline = std::max(tokens.deadline, part.call->call.deadline);
    part.offset = tokens.size();
    const absl::Span<const int32_t> ids = part.topk_ids();
    tokens.topk_ids.insert(tokens.topk_ids.end(), ids.begin(), ids.end());
    if (layer.router.weigh_input) {
      const float* const weights = part.call->result.routing.topk_weights.as<float>();
      const float* const first = weights + part.begin * layer.router.top_k;
      tokens.topk_weights.insert(tokens.topk_weights.end(), first, first + ids.size());
    }
    const int64_t row_bytes = layer.experts.hidden_size * BytesOf(tokens.dtype);
    for (int64_t t = 0; t < part.tokens; ++t) {
      tokens.rows.push_back(rows.data() + (part.begin + t) * row_bytes);
    }
    tokens.parts.resize(tokens.rows.size(), p);
  }
  return tokens;
}

// Plans the round; the slices have the ids of experts.
absl::StatusOr<RoundPlan> PlanTokens(const LayerDescription& layer, const LayerPlacement& placement,
                                     EmptyExperts empty_experts, const RoundTokens& tokens) {
  const int32_t top_k = layer.router.top_k;
  if (layer.shared.count == 0 && layer.router.identity_experts == 0) {
    return PlanRound(tokens.topk_ids, top_k, placement.server_of_expert, layer.pad_multiple,
                     empty_experts);
  }
  const RoundSlots slots =
      AddSharedSlots(tokens.topk_ids, tokens.size(), top_k, layer.router.num_experts,
                     layer.shared.count, placement.server_of_expert, placement.shared_servers);
  ASSIGN_OR_RETURN(RoundPlan plan,
                   PlanRound(slots.ids, top_k + layer.shared.count, slots.server_of_id,
                             layer.pad_multiple, empty_experts));
  for (ServerSlice& slice : plan.slices) {
    for (int32_t& id : slice.expert_ids) id = slots.ExpertOf(id);
  }
  return plan;
}

// Quantised rows [R, D] with memory for codes and scales.
ExpertRows MakeQuantized(QuantizedFormat format, DType dtype, int64_t rows, int64_t hidden_size) {
  ExpertRows quantized;
  quantized.dtype = dtype;
  quantized.format = format;
  quantized.values = Tensor(DType::kF8_E4M3, {rows, hidden_size});
  quantized.scales = Tensor(ScaleDType(format), {rows, ScalesPerRow(format, hidden_size)});
  return quantized;
}

// Quantises `rows` rows of `dtype` to the ones from `first` on.
QuantizeCounts Quantize(Isa isa, DType dtype, const void* values, int64_t rows, int64_t first,
                        ExpertRows* quantized) {
  const int64_t k = quantized->values.dim(1);
  Tensor& scales = quantized->scales;
  return QuantizeRows(
      isa, {*quantized->format, dtype, values, rows, k, quantized->values.as<uint8_t>() + first * k,
            scales.data() + first * scales.dim(1) * BytesOf(scales.dtype())});
}

// Where the rows of a tensor are.
std::vector<const std::byte*> RowsOf(const Tensor& tensor) {
  std::vector<const std::byte*> rows;
  const int64_t bytes = tensor.dim(1) * BytesOf(tensor.dtype());
  for (int64_t r = 0; r < tensor.dim(0); ++r) rows.push_back(tensor.data() + r * bytes);
  return rows;
}

// The tokens' rows, each quantised once, however many servers get it.
ExpertRows QuantizeTokens(QuantizedFormat format, int64_t hidden_size, Isa isa,
                          const RoundTokens& tokens, Round& round) {
  ExpertRows quantized = MakeQuantized(format, tokens.dtype, tokens.size(), hidden_size);
  for (const Round::Part& part : round.parts) {
    if (part.closed) continue;  // the rows of a part are in one piece
    round.counts.quantized +=
        Quantize(isa, tokens.dtype, tokens.rows[part.offset], part.tokens, part.offset, &quantized);
  }
  return quantized;
}

// The rows of a slice in low precision whose gate weighs the experts' input: one for each pair,
// weighed, rounded to the dtype of the request (not at all to F16, which is computed as F32), and
// quantised. Makes `gather` name them.
ExpertRows QuantizeWeighed(QuantizedFormat format, int64_t hidden_size, Isa isa,
                           const RoundTokens& tokens, absl::Span<const int64_t> row_tokens,
                           absl::Span<const float> weights, std::vector<int32_t>* gather,
                           QuantizeCounts* counts) {
  const auto pairs =
      std::count_if(gather->begin(), gather->end(), [](int32_t r) { return r >= 0; });
  ExpertRows quantized = MakeQuantized(format, tokens.dtype, pairs, hidden_size);
  const ScopedFlushDenormals flush;
  const Kernels& kernels = KernelsOf(isa);
  const DType dtype = ReplyDType(tokens.dtype);
  Tensor weighed(dtype, {1, hidden_size});
  int32_t pair = 0;
  for (size_t p = 0; p < gather->size(); ++p) {
    int32_t& row = (*gather)[p];
    if (row < 0) continue;
    kernels.weigh(tokens.dtype, tokens.rows[row_tokens[row]], hidden_size, weights[p],
                  dtype == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kF32, weighed.data());
    *counts += Quantize(isa, dtype, weighed.data(), /*rows=*/1, pair, &quantized);
    row = pair++;
  }
  return quantized;
}

}  // namespace

absl::StatusOr<std::vector<ExpertSlice>> PlanSlices(const LayerDescription& layer,
                                                    const LayerPlacement& placement,
                                                    const DispatchOptions& options, Round* round) {
  const int64_t hidden_size = layer.experts.hidden_size;
  const RoundTokens tokens = TokensOf(layer, *round);
  ASSIGN_OR_RETURN(round->plan, PlanTokens(layer, placement, options.empty_experts, tokens));
  std::vector<std::vector<float>> input_weights;
  if (layer.router.weigh_input) {
    input_weights =
        InputWeights(round->plan, layer.router.top_k, layer.shared.count, tokens.topk_weights);
  }
  round->planned = absl::Now();
  round->counts = {};
  // Low precision weighs before it quantises; rows that are quantised only to travel are weighed
  // by the servers.
  const std::optional<QuantizedFormat> computed_in = layer.row_format();
  const bool weigh_here = layer.router.weigh_input && computed_in;
  const std::optional<QuantizedFormat> format = computed_in ? computed_in : options.wire_format;
  ExpertRows quantized;
  std::vector<const std::byte*> codes, scales;
  if (format && !weigh_here) {
    quantized = QuantizeTokens(*format, hidden_size, options.isa, tokens, *round);
    codes = RowsOf(quantized.values);
    scales = RowsOf(quantized.scales);
  }
  std::vector<ExpertSlice> dispatched;
  for (ServerSlice& source : round->plan.slices) {
    Round::Slice slice;
    slice.backend = placement.backends[source.server];
    slice.expert_ids = source.expert_ids;
    slice.reply_shape = {source.num_pairs, hidden_size};
    for (const int64_t token : source.row_tokens) {
      const size_t p = tokens.parts[token];
      if (!slice.parts.empty() && slice.parts.back() == p) continue;
      slice.parts.push_back(p);
      ++round->parts[p].missing;
    }
    round->slices.push_back(std::move(slice));
    ExpertSlice out;
    out.layer = layer.layer;
    out.placement_epoch = placement.epoch;
    if (weigh_here) {
      out.rows = QuantizeWeighed(*format, hidden_size, options.isa, tokens, source.row_tokens,
                                 input_weights[dispatched.size()], &source.gather,
                                 &round->counts.quantized);
    } else if (format) {
      out.rows.dtype = tokens.dtype;
      out.rows.format = format;
      out.rows.values = GatherRows(quantized.values.dtype(), hidden_size, codes, source.row_tokens);
      out.rows.scales =
          GatherRows(quantized.scales.dtype(), quantized.scales.dim(1), scales, source.row_tokens);
    } else {
      out.rows = GatherRows(tokens.dtype, hidden_size, tokens.rows, source.row_tokens);
    }
    DispatchCounts& counts = round->counts;
    counts.pairs += source.num_pairs;
    counts.unique_rows += out.rows.values.dim(0);
    counts.padded_positions += static_cast<int64_t>(source.gather.size()) - source.num_pairs;
    counts.row_bytes += out.rows.num_bytes();
    out.expert_ids = std::move(source.expert_ids);
    out.m_sizes = std::move(source.m_sizes);
    out.gather = std::move(source.gather);
    if (layer.router.weigh_input && !weigh_here) {
      out.input_weights = std::move(input_weights[dispatched.size()]);
    }
    out.deadline = tokens.deadline;
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
