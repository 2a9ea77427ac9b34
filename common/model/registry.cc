#include "common/model/registry.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/status.h"
#include "common/tensor.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using nlohmann::json;

// Bounds that no model comes near, so that later arithmetic cannot overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 30;
constexpr int64_t kMaxLayers = 65536;

ExpertLayout PerExpert(const std::string& gate, const std::string& up, const std::string& down) {
  const std::string expert = "experts.{expert}.";
  return {.name = "per-expert",
          .gate = expert + gate + ".weight",
          .up = expert + up + ".weight",
          .down = expert + down + ".weight"};
}

// What transformers 5 holds in memory, and what some tools save.
ExpertLayout Fused() {
  return {.name = "fused", .gate_up = "experts.gate_up_proj", .down = "experts.down_proj"};
}

RouterDescriptor SoftmaxGate() {
  return {.score = ScoreFunction::kSoftmax,
          .order = ScoreOrder::kScoreThenTopK,
          .norm = WeightNorm::kSum};
}

std::vector<Family> MakeFamilies() {
  return {
      {
          .model_type = "mixtral",
          .intermediate_size = {{"intermediate_size"}, {}},
          .num_experts = {{"num_local_experts", "num_experts"}, {}},
          .gate = SoftmaxGate(),
          .activation = {{"hidden_act"}, "silu"},
          .blocks = {"block_sparse_moe.", "mlp."},
          .layouts = {PerExpert("w1", "w3", "w2"), Fused()},
      },
      {
          .model_type = "qwen3_moe",
          .intermediate_size = {{"moe_intermediate_size"}, {}},
          .num_experts = {{"num_experts", "num_local_experts"}, {}},
          .moe_layers = {.period = {{"decoder_sparse_step"}, 1},
                         .phase = 1,
                         .dense_list = {{"mlp_only_layers"}, std::vector<int64_t>{}}},
          .gate = SoftmaxGate(),
          .normalise = {{"norm_topk_prob"}, false},
          .activation = {{"hidden_act"}, "silu"},
          .layouts = {PerExpert("gate_proj", "up_proj", "down_proj"), Fused()},
      },
      {
          .model_type = "olmoe",
          .intermediate_size = {{"intermediate_size"}, {}},
          .num_experts = {{"num_experts", "num_local_experts"}, {}},
          .gate = SoftmaxGate(),
          .normalise = {{"norm_topk_prob"}, false},
          .activation = {{"hidden_act"}, "silu"},
          .layouts = {PerExpert("gate_proj", "up_proj", "down_proj"), Fused()},
      },
  };
}

absl::Status Invalid(const std::string& key, const std::string& expected,
                     const std::string& given) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": expected ", expected, ", given ", given));
}

// The value of `name`, or null where it is absent or null.
const json* Look(const json& config, const std::string& name) {
  const auto found = config.find(name);
  return found == config.end() || found->is_null() ? nullptr : &*found;
}

absl::Status Convert(const std::string& name, const json& value, int64_t* result) {
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX)) {
    return Invalid(name, "an integer", value.dump());
  }
  *result = value.get<int64_t>();
  return absl::OkStatus();
}
absl::Status Convert(const std::string& name, const json& value, double* result) {
  if (!value.is_number()) return Invalid(name, "a number", value.dump());
  *result = value.get<double>();
  return absl::OkStatus();
}
absl::Status Convert(const std::string& name, const json& value, bool* result) {
  if (!value.is_boolean()) return Invalid(name, "true or false", value.dump());
  *result = value.get<bool>();
  return absl::OkStatus();
}
absl::Status Convert(const std::string& name, const json& value, std::string* result) {
  if (!value.is_string()) return Invalid(name, "a string", value.dump());
  *result = value.get<std::string>();
  return absl::OkStatus();
}
absl::Status Convert(const std::string& name, const json& value, std::vector<int64_t>* result) {
  if (!value.is_array()) return Invalid(name, "a list of integers", value.dump());
  for (const json& element : value) {
    RETURN_IF_ERROR(Convert(name, element, &result->emplace_back()));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<T> Get(const json& config, const Key<T>& key) {
  const std::string* taken = nullptr;
  std::optional<T> result;
  for (const std::string& name : key.names) {
    const json* value = Look(config, name);
    if (value == nullptr) continue;
    T converted{};
    RETURN_IF_ERROR(Convert(name, *value, &converted));
    if (result && *result != converted) {
      return absl::InvalidArgumentError(absl::StrCat(*taken, " = ", Look(config, *taken)->dump(),
                                                     " and ", name, " = ", value->dump(),
                                                     " contradict each other"));
    }
    taken = &name;
    result = std::move(converted);
  }
  if (result) return *std::move(result);
  if (key.fallback) return *key.fallback;
  return absl::InvalidArgumentError(absl::StrCat(
      absl::StrJoin(key.names, " or "), ": missing, and this model type has no default for it"));
}

// An integer from 1 to `limit`.
absl::StatusOr<int64_t> GetPositive(const json& config, const Key<int64_t>& key,
                                    int64_t limit = kMaxExtent) {
  ASSIGN_OR_RETURN(const int64_t value, Get(config, key));
  if (value < 1 || value > limit) {
    return Invalid(absl::StrJoin(key.names, " or "), absl::StrCat("an integer from 1 to ", limit),
                   absl::StrCat(value));
  }
  return value;
}

absl::StatusOr<RouterDescriptor> DescribeGate(const json& config, const Family& family) {
  RouterDescriptor gate = family.gate;
  ASSIGN_OR_RETURN(const int64_t num_experts, GetPositive(config, family.num_experts));
  ASSIGN_OR_RETURN(const int64_t top_k, GetPositive(config, family.top_k));
  ASSIGN_OR_RETURN(const bool normalise, Get(config, family.normalise));
  ASSIGN_OR_RETURN(const double scale, Get(config, family.scale));
  ASSIGN_OR_RETURN(const int64_t num_groups, GetPositive(config, family.num_groups));
  ASSIGN_OR_RETURN(const int64_t topk_groups, GetPositive(config, family.topk_groups));
  if (!std::isfinite(static_cast<float>(scale))) {
    return Invalid(absl::StrJoin(family.scale.names, " or "), "a number that fits in fp32",
                   absl::StrCat(scale));
  }
  if (top_k > num_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("K > E: ", absl::StrJoin(family.top_k.names, "/"), " is ", top_k, ", ",
                     absl::StrJoin(family.num_experts.names, "/"), " is ", num_experts));
  }
  if (num_experts % num_groups != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(num_experts, " experts do not divide into ", num_groups, " groups"));
  }
  if (topk_groups > num_groups || top_k > topk_groups * (num_experts / num_groups)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top ", top_k, " of the best ", topk_groups, " of ", num_groups, " groups of ",
                     num_experts / num_groups, " experts: there are too few"));
  }
  gate.num_experts = static_cast<int32_t>(num_experts);
  gate.top_k = static_cast<int32_t>(top_k);
  gate.num_groups = static_cast<int32_t>(num_groups);
  gate.topk_groups = static_cast<int32_t>(topk_groups);
  gate.scale = static_cast<float>(scale);
  if (!normalise) gate.norm = WeightNorm::kNone;
  if (num_groups == 1) gate.group_score = GroupScore::kNone;
  if (gate.group_score == GroupScore::kTop2Sum && num_experts / num_groups < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(num_groups, " groups of one expert have no sum of their best two scores"));
  }
  return gate;
}

absl::StatusOr<ExpertDescriptor> DescribeExperts(const json& config, const Family& family) {
  ExpertDescriptor experts;
  ASSIGN_OR_RETURN(experts.hidden_size, GetPositive(config, family.hidden_size));
  ASSIGN_OR_RETURN(experts.intermediate_size, GetPositive(config, family.intermediate_size));
  ASSIGN_OR_RETURN(const std::string activation, Get(config, family.activation));
  const auto known = family.activations.find(activation);
  if (known == family.activations.end()) {
    std::vector<std::string> supported;
    for (const auto& [name, unused] : family.activations) supported.push_back(name);
    return absl::UnimplementedError(
        absl::StrCat(absl::StrJoin(family.activation.names, " or "), ": '", activation,
                     "' is not supported by model type '", family.model_type,
                     "' (supported: ", absl::StrJoin(supported, ", "), ")"));
  }
  experts.activation = known->second;
  return experts;
}

// The decoder indices of the MoE layers among `num_layers`, ascending.
absl::StatusOr<std::vector<int32_t>> MoeLayers(const json& config, const MoeLayerRule& rule,
                                               int64_t num_layers) {
  ASSIGN_OR_RETURN(const int64_t first, Get(config, rule.first));
  ASSIGN_OR_RETURN(const int64_t period, GetPositive(config, rule.period));
  ASSIGN_OR_RETURN(const std::vector<int64_t> dense_list, Get(config, rule.dense_list));
  const std::set<int64_t> dense(dense_list.begin(), dense_list.end());
  std::vector<int32_t> layers;
  for (int64_t i = std::max<int64_t>(first, 0); i < num_layers; ++i) {
    if ((i + rule.phase) % period != 0) continue;
    if (dense.count(i) != 0) continue;
    layers.push_back(static_cast<int32_t>(i));
  }
  return layers;
}

absl::Status RefuseQuantized(const json& config) {
  const json* quantization = Look(config, "quantization_config");
  if (quantization == nullptr) return absl::OkStatus();
  const json* method = quantization->is_object() ? Look(*quantization, "quant_method") : nullptr;
  return absl::UnimplementedError(absl::StrCat("quantization_config: quant_method ",
                                               method != nullptr ? method->dump() : "(none)",
                                               " is not supported"));
}

}  // namespace

absl::Span<const Family> BuiltInFamilies() {
  static const auto* families = new std::vector<Family>(MakeFamilies());
  return *families;
}

absl::StatusOr<DescribedModel> DescribeModel(const json& config,
                                             absl::Span<const Family> families) {
  if (!config.is_object()) return Invalid("the file", "an object", config.type_name());
  ASSIGN_OR_RETURN(const std::string model_type, Get(config, Key<std::string>{{"model_type"}, {}}));
  const auto family = std::find_if(families.begin(), families.end(), [&](const Family& candidate) {
    return candidate.model_type == model_type;
  });
  if (family == families.end()) {
    std::vector<std::string> supported;
    for (const Family& candidate : families) supported.push_back(candidate.model_type);
    return absl::UnimplementedError(
        absl::StrCat("model_type: '", model_type,
                     "' is not supported (supported: ", absl::StrJoin(supported, ", "), ")"));
  }
  RETURN_IF_ERROR(RefuseQuantized(config));
  const json* section = &config;
  if (!family->config_section.empty()) {
    section = Look(config, family->config_section);
    if (section == nullptr || !section->is_object()) {
      return Invalid(family->config_section, "an object",
                     section == nullptr ? "nothing" : section->type_name());
    }
    RETURN_IF_ERROR(RefuseQuantized(*section));
  }

  DescribedModel model;
  model.family = &*family;
  model.description.model_type = model_type;
  ASSIGN_OR_RETURN(const int64_t num_layers,
                   GetPositive(*section, family->num_hidden_layers, kMaxLayers));
  model.description.num_hidden_layers = static_cast<int32_t>(num_layers);
  LayerDescription layer;
  layer.kind = LayerKind::kMoe;
  ASSIGN_OR_RETURN(layer.router, DescribeGate(*section, *family));
  ASSIGN_OR_RETURN(layer.experts, DescribeExperts(*section, *family));
  // The most bytes that one layer's experts could have.
  const int64_t per_layer[] = {layer.router.num_experts, 3, layer.experts.intermediate_size,
                               layer.experts.hidden_size, 4};
  if (NumElements(per_layer) < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        layer.router.num_experts, " experts of hidden size ", layer.experts.hidden_size,
        " and intermediate size ", layer.experts.intermediate_size, " do not fit in 63 bits"));
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> layers,
                   MoeLayers(*section, family->moe_layers, num_layers));
  if (layers.empty()) return absl::InvalidArgumentError("no layer is a MoE layer");
  for (const int32_t index : layers) {
    layer.layer = index;
    model.description.layers.push_back(layer);
  }
  return model;
}

}  // namespace expertmesh
