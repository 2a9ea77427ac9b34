#include "tests/fuzz/models.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/fuzz/check.h"
#include "tests/random_tensor.h"

namespace expertmesh::fuzz {
namespace {

using nlohmann::json;

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
               .has_logits_bias = true,
               .has_selection_bias = true,
               .group_score = GroupScore::kTop2Sum,
               .norm = WeightNorm::kSum,
               .norm_epsilon = 1e-20f,
               .has_per_expert_scale = true},
      .normalise = {{"norm_topk_prob"}, true},
      .scale = {{"routed_scaling_factor"}, 1.0},
      .num_groups = {{"n_group"}, 1},
      .topk_groups = {{"topk_group"}, 1},
      .activations = {{"silu", Activation::kSiluGlu}, {"gelu", Activation::kGeluErfGlu}},
      .logits_bias = {"gate.bias"},
      .selection_bias = {"gate.e_score_correction_bias"},
      .per_expert_scale = {"gate.per_expert_scale"},
      .layouts = {{.name = "interleaved",
                   .gate_up = "experts.gate_up",
                   .down = "experts.down",
                   .order = GateUpOrder::kInterleaved,
                   .transposed = true},
                  {.name = "up first",
                   .gate_up = "experts.{expert}.up_gate",
                   .down = "experts.{expert}.down",
                   .order = GateUpOrder::kUpFirst}},
  });
  return families;
}

TinyModel MakeModel(const Family& family, json config) {
  config["model_type"] = family.model_type;
  const auto model = DescribeModel(config, {&family, 1});
  FUZZ_CHECK(model.ok() && model->description.layers.size() == 1);
  return {&family, std::move(config), model->description.layers[0]};
}

std::vector<TinyModel> MakeModels() {
  const auto family = [](const std::string& model_type) -> const Family& {
    const auto found = std::find_if(Families().begin(), Families().end(), [&](const Family& one) {
      return one.model_type == model_type;
    });
    FUZZ_CHECK(found != Families().end());
    return *found;
  };
  return {
      MakeModel(family("mixtral"), {{"num_hidden_layers", 1},
                                    {"hidden_size", 2},
                                    {"intermediate_size", 1},
                                    {"num_local_experts", 3},
                                    {"num_experts_per_tok", 2},
                                    {"hidden_act", "silu"}}),
      MakeModel(family("qwen3_moe"), {{"num_hidden_layers", 1},
                                      {"hidden_size", 3},
                                      {"moe_intermediate_size", 2},
                                      {"num_experts", 2},
                                      {"num_experts_per_tok", 1},
                                      {"norm_topk_prob", true},
                                      {"mlp_only_layers", json::array()},
                                      {"hidden_act", "silu"}}),
      MakeModel(family("olmoe"), {{"num_hidden_layers", 1},
                                  {"hidden_size", 1},
                                  {"intermediate_size", 1},
                                  {"num_experts", 4},
                                  {"num_experts_per_tok", 3},
                                  {"hidden_act", "silu"}}),
      MakeModel(family("every_key"), {{"text_config",
                                       {{"num_hidden_layers", 1},
                                        {"hidden_size", 5},
                                        {"moe_intermediate_size", 1},
                                        {"n_routed_experts", 4},
                                        {"num_experts_per_tok", 2},
                                        {"first_k_dense_replace", 0},
                                        {"moe_layer_freq", 1},
                                        {"n_group", 2},
                                        {"topk_group", 1},
                                        {"routed_scaling_factor", 2.5},
                                        {"hidden_act", "silu"}}}}),
  };
}

// Weights of one seed for each tensor.
class TinyCheckpoint final : public Checkpoint {
 public:
  explicit TinyCheckpoint(std::vector<LayerDescription> layers) {
    model_.model_type = "tiny";
    model_.num_hidden_layers = layers.back().layer + 1;
    model_.layers = std::move(layers);
  }
  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t ExpertBytes(int32_t) const override { return 1; }
  const std::vector<std::string>& skipped_tensors() const override { return skipped_; }
  const std::string& layout() const override { return model_.model_type; }
  absl::StatusOr<RouterWeights> ReadRouter(int32_t layer) const override {
    const LayerDescription& description = *model_.Find(layer);
    const RouterDescriptor& router = description.router;
    std::mt19937 rng(static_cast<unsigned>(layer));
    const auto vector = [&](bool wanted, float scale) {
      return RandomTensor(DType::kF32, {wanted ? router.num_experts : 0}, scale, rng);
    };
    RouterWeights weights;
    weights.weight = RandomTensor(description.experts.weight_dtype,
                                  {router.num_experts, description.experts.hidden_size}, 1.0f, rng);
    weights.logits_bias = vector(router.has_logits_bias, 0.1f);
    weights.selection_bias = vector(router.has_selection_bias, 0.1f);
    weights.per_expert_scale = vector(router.has_per_expert_scale, 1.0f);
    return weights;
  }
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override {
    const ExpertDescriptor& shape = model_.Find(layer)->experts;
    std::mt19937 rng(static_cast<unsigned>(layer * 4 + expert));
    ExpertWeights weights;
    weights.gate_up = RandomTensor(shape.weight_dtype,
                                   {2 * shape.intermediate_size, shape.hidden_size}, 0.5f, rng);
    weights.down =
        RandomTensor(shape.weight_dtype, {shape.hidden_size, shape.intermediate_size}, 0.5f, rng);
    return weights;
  }

 private:
  ModelDescription model_;
  const std::string fingerprint_ = "fingerprint";
  std::vector<std::string> skipped_;
};

}  // namespace

absl::Span<const Family> Families() {
  static const auto* families = new std::vector<Family>(MakeFamilies());
  return *families;
}

const std::vector<TinyModel>& TinyModels() {
  static const auto* models = new std::vector<TinyModel>(MakeModels());
  return *models;
}

std::vector<std::pair<std::string, Shape>> TensorsOf(const TinyModel& model,
                                                     const ExpertLayout& layout) {
  const Family& family = *model.family;
  const int64_t experts = model.layer.router.num_experts;
  const int64_t hidden = model.layer.experts.hidden_size;
  const int64_t intermediate = model.layer.experts.intermediate_size;
  std::vector<std::pair<std::string, Shape>> tensors;
  const std::string block = absl::StrReplaceAll(family.layer_prefixes[0] + family.blocks[0],
                                                {{"{layer}", absl::StrCat(model.layer.layer)}});
  tensors.push_back({block + family.router_weight[0], {experts, hidden}});
  for (const auto* vector :
       {&family.logits_bias, &family.selection_bias, &family.per_expert_scale}) {
    if (!vector->empty()) tensors.push_back({block + vector->front(), {experts}});
  }
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    if (name.empty()) return;
    if (layout.transposed) std::swap(rows, cols);
    if (name.find("{expert}") == std::string::npos) {
      tensors.push_back({block + name, {experts, rows, cols}});
      return;
    }
    for (int64_t e = 0; e < experts; ++e) {
      tensors.push_back(
          {block + absl::StrReplaceAll(name, {{"{expert}", absl::StrCat(e)}}), {rows, cols}});
    }
  };
  matrix(layout.gate, intermediate, hidden);
  matrix(layout.up, intermediate, hidden);
  matrix(layout.gate_up, 2 * intermediate, hidden);
  matrix(layout.down, hidden, intermediate);
  return tensors;
}

std::string MakeWeights(const TinyModel& model, const ExpertLayout& layout, DType dtype) {
  std::mt19937 rng(1);
  json header = json::object();
  std::string data;
  for (const auto& [name, shape] : TensorsOf(model, layout)) {
    const Tensor tensor = RandomTensor(dtype, shape, 0.5f, rng);
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
    header[name] = {
        {"dtype", NameOf(dtype)}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data;
}

std::shared_ptr<const Checkpoint> MakeCheckpoint(std::vector<LayerDescription> layers) {
  return std::make_shared<TinyCheckpoint>(std::move(layers));
}

}  // namespace expertmesh::fuzz
