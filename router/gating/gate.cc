#include "router/gating/gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "common/kernels/for_loop_gemm.h"
#include "common/kernels/grouped_gemm.h"
#include "common/kernels/memory.h"
#include "common/numerics/flush_denormals.h"
#include "common/numerics/math.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// Stands in for a renormalisation epsilon that the descriptor leaves at zero.
constexpr float kDefaultEpsilon = 1e-20f;

int64_t NumIds(const RouterDescriptor& router) {
  return int64_t{router.num_experts} + router.identity_experts;
}

// ---- Logits ------------------------------------------------------------------------------------

// Rows that are multiplied at a time: few enough to stay in cache until they are.
constexpr int64_t kRowBlock = 64;

// Memory of a thread that computes logits, kept from call to call.
struct LogitsMemory {
  Workspace rows;
  Workspace scratch;
  std::vector<GemmGroup> groups;
};

KERNEL_NOINLINE void AddBias(const std::vector<float>& bias, absl::Span<float> logits) {
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += bias[i % bias.size()];
}

// ---- Selection ---------------------------------------------------------------------------------

// Selects from one token's logits; made once per call so that the scratch is reused.
class Selector {
 public:
  Selector(const RouterDescriptor& router, absl::Span<const float> selection_bias,
           absl::Span<const float> per_expert_scale)
      : router_(router),
        selection_bias_(selection_bias),
        per_expert_scale_(per_expert_scale),
        capped_(static_cast<size_t>(NumIds(router))),
        scores_(capped_.size()),
        choice_(scores_.size()),
        order_(scores_.size()) {}

  KERNEL_FMA KERNEL_NOINLINE void Select(absl::Span<const float> logits, absl::Span<int32_t> ids,
                                         absl::Span<float> weights) {
    if (router_.softcap != 0.0f) {
      for (size_t i = 0; i < logits.size(); ++i) {
        capped_[i] = Tanh(logits[i] / router_.softcap) * router_.softcap;
      }
      logits = capped_;
    }
    if (router_.score == ScoreFunction::kSparsemixer) {
      Choose(logits, ids);
      Sparsemix(logits, ids, weights);
    } else if (router_.order == ScoreOrder::kScoreThenTopK) {
      Score(logits, absl::MakeSpan(scores_));
      Choose(scores_, ids);
      for (size_t s = 0; s < ids.size(); ++s) weights[s] = scores_[ids[s]];
    } else {
      Choose(logits, ids);
      // Scoring in place: no score needs another one's logit afterwards.
      for (size_t s = 0; s < ids.size(); ++s) weights[s] = logits[ids[s]];
      Score(weights, weights);
    }
    Normalise(weights);
    for (float& weight : weights) weight *= router_.scale;
    if (router_.has_per_expert_scale) {
      for (size_t s = 0; s < ids.size(); ++s) weights[s] *= per_expert_scale_[ids[s]];
    }
  }

 private:
  KERNEL_FMA void Score(absl::Span<const float> z, absl::Span<float> out) const {
    switch (router_.score) {
      case ScoreFunction::kSigmoid:
        for (size_t i = 0; i < z.size(); ++i) out[i] = Sigmoid(z[i]);
        return;
      case ScoreFunction::kSqrtSoftplus:
        for (size_t i = 0; i < z.size(); ++i) out[i] = std::sqrt(Softplus(z[i]));
        return;
      default: {  // kSoftmax; ValidateRouter refused the others
        const float max = *std::max_element(z.begin(), z.end());
        float sum = 0.0f;
        for (size_t i = 0; i < z.size(); ++i) {
          out[i] = Exp(z[i] - max);
          sum += out[i];
        }
        for (float& value : out) value /= sum;
      }
    }
  }

  // Weights of the two chosen ids.
  KERNEL_FMA void Sparsemix(absl::Span<const float> z, absl::Span<const int32_t> ids,
                            absl::Span<float> weights) const {
    for (size_t s = 0; s < ids.size(); ++s) {
      const float max = z[ids[s]];
      float sum = 0.0f;
      for (size_t i = 0; i < z.size(); ++i) {
        const bool taken = s == 1 && static_cast<int32_t>(i) == ids[0];
        const float distance = (max - z[i]) / std::max(std::fabs(z[i]), max);
        if (!taken && !(distance > 2.0f * router_.jitter)) sum += Exp(z[i] - max);
      }
      weights[s] = 1.0f / sum;
    }
  }

  // The ids of the best selection scores: `values` plus the bias, groups masked.
  void Choose(absl::Span<const float> values, absl::Span<int32_t> ids) {
    std::copy(values.begin(), values.end(), choice_.begin());
    if (router_.has_selection_bias) {
      for (size_t i = 0; i < choice_.size(); ++i) choice_[i] += selection_bias_[i];
    }
    if (router_.group_score != GroupScore::kNone) MaskGroups();
    TopK(choice_, ids);
  }

  void MaskGroups() {
    const size_t groups = static_cast<size_t>(router_.num_groups);
    const size_t size = choice_.size() / groups;
    group_scores_.resize(groups);
    chosen_groups_.resize(static_cast<size_t>(router_.topk_groups));
    for (size_t g = 0; g < groups; ++g) {
      float best = -std::numeric_limits<float>::infinity();
      float second = best;
      for (size_t i = g * size; i < (g + 1) * size; ++i) {
        second = std::max(second, std::min(best, choice_[i]));
        best = std::max(best, choice_[i]);
      }
      group_scores_[g] = router_.group_score == GroupScore::kMax ? best : best + second;
    }
    TopK(group_scores_, absl::MakeSpan(chosen_groups_));
    const float fill =
        router_.mask_fill == MaskFill::kZero ? 0.0f : -std::numeric_limits<float>::infinity();
    for (int32_t g = 0; g < router_.num_groups; ++g) {
      if (std::find(chosen_groups_.begin(), chosen_groups_.end(), g) != chosen_groups_.end()) {
        continue;
      }
      std::fill_n(choice_.begin() + g * size, size, fill);
    }
  }

  // Indices of the ids.size() largest values, descending, ties by the lower index: a total order,
  // so that any algorithm gives the same result.
  void TopK(const std::vector<float>& values, absl::Span<int32_t> ids) {
    const auto end = order_.begin() + values.size();
    std::iota(order_.begin(), end, 0);
    std::partial_sort(order_.begin(), order_.begin() + ids.size(), end, [&](int32_t a, int32_t b) {
      return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    std::copy_n(order_.begin(), ids.size(), ids.begin());
  }

  void Normalise(absl::Span<float> weights) const {
    const float epsilon = router_.norm_epsilon == 0.0f ? kDefaultEpsilon : router_.norm_epsilon;
    float sum = 0.0f;  // of |w|^p; every weight is at least 0
    const bool squares = router_.norm == WeightNorm::kPNorm && router_.norm_p == 2.0f;
    for (const float weight : weights) sum += squares ? weight * weight : weight;
    switch (router_.norm) {
      case WeightNorm::kNone:
        return;
      case WeightNorm::kSum:
        sum += epsilon;
        break;
      case WeightNorm::kSumClamped:
        sum = std::max(sum, epsilon);
        break;
      case WeightNorm::kPNorm:
        sum = (squares ? std::sqrt(sum) : sum) + epsilon;
        break;
    }
    for (float& weight : weights) weight /= sum;
  }

  const RouterDescriptor& router_;
  const absl::Span<const float> selection_bias_;
  const absl::Span<const float> per_expert_scale_;
  std::vector<float> capped_;  // logits under the soft cap
  std::vector<float> scores_;
  std::vector<float> choice_;  // selection scores
  std::vector<float> group_scores_;
  std::vector<int32_t> chosen_groups_;
  std::vector<int32_t> order_;  // scratch of TopK
};

// ---- Checks ------------------------------------------------------------------------------------

// INVALID_ARGUMENT unless `values` has [N] finite entries where `present`, and none elsewhere.
absl::Status CheckPerExpert(const char* name, bool present, int64_t num_ids,
                            absl::Span<const float> values) {
  const int64_t expected = present ? num_ids : 0;
  if (static_cast<int64_t>(values.size()) != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must have ", expected, " entries, got ", values.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return absl::InvalidArgumentError(absl::StrCat(name, "[", i, "] is not finite"));
    }
  }
  return absl::OkStatus();
}

// Copies an F32 [N] tensor, or an empty one.
absl::StatusOr<std::vector<float>> PerExpert(const char* name, bool present, int64_t num_ids,
                                             const Tensor& tensor) {
  const std::vector<int64_t> expected = {present ? num_ids : 0};
  if (tensor.dtype() != DType::kF32 || tensor.shape() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " must be F32 ", ShapeToString(expected),
                                                   ", got ", NameOf(tensor.dtype()), " ",
                                                   ShapeToString(tensor.shape())));
  }
  std::vector<float> values(tensor.as<float>(), tensor.as<float>() + tensor.num_elements());
  RETURN_IF_ERROR(CheckPerExpert(name, present, num_ids, values));
  return values;
}

}  // namespace

absl::Status ValidateRouter(const RouterDescriptor& router) {
  const int64_t num_ids = NumIds(router);
  if (router.num_experts < 1 || router.identity_experts < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("router: num_experts must be at least 1 and identity_experts at least 0, got ",
                     router.num_experts, " and ", router.identity_experts));
  }
  if (router.top_k < 1 || router.top_k > num_ids) {
    return absl::InvalidArgumentError(absl::StrCat(
        "router: top_k must be in [1, num_experts] = [1, ", num_ids, "], got ", router.top_k));
  }
  switch (router.score) {
    case ScoreFunction::kSoftmax:
    case ScoreFunction::kSigmoid:
    case ScoreFunction::kSqrtSoftplus:
      break;
    case ScoreFunction::kSparsemixer:
      if (router.top_k != 2) {
        return absl::InvalidArgumentError(
            absl::StrCat("router: the sparsemixer selects 2 experts, got top_k ", router.top_k));
      }
      if (router.has_selection_bias || router.group_score != GroupScore::kNone) {
        return absl::InvalidArgumentError(
            "router: the sparsemixer has neither a selection bias nor groups");
      }
      break;
  }
  if (router.group_score != GroupScore::kNone) {
    if (router.num_groups < 1 || num_ids % router.num_groups != 0) {
      return absl::InvalidArgumentError(absl::StrCat("router: num_groups must divide the ", num_ids,
                                                     " experts, got ", router.num_groups));
    }
    if (router.topk_groups < 1 || router.topk_groups > router.num_groups) {
      return absl::InvalidArgumentError(
          absl::StrCat("router: topk_groups must be in [1, num_groups] = [1, ", router.num_groups,
                       "], got ", router.topk_groups));
    }
    const int64_t group_size = num_ids / router.num_groups;
    if (router.top_k > router.topk_groups * group_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "router: top_k must be at most topk_groups * experts per group = ", router.topk_groups,
          " * ", group_size, ", got ", router.top_k));
    }
    if (router.group_score == GroupScore::kTop2Sum && group_size < 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          "router: groups scored by their best two experts need at least 2, num_groups ",
          router.num_groups, " leaves 1 of ", num_ids));
    }
  }
  if (router.norm == WeightNorm::kPNorm && router.norm_p != 1.0f && router.norm_p != 2.0f) {
    return absl::UnimplementedError(absl::StrCat(
        "router: weight norms other than p = 1 and p = 2 (norm_p ", router.norm_p, ")"));
  }
  if (!std::isfinite(router.norm_epsilon) || router.norm_epsilon < 0.0f ||
      !std::isfinite(router.softcap) || router.softcap < 0.0f || !std::isfinite(router.jitter) ||
      router.jitter < 0.0f || !std::isfinite(router.scale) || !std::isfinite(router.routed_scale)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "router: norm_epsilon, softcap and jitter must be finite and not negative, scale and "
        "routed_scale finite, got ",
        router.norm_epsilon, ", ", router.softcap, ", ", router.jitter, ", ", router.scale, " and ",
        router.routed_scale));
  }
  return absl::OkStatus();
}

absl::Status SelectExperts(const RouterDescriptor& router, absl::Span<const float> logits,
                           absl::Span<const float> selection_bias,
                           absl::Span<const float> per_expert_scale, absl::Span<int32_t> topk_ids,
                           absl::Span<float> topk_weights, int64_t first_row,
                           const char* logits_name) {
  const size_t num_ids = static_cast<size_t>(NumIds(router));
  const size_t top_k = static_cast<size_t>(router.top_k);
  const size_t tokens = logits.size() / num_ids;
  if (logits.size() % num_ids != 0 || topk_ids.size() != tokens * top_k ||
      topk_weights.size() != tokens * top_k) {
    return absl::InvalidArgumentError(
        absl::StrCat("logits, topk_ids and topk_weights must have T * ", num_ids, ", T * ", top_k,
                     " and T * ", top_k, " entries, got ", logits.size(), ", ", topk_ids.size(),
                     " and ", topk_weights.size()));
  }
  RETURN_IF_ERROR(CheckPerExpert("selection_bias", router.has_selection_bias,
                                 static_cast<int64_t>(num_ids), selection_bias));
  RETURN_IF_ERROR(CheckPerExpert("per_expert_scale", router.has_per_expert_scale,
                                 static_cast<int64_t>(num_ids), per_expert_scale));

  const ScopedFlushDenormals flush;
  Selector selector(router, selection_bias, per_expert_scale);
  for (size_t t = 0; t < tokens; ++t) {
    const absl::Span<const float> row = logits.subspan(t * num_ids, num_ids);
    for (size_t e = 0; e < num_ids; ++e) {
      if (!std::isfinite(row[e])) {
        return absl::InvalidArgumentError(absl::StrCat(logits_name, ": row ",
                                                       first_row + static_cast<int64_t>(t),
                                                       " is not finite at expert ", e));
      }
    }
    selector.Select(row, topk_ids.subspan(t * top_k, top_k),
                    topk_weights.subspan(t * top_k, top_k));
  }
  return absl::OkStatus();
}

absl::StatusOr<Gate> Gate::Create(const RouterDescriptor& router, RouterWeights weights,
                                  EngineKind kind, Isa isa) {
  RETURN_IF_ERROR(ValidateRouter(router));
  const int64_t num_ids = NumIds(router);
  const Tensor& weight = weights.weight;
  if (!IsActivationDType(weight.dtype()) || weight.shape().size() != 2 ||
      weight.dim(0) != num_ids || weight.dim(1) < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("router weight must be F32, BF16 or F16 [", num_ids, ", hidden_size], got ",
                     NameOf(weight.dtype()), " ", ShapeToString(weight.shape())));
  }
  Gate gate;
  gate.router_ = router;
  gate.hidden_size_ = weight.dim(1);
  gate.kind_ = kind;
  gate.isa_ = isa;
  ASSIGN_OR_RETURN(gate.logits_bias_,
                   PerExpert("logits_bias", router.has_logits_bias, num_ids, weights.logits_bias));
  ASSIGN_OR_RETURN(gate.selection_bias_, PerExpert("selection_bias", router.has_selection_bias,
                                                   num_ids, weights.selection_bias));
  ASSIGN_OR_RETURN(gate.per_expert_scale_,
                   PerExpert("per_expert_scale", router.has_per_expert_scale, num_ids,
                             weights.per_expert_scale));

  if (kind == EngineKind::kForLoop) {
    gate.weight_ = weight;
  } else {
    gate.packed_ = PackedWeights(weight.dtype(), 1, num_ids, gate.hidden_size_);
    gate.packed_.Pack(0, weight);
  }
  return gate;
}

void Gate::ComputeLogits(const TensorView& hidden_states, int64_t rows, float* logits) const {
  const ScopedFlushDenormals flush;
  const auto* const from = static_cast<const std::byte*>(hidden_states.data);
  const int64_t from_bytes = hidden_size_ * BytesOf(hidden_states.dtype);
  const int64_t num_ids = NumIds(router_);
  if (kind_ == EngineKind::kForLoop) {
    std::vector<float> x(hidden_size_);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < hidden_size_; ++k) {
        x[k] = LoadFloat(hidden_states.dtype, from + r * from_bytes, k);
      }
      ForLoopMatVec(x.data(), weight_, logits + r * num_ids);
    }
    return;
  }
  thread_local LogitsMemory memory;
  const DType row_dtype = GemmRowDType(isa_, packed_.dtype(), hidden_states.dtype);
  const int64_t row_bytes = GemmRowBytes(row_dtype, hidden_size_);
  std::byte* const x = memory.rows.Get(static_cast<size_t>(kRowBlock * row_bytes));
  for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, rows - begin);
    for (int64_t r = 0; r < count; ++r) {
      LoadGemmRow(isa_, hidden_states.dtype, from + (begin + r) * from_bytes, hidden_size_,
                  row_dtype, x + r * row_bytes);
    }
    memory.groups.clear();
    AddGroups(/*index=*/0, /*first_row=*/0, count, &memory.groups);
    GroupedGemm gemm({isa_, &packed_, memory.groups, x, row_dtype, GemmOutput::kRows,
                      RowFormat::kF32, logits + begin * num_ids, num_ids});
    gemm.Run(memory.scratch, [] { return false; });
  }
}

absl::StatusOr<Routing> Gate::Route(const TensorView& hidden_states, int64_t first_row,
                                    const char* logits_name) const {
  if (!IsActivationDType(hidden_states.dtype) || hidden_states.shape.size() != 2 ||
      hidden_states.shape[0] < 0 || hidden_states.shape[1] != hidden_size_) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_states must be F32, BF16 or F16 [tokens, ", hidden_size_, "], got ",
                     NameOf(hidden_states.dtype), " ", ShapeToString(hidden_states.shape)));
  }
  const int64_t tokens = hidden_states.shape[0];
  const int64_t num_ids = NumIds(router_);
  Routing routing;
  routing.topk_ids = Tensor(DType::kI32, {tokens, router_.top_k});
  routing.topk_weights = Tensor(DType::kF32, {tokens, router_.top_k});
  routing.logits = Tensor(DType::kF32, {tokens, num_ids});

  // Rows from `good` on are not looked at: row `good` has a value that is not finite.
  const int64_t bad_value = KernelsOf(isa_).find_not_finite(hidden_states.dtype, hidden_states.data,
                                                            tokens * hidden_size_);
  const int64_t good = bad_value < 0 ? tokens : bad_value / hidden_size_;
  ComputeLogits(hidden_states, good, routing.logits.as<float>());
  const absl::Span<float> logits(routing.logits.as<float>(), static_cast<size_t>(good * num_ids));
  if (router_.has_logits_bias) {
    const ScopedFlushDenormals flush;
    AddBias(logits_bias_, logits);
  }

  const size_t slots = static_cast<size_t>(good * router_.top_k);
  RETURN_IF_ERROR(SelectExperts(router_, logits, selection_bias_, per_expert_scale_,
                                absl::MakeSpan(routing.topk_ids.as<int32_t>(), slots),
                                absl::MakeSpan(routing.topk_weights.as<float>(), slots), first_row,
                                logits_name));
  if (good < tokens) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_states: row ", first_row + good,
                                                   " is not finite at column ",
                                                   bad_value % hidden_size_));
  }
  return routing;
}

}  // namespace expertmesh
