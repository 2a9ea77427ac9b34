#include <string>
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
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"n_routed_experts", "num_experts"}, {}},
      .moe_layers = {.first = {{"first_k_dense_replace"}, 0},
                     .period = {{"moe_layer_freq"}, 1},
                     .phase = 1,
                     .dense_list = {{"mlp_only_layers"}, std::vector<int64_t>{}}},
      .gate = {.score = ScoreFunction::kSigmoid,
               .has_selection_bias = true,
               .group_score = GroupScore::kTop2Sum,
               .norm = WeightNorm::kSum,
               .norm_epsilon = 1e-20f},
      .normalise = {{"norm_topk_prob"}, true},
      .scale = {{"routed_scaling_factor"}, 1.0},
      .num_groups = {{"n_group"}, 1},
      .topk_groups = {{"topk_group"}, 1},
      .activations = {{"silu", Activation::kSiluGlu}, {"gelu", Activation::kGeluErfGlu}},
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
  for (const LayerDescription& layer : description.layers) {
    FUZZ_CHECK(layer.layer > previous && layer.layer < description.num_hidden_layers);
    previous = layer.layer;
  }
  const LayerDescription& layer = description.layers.front();  // all are alike but for their index
  const RouterDescriptor& router = layer.router;
  FUZZ_CHECK(1 <= router.top_k && router.top_k <= router.num_experts);
  FUZZ_CHECK(router.num_experts % router.num_groups == 0);
  FUZZ_CHECK(router.topk_groups <= router.num_groups);
  FUZZ_CHECK(router.top_k <= router.topk_groups * int64_t{router.num_experts / router.num_groups});
  const int64_t gate_up[] = {router.num_experts, 2 * layer.experts.intermediate_size,
                             layer.experts.hidden_size, sizeof(float)};
  FUZZ_CHECK(NumElements(gate_up) > 0);
  FUZZ_CHECK(ValidateRouter(router).ok());
}

}  // namespace expertmesh::fuzz
