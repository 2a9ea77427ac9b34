#include <string>
#include <utility>
#include <vector>

#include "common/model/registry.h"
#include "common/safetensors/strict_json.h"
#include "common/tensor.h"
#include "router/gating/gate.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

// The built-in families, and one that reads every key that a family may have.
std::vector<Family> MakeFamilies() {
  std::vector<Family> families(BuiltInFamilies().begin(), BuiltInFamilies().end());
  families.push_back({
      .model_type = "every_key",
      .config_section = "text_config",
      .intermediate_size = {{"moe_intermediate_size"}, {}, {}, true},
      .num_experts = {{"n_routed_experts", "num_experts"}, {}, {}, true},
      .identity_experts = {{"zero_expert_num"}, 0},
      .dense_intermediate_size = {{"intermediate_size"}, 0},
      .shared_intermediate_size = {{"shared_intermediate_size"}, 0, {}, true},
      .num_shared_experts = {{"n_shared_experts"}, 1, 0},
      .moe_layers = {.kinds = {{"mlp_layer_types", "pattern"}, {}},
                     .kind_names = {{"sparse", LayerKind::kMoe},
                                    {"E", LayerKind::kMoe},
                                    {"dense", LayerKind::kDense},
                                    {"-", LayerKind::kDense},
                                    {"*", {}}},
                     .moe_list = {{"moe_layers"}, {}},
                     .first = {{"first_k_dense_replace"}, 0},
                     .last = {{"moe_layer_end_index"}, -1},
                     .period = {{"moe_layer_freq"}, 1},
                     .offset = {{"expert_layer_offset"}, 0},
                     .phase = 1,
                     .dense_list = {{"mlp_only_layers"}, std::vector<int64_t>{}}},
      .gate = {.score = ScoreFunction::kSigmoid,
               .has_selection_bias = true,
               .group_score = GroupScore::kTop2Sum,
               .norm = WeightNorm::kSum,
               .norm_epsilon = 1e-20f},
      .choices = {{.name = "mode",
                   .fallback = "sum",
                   .values = {{"sum", nullptr},
                              {"average",
                               [](LayerDescription& layer) { layer.shared.averaged = true; }}}}},
      .normalise = {{"norm_topk_prob"}, true},
      .norm_epsilon = {{"moe_norm_min"}, 1e-12},
      .norm_p = {{"ffn_config.norm"}, 1.0, 0.0},
      .scale = {{"routed_scaling_factor"}, 1.0, 1.0},
      .num_groups = {{"n_group"}, 1},
      .topk_groups = {{"topk_group"}, 1},
      .activations = {{"silu", Activation::kSiluGlu}, {"gelu", Activation::kGeluErfGlu}},
      .activation_alpha = {{"swiglu_alpha"}, 1.702},
      .activation_limit = {{"swiglu_limit"}, 7.0},
      .dense_layouts = {{.gate = "gate", .up = "up", .down = "down"}},
  });
  return families;
}

}  // namespace

void Config(Bytes bytes) {
  static const auto* families = new std::vector<Family>(MakeFamilies());
  const std::string text(bytes.begin(), bytes.end());
  const auto config = ParseStrictJson(text);
  if (!config.ok()) return;
  // The fingerprint is of this form, which has to be as good as the text.
  const auto again = ParseStrictJson(config->dump());
  FUZZ_CHECK(again.ok() && *again == *config);

  const auto model = DescribeModel(*config, *families);
  if (!model.ok()) return;
  const ModelDescription& description = model->description;
  FUZZ_CHECK(!description.layers.empty());
  int32_t previous = -1;
  bool moe = false;
  for (const LayerDescription& layer : description.layers) {
    FUZZ_CHECK(layer.layer > previous && layer.layer < description.num_hidden_layers);
    previous = layer.layer;
    FUZZ_CHECK(layer.experts.hidden_size > 0);
    const RouterDescriptor& router = layer.router;
    for (const auto& [count, experts] : {std::pair(router.num_experts, layer.experts),
                                         std::pair(layer.shared.count, layer.shared.experts)}) {
      if (count == 0) continue;
      const int64_t gate_up[] = {count, 2 * experts.intermediate_size, experts.hidden_size,
                                 sizeof(float)};
      FUZZ_CHECK(NumElements(gate_up) > 0);
    }
    if (layer.kind == LayerKind::kDense) {
      FUZZ_CHECK(router.num_experts == 0 && router.top_k == 0 && layer.shared.count == 1);
      continue;
    }
    moe = true;
    FUZZ_CHECK(1 <= router.top_k && router.top_k <= router.num_experts + router.identity_experts);
    FUZZ_CHECK(router.num_experts % router.num_groups == 0);
    FUZZ_CHECK(router.topk_groups <= router.num_groups);
    const absl::Status valid = ValidateRouter(router);
    FUZZ_CHECK(valid.ok() || absl::IsUnimplemented(valid));
  }
  FUZZ_CHECK(moe);
}

}  // namespace expertmesh::fuzz
