#include "tests/fuzz/models.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
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

TinyModel MakeModel(const std::string& model_type, json config) {
  const auto family = std::find_if(Families().begin(), Families().end(),
                                   [&](const Family& one) { return one.model_type == model_type; });
  FUZZ_CHECK(family != Families().end());
  config["model_type"] = model_type;
  const auto model = DescribeModel(config, {&*family, 1});
  FUZZ_CHECK(model.ok() && model->description.layers.size() == 1);
  return {&*family, std::move(config), model->description.layers[0], model->quantization};
}

// With the keys that most families have, of one layer.
json Sizes(int hidden, int intermediate, const char* experts_key, int experts, int top_k,
           const json& others = json::object()) {
  json config = {{"num_hidden_layers", 1},
                 {"hidden_size", hidden},
                 {"intermediate_size", intermediate},
                 {"moe_intermediate_size", intermediate},
                 {experts_key, experts},
                 {"num_experts_per_tok", top_k},
                 {"hidden_act", "silu"}};
  config.update(others);
  return config;
}

std::vector<TinyModel> MakeModels() {
  const json block_fp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const json row_fp8 = {
      {"quant_method", "compressed-tensors"},
      {"format", "float-quantized"},
      {"config_groups",
       {{"group_0",
         {{"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}}}}}}};
  const json groups = {
      {"first_k_dense_replace", 0},   {"moe_layer_freq", 1}, {"n_group", 2},
      {"routed_scaling_factor", 2.5}, {"topk_group", 1},     {"n_shared_experts", 1}};
  json every_key = Sizes(5, 1, "n_routed_experts", 4, 2, groups);
  for (const char* key : {"intermediate_size", "n_shared_experts"}) every_key.erase(key);
  return {
      MakeModel("mixtral", Sizes(2, 1, "num_local_experts", 3, 2)),
      MakeModel("qwen3_moe", Sizes(3, 2, "num_experts", 2, 1,
                                   {{"norm_topk_prob", true}, {"mlp_only_layers", json::array()}})),
      MakeModel("olmoe", Sizes(1, 1, "num_experts", 4, 3)),
      MakeModel("every_key", {{"text_config", every_key}}),
      // Quantised.
      MakeModel("olmoe", Sizes(4, 2, "num_experts", 2, 1, {{"quantization_config", block_fp8}})),
      MakeModel("qwen3_moe", Sizes(2, 3, "num_experts", 3, 2, {{"quantization_config", row_fp8}})),
      MakeModel("gpt_oss", Sizes(32, 32, "num_local_experts", 2, 1,
                                 {{"quantization_config", {{"quant_method", "mxfp4"}}}})),
      // Shared experts, and what else the families have.
      MakeModel("qwen2_moe",
                Sizes(3, 1, "num_experts", 3, 1, {{"shared_expert_intermediate_size", 2}})),
      MakeModel("deepseek_v3", Sizes(2, 2, "n_routed_experts", 4, 2, groups)),
      MakeModel("gpt_oss", Sizes(3, 3, "num_local_experts", 2, 2)),
      MakeModel("llama4_text",
                Sizes(4, 1, "num_local_experts", 2, 1, {{"intermediate_size_mlp", 3}})),
      MakeModel("granitemoeshared",
                Sizes(4, 3, "num_local_experts", 2, 2, {{"shared_intermediate_size", 1}})),
      MakeModel("dbrx", {{"n_layers", 1},
                         {"d_model", 3},
                         {"ffn_config",
                          {{"ffn_hidden_size", 4}, {"moe_num_experts", 2}, {"moe_top_k", 1}}}}),
      MakeModel("nemotron_h", Sizes(2, 4, "n_routed_experts", 3, 2,
                                    {{"hybrid_override_pattern", "E"},
                                     {"moe_shared_expert_intermediate_size", 1},
                                     {"routed_scaling_factor", 2.5},
                                     {"mlp_hidden_act", "relu2"}})),
      MakeModel("gemma4_text", Sizes(5, 2, "num_experts", 2, 1,
                                     {{"top_k_experts", 1}, {"enable_moe_block", true}})),
      MakeModel("longcat_flash", {{"num_layers", 1},
                                  {"hidden_size", 5},
                                  {"expert_ffn_hidden_size", 3},
                                  {"n_routed_experts", 2},
                                  {"moe_topk", 2},
                                  {"zero_expert_num", 1},
                                  {"routed_scaling_factor", 6.0}}),
      MakeModel("cohere2_moe",
                Sizes(6, 1, "num_experts", 2, 1,
                      {{"num_shared_experts", 1}, {"expert_selection_fn", "sigmoid"}})),
      MakeModel("phimoe", Sizes(6, 2, "num_local_experts", 3, 2, {{"router_jitter_noise", 0.1}})),
  };
}

// Weights of one seed for each layer and expert.
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
    RouterWeights weights;
    if (description.kind == LayerKind::kDense) return weights;
    const RouterDescriptor& router = description.router;
    const int64_t hidden = description.experts.hidden_size;
    const int64_t num_ids = router.num_experts + router.identity_experts;
    std::mt19937 rng(static_cast<unsigned>(layer));
    const auto vector = [&rng](bool wanted, int64_t size, float scale) {
      return RandomTensor(DType::kF32, {wanted ? size : 0}, scale, rng);
    };
    const DType dtype = description.experts.weight_format == WeightFormat::kPlain
                            ? description.experts.weight_dtype
                            : DType::kBF16;
    weights.weight = RandomTensor(dtype, {num_ids, hidden}, 1.0f, rng);
    weights.logits_bias = vector(router.has_logits_bias, num_ids, 0.1f);
    weights.selection_bias = vector(router.has_selection_bias, num_ids, 0.1f);
    weights.per_expert_scale = vector(router.has_per_expert_scale, num_ids, 1.0f);
    weights.input_norm = vector(router.input_norm.present, hidden, 1.0f);
    weights.expert_input_norm = vector(description.expert_input_norm.present, hidden, 1.0f);
    if (description.shared.gated_by_sigmoid) {
      weights.shared_gate =
          RandomTensor(DType::kBF16, {description.shared.count, hidden}, 1.0f, rng);
    }
    return weights;
  }
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override {
    const LayerDescription& description = *model_.Find(layer);
    const ExpertDescriptor& shape =
        expert < description.router.num_experts ? description.experts : description.shared.experts;
    std::mt19937 rng(static_cast<unsigned>(layer * 8 + expert));
    const WeightType type(shape.weight_format, shape.weight_dtype);
    const int64_t rows = (shape.gated ? 2 : 1) * shape.intermediate_size;
    RandomWeights gate_up = expertmesh::MakeWeights(type, rows, shape.hidden_size, 0.5f, rng);
    RandomWeights down =
        expertmesh::MakeWeights(type, shape.hidden_size, shape.intermediate_size, 0.5f, rng);
    ExpertWeights weights;
    weights.gate_up = std::move(gate_up.values);
    weights.gate_up_scales = std::move(gate_up.scales);
    weights.down = std::move(down.values);
    weights.down_scales = std::move(down.scales);
    if (shape.has_bias) {
      weights.gate_up_bias = RandomTensor(DType::kF32, {rows}, 0.5f, rng);
      weights.down_bias = RandomTensor(DType::kF32, {shape.hidden_size}, 0.5f, rng);
    }
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

std::vector<TinyTensor> TensorsOf(const TinyModel& model, const ExpertLayout& layout) {
  const Family& family = *model.family;
  const RouterDescriptor& router = model.layer.router;
  const int64_t num_ids = router.num_experts + router.identity_experts;
  const int64_t hidden = model.layer.experts.hidden_size;
  std::vector<TinyTensor> tensors;
  const std::string block = absl::StrReplaceAll(family.layer_prefixes[0] + family.blocks[0],
                                                {{"{layer}", absl::StrCat(model.layer.layer)}});
  const auto add = [&](bool wanted, const std::vector<std::string>& names, const Shape& shape) {
    if (wanted) tensors.push_back({block + names[0], shape});
  };
  add(true, family.router_weight, {num_ids, hidden});
  add(router.has_logits_bias, family.logits_bias, {num_ids});
  add(router.has_selection_bias, family.selection_bias, {num_ids});
  add(router.has_per_expert_scale, family.per_expert_scale, {num_ids});
  add(router.input_norm.present, family.input_norm, {hidden});
  add(model.layer.expert_input_norm.present, family.expert_input_norm_weight, {hidden});
  add(model.layer.shared.gated_by_sigmoid, family.shared_gate, {1, hidden});

  const auto mlp = [&](const ExpertLayout& l, const ExpertDescriptor& experts, int64_t count) {
    const auto matrix = [&](const std::string& name, int64_t n, int64_t k, bool transposed) {
      if (name.empty()) return;
      Shape leading;
      const bool each = name.find("{expert}") != std::string::npos;
      if (count > 0 && !each) leading = {count};
      const auto shape_of = [&](Shape shape) {
        if (!leading.empty() && l.joined) {
          shape[0] *= count;
        } else {
          shape.insert(shape.begin(), leading.begin(), leading.end());
        }
        return shape;
      };
      Shape plain = shape_of({n, k});
      if (k == 0) plain = shape_of({n});  // a bias
      if (k != 0 && transposed) plain = shape_of({k, n});
      for (int64_t e = 0; e < (each ? count : 1); ++e) {
        const std::string full = block + absl::StrReplaceAll(name, {{"{expert}", absl::StrCat(e)}});
        if (k == 0 || model.quantization.none()) {
          tensors.push_back({full, plain});
        } else if (model.quantization.mxfp4) {
          tensors.push_back({full + "_blocks", shape_of({n, k / 32, 16}), DType::kU8});
          tensors.push_back({full + "_scales", shape_of({n, k / 32}), DType::kU8});
        } else {
          const bool blocks = model.quantization.fp8 == Quantization::Fp8::kBlock128;
          const WeightFormat format = blocks ? WeightFormat::kFp8Block128 : WeightFormat::kFp8Row;
          tensors.push_back({full, plain, DType::kF8_E4M3});
          tensors.push_back({full + (blocks ? "_scale_inv" : "_scale"),
                             ScaleShapes(format, n, k, transposed, leading)[0], DType::kF32});
        }
      }
    };
    const int64_t width = experts.intermediate_size;
    matrix(l.gate, width, hidden, l.transposed);
    matrix(l.up, width, hidden, l.transposed);
    matrix(l.gate_up, 2 * width, hidden, l.transposed);
    matrix(l.down, hidden, width, l.transposed || l.down_transposed);
    if (!experts.has_bias) return;
    matrix(l.gate_bias, width, 0, false);
    matrix(l.up_bias, width, 0, false);
    matrix(l.gate_up_bias, 2 * width, 0, false);
    matrix(l.down_bias, hidden, 0, false);
  };
  mlp(layout, model.layer.experts, router.num_experts);
  if (model.layer.shared.count > 0) mlp(family.shared_layouts[0], model.layer.shared.experts, 0);
  return tensors;
}

std::string MakeWeights(const TinyModel& model, const ExpertLayout& layout, DType dtype) {
  std::mt19937 rng(1);
  json header = json::object();
  std::string data;
  for (const TinyTensor& one : TensorsOf(model, layout)) {
    Tensor tensor = RandomTensor(one.dtype ? DType::kF32 : dtype, one.shape, 0.5f, rng);
    if (one.dtype == DType::kF32) {  // scales
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        tensor.as<float>()[i] = 0.1f + std::fabs(tensor.as<float>()[i]);
      }
    } else if (one.dtype) {
      tensor = Tensor(*one.dtype, one.shape);
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        tensor.as<uint8_t>()[i] = static_cast<uint8_t>(rng() % 126);  // no NaN, no large exponent
      }
    }
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
    header[one.name] = {{"dtype", NameOf(tensor.dtype())},
                        {"shape", one.shape},
                        {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data;
}

std::shared_ptr<const Checkpoint> MakeCheckpoint(std::vector<LayerDescription> layers) {
  return std::make_shared<TinyCheckpoint>(std::move(layers));
}

}  // namespace expertmesh::fuzz
