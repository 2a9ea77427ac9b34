#include "common/model/registry.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/numerics/activation.h"
#include "common/status.h"
#include "common/tensor.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using nlohmann::json;

// Bounds that no model comes near, so that later arithmetic cannot overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 30;
constexpr int64_t kMaxExperts = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 4096;

// ---- The families
// --------------------------------------------------------------------------------

// Names of a gated expert's three matrices under `prefix`; {expert} in it stands for the id.
ExpertLayout Separate(const std::string& layout, const std::string& prefix, const std::string& gate,
                      const std::string& up, const std::string& down) {
  return {.name = layout,
          .gate = prefix + gate + ".weight",
          .up = prefix + up + ".weight",
          .down = prefix + down + ".weight"};
}
ExpertLayout PerExpert(const std::string& gate, const std::string& up, const std::string& down) {
  return Separate("per-expert", "experts.{expert}.", gate, up, down);
}
ExpertLayout PerExpert() { return PerExpert("gate_proj", "up_proj", "down_proj"); }

// The one MLP of a dense layer, or of its shared experts.
ExpertLayout Mlp(const std::string& prefix = "") {
  return Separate("", prefix, "gate_proj", "up_proj", "down_proj");
}

// What transformers 5 holds in memory, and what some tools save.
ExpertLayout Fused(const std::string& prefix = "") {
  return {.name = "fused",
          .gate_up = prefix + "experts.gate_up_proj",
          .down = prefix + "experts.down_proj"};
}

// Files that have the experts stacked as [in, out].
ExpertLayout FusedTransposed() {
  ExpertLayout layout = Fused();
  layout.transposed = true;
  return layout;
}

// Not gated: an up and a down projection.
ExpertLayout UpDown(const std::string& name, const std::string& prefix, const std::string& suffix) {
  return {.name = name, .up = prefix + "up_proj" + suffix, .down = prefix + "down_proj" + suffix};
}

RouterDescriptor SoftmaxGate() {
  return {.score = ScoreFunction::kSoftmax,
          .order = ScoreOrder::kScoreThenTopK,
          .norm = WeightNorm::kSum};
}

RouterDescriptor TopKThenSoftmaxGate() {
  return {.score = ScoreFunction::kSoftmax, .order = ScoreOrder::kTopKThenScore};
}

RouterDescriptor SigmoidGate(float norm_epsilon) {
  return {.score = ScoreFunction::kSigmoid,
          .order = ScoreOrder::kScoreThenTopK,
          .has_selection_bias = true,
          .norm = WeightNorm::kSum,
          .norm_epsilon = norm_epsilon};
}

// A key that may have one value only.
Choice Only(const std::string& name, const std::string& value) {
  return {.name = name, .fallback = value, .values = {{value, nullptr}}};
}

Choice SelectionBias(const std::string& name) {
  return {.name = name,
          .fallback = "true",
          .values = {{"true", nullptr}, {"false", [](LayerDescription& layer) {
                                           layer.router.has_selection_bias = false;
                                         }}}};
}

// Layers said by name, one for each.
Key<std::vector<std::string>> MlpLayerTypes() { return {{"mlp_layer_types"}, {}}; }
std::map<std::string, KindOfLayer> SparseAndDense() {
  return {{"sparse", LayerKind::kMoe}, {"dense", LayerKind::kDense}};
}

Family Refused(const std::string& model_type, const std::string& reason) {
  return {.model_type = model_type, .refused = reason};
}

Family Renamed(Family family, const std::string& model_type) {
  family.model_type = model_type;
  return family;
}
// A model with other parts, whose language model is described by `section` of its configuration.
Family Inside(Family family, const std::string& section, const std::string& model_type) {
  family.model_type = model_type;
  family.config_section = section;
  return family;
}

Family Mixtral() {
  return {
      .model_type = "mixtral",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_local_experts", "num_experts"}, {}},
      .gate = SoftmaxGate(),
      .blocks = {"block_sparse_moe.", "mlp."},
      .layouts = {PerExpert("w1", "w3", "w2"), Fused()},
  };
}

// Mixtral's experts, chosen by two masked softmaxes.
Family PhiMoe() {
  Family family = Mixtral();
  family.model_type = "phimoe";
  family.gate = {.score = ScoreFunction::kSparsemixer};
  family.jitter = {{"router_jitter_noise"}, 0.01};
  family.router_weight = {"gate.weight", "router.weight"};
  return family;
}

Family MiniMaxM2() {
  Family family = Mixtral();
  family.model_type = "minimax_m2";
  family.gate = SigmoidGate(0.0f);
  family.choices = {Only("scoring_func", "sigmoid"), Only("shared_intermediate_size", "0"),
                    SelectionBias("use_routing_bias")};
  family.selection_bias = {"e_score_correction_bias"};
  return family;
}

Family MiniMax() {
  Family family = Mixtral();
  family.model_type = "minimax";
  family.choices = {Only("shared_intermediate_size", "0")};
  return family;
}

Family Olmoe() {
  return {
      .model_type = "olmoe",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_experts", "num_local_experts"}, {}},
      .gate = SoftmaxGate(),
      .normalise = {{"norm_topk_prob"}, false},
      .layouts = {PerExpert(), Fused()},
  };
}

Family Qwen3Moe() {
  return {
      .model_type = "qwen3_moe",
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"num_experts", "num_local_experts"}, {}},
      .dense_intermediate_size = {{"intermediate_size"}, {}},
      .moe_layers = {.period = {{"decoder_sparse_step"}, 1},
                     .offset = {{}, 0},
                     .phase = 1,
                     .dense_list = {{"mlp_only_layers"}, std::vector<int64_t>{}}},
      .gate = SoftmaxGate(),
      .normalise = {{"norm_topk_prob"}, false},
      .layouts = {PerExpert(), Fused()},
      .dense_layouts = {Mlp()},
  };
}

// With a shared expert that is weighed by a sigmoid of its own.
Family Qwen2Moe() {
  Family family = Qwen3Moe();
  family.model_type = "qwen2_moe";
  family.shared_intermediate_size = {{"shared_expert_intermediate_size"}, {}};
  family.shared.gated_by_sigmoid = true;
  family.shared_gate = {"shared_expert_gate.weight"};
  family.shared_layouts = {Mlp("shared_expert.")};
  return family;
}

Family Qwen3Next() {
  Family family = Qwen2Moe();
  family.model_type = "qwen3_next";
  family.normalise = {{"norm_topk_prob"}, true};
  return family;
}

// No dense layers, and weights that are always normalised.
Family Qwen35Moe() {
  Family family = Qwen2Moe();
  family.model_type = "qwen3_5_moe_text";
  family.moe_layers = {};
  family.normalise = {{}, true};
  return family;
}

Family Qwen3VlMoe() {
  Family family = Qwen3Moe();
  family.model_type = "qwen3_vl_moe_text";
  family.normalise = {{}, true};
  family.layouts = {FusedTransposed(), Fused()};  // as released, and as transformers 5 writes them
  return family;
}

// What the DeepSeek models and those built like them share: the first layers are dense, and some
// shared experts are joined into one.
Family DeepSeekLike(const std::string& model_type) {
  return {
      .model_type = model_type,
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"n_routed_experts", "num_experts", "num_local_experts"}, {}},
      .dense_intermediate_size = {{"intermediate_size"}, {}},
      .shared_intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_shared_experts = {{"n_shared_experts"}, 0},
      .moe_layers = {.kinds = MlpLayerTypes(),
                     .kind_names = SparseAndDense(),
                     .first = {{"first_k_dense_replace"}, {}},
                     .period = {{"moe_layer_freq"}, 1}},
      .choices = {Only("mlp_bias", "false")},
      .scale = {{"routed_scaling_factor"}, {}, 1.0},
      .layouts = {PerExpert(), Fused()},
      .shared_layouts = {Mlp("shared_experts.")},
      .dense_layouts = {Mlp()},
  };
}

Family DeepSeekV2() {
  Family family = DeepSeekLike("deepseek_v2");
  family.gate = {.score = ScoreFunction::kSoftmax, .mask_fill = MaskFill::kZero};
  family.choices.push_back(Only("scoring_func", "softmax"));
  family.choices.push_back(Only("norm_topk_prob", "false"));  // implementations disagree on true
  family.choices.push_back(
      {.name = "topk_method",
       .fallback = "greedy",
       .values = {{"greedy", nullptr}, {"group_limited_greedy", [](LayerDescription& layer) {
                                          layer.router.group_score = GroupScore::kMax;
                                        }}}});
  family.num_groups = {{"n_group"}, {}};
  family.topk_groups = {{"topk_group"}, {}};
  return family;
}

// Sigmoid scores, selected with a bias from the groups whose best two are best. Entries that say no
// more than the model type differ in sizes only.
Family DeepSeekV3(const std::string& model_type = "deepseek_v3") {
  Family family = DeepSeekLike(model_type);
  family.gate = SigmoidGate(1e-20f);
  family.gate.group_score = GroupScore::kTop2Sum;
  family.choices.push_back(Only("scoring_func", "sigmoid"));
  family.choices.push_back(Only("topk_method", "noaux_tc"));
  family.normalise = {{"norm_topk_prob"}, true};
  family.num_groups = {{"n_group"}, {}};
  family.topk_groups = {{"topk_group"}, {}};
  family.selection_bias = {"gate.e_score_correction_bias"};
  return family;
}

// The same, where groups may be left out.
Family DeepSeekV3WithoutGroups(const std::string& model_type, bool normalised) {
  Family family = DeepSeekV3(model_type);
  family.normalise = {{"norm_topk_prob"}, normalised};
  family.num_groups = {{"n_group"}, 1};
  family.topk_groups = {{"topk_group"}, 1};
  return family;
}

// Experts in all layers.
Family SolarOpen() {
  Family family = DeepSeekV3WithoutGroups("solar_open", true);
  family.moe_layers.first = {{"first_k_dense_replace"}, 0};
  return family;
}

Family ExaoneMoe() {
  Family family = DeepSeekV3WithoutGroups("exaone_moe", true);
  family.num_shared_experts = {{"num_shared_experts"}, 0};
  family.selection_bias = {"e_score_correction_bias", "gate.e_score_correction_bias"};
  return family;
}

// No shared experts, and a list of what the layers are.
Family MiMoV2Flash() {
  Family family = DeepSeekV3WithoutGroups("mimo_v2_flash", true);
  family.moe_layers.kinds.names.push_back("moe_layer_freq");
  family.moe_layers.kind_names["0"] = LayerKind::kDense;
  family.moe_layers.kind_names["1"] = LayerKind::kMoe;
  family.moe_layers.period = {{}, 1};
  return family;
}

Family Afmoe() {
  Family family = DeepSeekLike("afmoe");
  family.gate = SigmoidGate(1e-20f);
  family.choices = {Only("score_func", "sigmoid"), Only("route_norm", "true")};
  family.scale = {{"route_scale"}, {}};
  family.num_shared_experts = {{"num_shared_experts"}, 0};
  family.moe_layers = {.first = {{"num_dense_layers"}, {}}};
  family.router_weight = {"router.gate.weight"};
  family.selection_bias = {"expert_bias"};
  return family;
}

// Capped logits, and a scale on the routed experts' sum.
Family Laguna() {
  Family family = DeepSeekLike("laguna");
  family.gate = SigmoidGate(0.0f);
  family.choices = {Only("moe_apply_router_weight_on_input", "false")};
  family.scale = {{}, 1.0};
  family.routed_scale = {{"moe_routed_scaling_factor"}, {}};
  family.softcap = {{"moe_router_logit_softcapping"}, 0.0};
  family.shared_intermediate_size = {{"shared_expert_intermediate_size"}, {}};
  family.num_shared_experts = {{}, 1};
  family.selection_bias = {"experts.e_score_correction_bias", "gate.e_score_correction_bias"};
  family.shared_layouts = {Mlp("shared_expert."), Mlp("shared_experts.")};
  return family;
}

Family Mellum() {
  Family family = Qwen3Moe();
  family.model_type = "mellum";
  family.moe_layers = {.kinds = MlpLayerTypes(), .kind_names = SparseAndDense()};
  family.normalise = {{"norm_topk_prob"}, {}};
  return family;
}

// Softmax scores, and masked experts that may still win.
Family Mistral4() {
  Family family = DeepSeekV3WithoutGroups("mistral4", true);
  family.gate.score = ScoreFunction::kSoftmax;
  family.gate.has_selection_bias = false;
  family.gate.mask_fill = MaskFill::kZero;
  family.choices = {};
  family.moe_layers.first = {{"first_k_dense_replace"}, 0};
  family.selection_bias = {};
  return family;
}

Family HunYuanV3() {
  Family family = DeepSeekLike("hy_v3");
  family.gate = SigmoidGate(1e-20f);
  family.scale = {{"router_scaling_factor"}, {}};
  family.num_shared_experts = {{"num_shared_experts"}, 1};
  family.moe_layers.first = {{"first_k_dense_replace"}, 1};
  family.router_weight = {"router.gate.weight", "gate.weight"};
  family.selection_bias = {"expert_bias", "e_score_correction_bias"};
  family.shared_layouts = {Mlp("shared_mlp."), Mlp("shared_experts.")};
  return family;
}

// The reference takes both widths from intermediate_size; files that say something else in
// moe_intermediate_size are refused as contradicting themselves.
Family HunYuanV1() {
  const Key<int64_t> width = {{"moe_intermediate_size", "intermediate_size"}, {}, {}, true};
  return {
      .model_type = "hunyuan_v1_moe",
      .intermediate_size = width,
      .num_experts = {{"num_experts", "num_local_experts"}, {}, {}, true},
      .top_k = {{"moe_topk", "num_experts_per_tok"}, {}, {}, true},
      .dense_intermediate_size = {{"intermediate_size"}, {}},
      .shared_intermediate_size = width,
      .num_shared_experts = {{"num_shared_expert"}, 1, {}, true},
      .moe_layers = {.first = {{"moe_layer_num_skipped"}, 0}},
      .gate = SoftmaxGate(),
      .choices = {Only("use_mixed_mlp_moe", "true"), Only("mlp_bias", "false")},
      .router_weight = {"gate.wg.weight"},
      .layouts = {PerExpert(), Fused()},
      .shared_layouts = {Mlp("shared_mlp.")},
      .dense_layouts = {Mlp()},
  };
}

// Interleaved gate and up columns, biases everywhere, a clamped activation.
Family GptOss() {
  ExpertLayout fused = FusedTransposed();
  fused.order = GateUpOrder::kInterleaved;
  fused.gate_up_bias = "experts.gate_up_proj_bias";
  fused.down_bias = "experts.down_proj_bias";
  RouterDescriptor gate = TopKThenSoftmaxGate();
  gate.has_logits_bias = true;
  return {
      .model_type = "gpt_oss",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_local_experts", "num_experts"}, {}},
      .top_k = {{"num_experts_per_tok", "experts_per_token"}, {}},
      .gate = gate,
      .experts = {.has_bias = true},
      .activations = {{"silu", Activation::kClampedSwishGlu}},
      .activation_alpha = {{"swiglu_alpha"}, 1.702},
      .activation_limit = {{"swiglu_limit"}, 7.0},
      .router_weight = {"router.weight"},
      .logits_bias = {"router.bias"},
      .layouts = {fused},
  };
}

// The weight multiplies the expert's input.
Family Llama4() {
  RouterDescriptor gate = {.score = ScoreFunction::kSigmoid, .order = ScoreOrder::kTopKThenScore};
  gate.weigh_input = true;
  return {
      .model_type = "llama4_text",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_local_experts", "num_experts"}, {}},
      .dense_intermediate_size = {{"intermediate_size_mlp"}, {}},
      .shared_intermediate_size = {{"intermediate_size"}, {}},
      .moe_layers = {.moe_list = {{"moe_layers"}, {}},
                     .period = {{"interleave_moe_layer_step"}, 1},
                     .phase = 1},
      .gate = gate,
      .blocks = {"feed_forward."},
      .router_weight = {"router.weight"},
      .layouts = {FusedTransposed(), PerExpert()},  // the latter where linears were quantised
      .shared_layouts = {Mlp("shared_expert.")},
      .dense_layouts = {Mlp()},
  };
}

Family GraniteMoe() {
  const std::string block = "block_sparse_moe.";
  return {
      .model_type = "granitemoe",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_local_experts", "num_experts"}, {}},
      .gate = TopKThenSoftmaxGate(),
      .blocks = {""},
      .parts_of_block = {block, "shared_mlp."},
      .router_weight = {block + "router.layer.weight", block + "router.weight"},
      .layouts = {{.name = "stacked",
                   .gate_up = block + "input_linear.weight",
                   .down = block + "output_linear.weight"},
                  Fused(block)},
  };
}

Family GraniteMoeShared() {
  Family family = GraniteMoe();
  family.model_type = "granitemoeshared";
  family.shared_intermediate_size = {{"shared_intermediate_size"}, 0};
  family.shared_layouts = {
      {.gate_up = "shared_mlp.input_linear.weight", .down = "shared_mlp.output_linear.weight"}};
  return family;
}

Family Jamba() {
  return {
      .model_type = "jamba",
      .intermediate_size = {{"intermediate_size"}, {}},
      .num_experts = {{"num_experts", "num_local_experts"}, {}},
      .moe_layers = {.period = {{"expert_layer_period"}, 2},
                     .offset = {{"expert_layer_offset"}, 1}},
      .gate = {.score = ScoreFunction::kSoftmax},
      .blocks = {"feed_forward."},
      .router_weight = {"router.weight"},
      .layouts = {PerExpert(), Fused()},
      .dense_layouts = {Mlp()},
  };
}

// All experts of a layer are one matrix, the down projection stored as the others are.
Family Dbrx() {
  RouterDescriptor gate = SoftmaxGate();
  gate.norm = WeightNorm::kPNorm;
  return {
      .model_type = "dbrx",
      .num_hidden_layers = {{"n_layers"}, {}},
      .hidden_size = {{"d_model"}, {}},
      .intermediate_size = {{"ffn_config.ffn_hidden_size"}, {}},
      .num_experts = {{"ffn_config.moe_num_experts"}, {}},
      .top_k = {{"ffn_config.moe_top_k"}, {}},
      .gate = gate,
      .norm_p = {{"ffn_config.moe_normalize_expert_weights"}, 1.0, 0.0},
      .activation = {{"ffn_config.ffn_act_fn.name"}, "silu"},
      .layer_prefixes = {"transformer.blocks.{layer}."},
      .blocks = {"ffn."},
      .router_weight = {"router.layer.weight"},
      .layouts = {{.name = "joined",
                   .gate = "experts.mlp.w1",
                   .up = "experts.mlp.v1",
                   .down = "experts.mlp.w2",
                   .down_transposed = true,
                   .joined = true}},
  };
}

Family Ernie45Moe() {
  RouterDescriptor gate = SoftmaxGate();
  gate.has_selection_bias = true;
  gate.norm = WeightNorm::kSumClamped;
  return {
      .model_type = "ernie4_5_moe",
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"moe_num_experts", "num_experts"}, {}},
      .top_k = {{"moe_k", "num_experts_per_tok"}, {}},
      .dense_intermediate_size = {{"intermediate_size"}, {}},
      .shared_intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_shared_experts = {{"moe_num_shared_experts"}, 0},
      .moe_layers = {.first = {{"moe_layer_start_index"}, 1},
                     .last = {{"moe_layer_end_index"}, -1},
                     .period = {{"moe_layer_interval"}, 1},
                     .phase = 1},
      .gate = gate,
      .choices = {Only("use_bias", "false")},
      .norm_epsilon = {{"moe_norm_min"}, 1e-12},
      .selection_bias = {"moe_statics.e_score_correction_bias",
                         "gate.moe_statics.e_score_correction_bias"},
      .layouts = {PerExpert(), Fused()},
      .shared_layouts = {Mlp("shared_experts.")},
      .dense_layouts = {Mlp()},
  };
}

// Every layer is one thing only, a mixer: attention, a state space, a dense MLP or experts.
Family NemotronH() {
  Family family = DeepSeekV3WithoutGroups("nemotron_h", true);
  family.shared_intermediate_size = {{"moe_shared_expert_intermediate_size"}, {}};
  family.num_shared_experts = {{}, 1};
  family.moe_layers = {
      .kinds = {{"layers_block_type", "layer_types", "hybrid_override_pattern"}, {}},
      .kind_names = {{"E", LayerKind::kMoe},
                     {"moe", LayerKind::kMoe},
                     {"-", LayerKind::kDense},
                     {"mlp", LayerKind::kDense},
                     {"M", {}},
                     {"mamba", {}},
                     {"linear_attention", {}},
                     {"*", {}},
                     {"attention", {}},
                     {"full_attention", {}}}};
  family.experts.gated = false;
  family.choices = {Only("mlp_bias", "false"), Only("moe_latent_size", "none")};
  family.activation = {{"mlp_hidden_act"}, "relu2"};
  family.activations = {{"relu2", Activation::kRelu2}};
  family.layer_prefixes = {"backbone.layers.{layer}.", "model.layers.{layer}."};
  family.blocks = {"mixer."};
  family.layouts = {UpDown("per-expert", "experts.{expert}.", ".weight"),
                    UpDown("fused", "experts.", "")};
  family.shared_layouts = {UpDown("", "shared_experts.", ".weight")};
  family.dense_layouts = {UpDown("", "", ".weight")};
  return family;
}

Family Lfm2Moe() {
  return {
      .model_type = "lfm2_moe",
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"num_experts", "num_local_experts"}, {}},
      .dense_intermediate_size = {{"intermediate_size"}, {}},
      .moe_layers = {.first = {{"num_dense_layers"}, {}}},
      .gate = SigmoidGate(1e-6f),
      .choices = {SelectionBias("use_expert_bias")},
      .normalise = {{"norm_topk_prob"}, true},
      .scale = {{"routed_scaling_factor"}, 1.0},
      .blocks = {"feed_forward."},
      .selection_bias = {"expert_bias"},
      .layouts = {PerExpert("w1", "w3", "w2"), Fused()},
      .dense_layouts = {Separate("", "", "w1", "w3", "w2")},
  };
}

// The dense MLP beside the experts of every layer, with norms of its own, is no part of the block.
Family Gemma4() {
  RouterDescriptor gate = SoftmaxGate();
  gate.has_per_expert_scale = true;
  gate.input_norm.present = true;
  return {
      .model_type = "gemma4_text",
      .intermediate_size = {{"moe_intermediate_size"}, {}},
      .num_experts = {{"num_experts", "num_local_experts"}, {}},
      .top_k = {{"top_k_experts"}, {}},
      .gate = gate,
      .expert_input_norm = {.present = true},
      .choices = {{.name = "enable_moe_block", .fallback = "false", .values = {{"true", nullptr}}}},
      .input_norm_epsilon = {{"rms_norm_eps"}, 1e-6},
      .input_norm_by_root = true,
      .activation = {{"hidden_activation"}, "gelu_pytorch_tanh"},
      .activations = {{"gelu_pytorch_tanh", Activation::kGeluTanhGlu}},
      .blocks = {""},
      .parts_of_block = {"router.", "experts."},
      .router_weight = {"router.proj.weight"},
      .per_expert_scale = {"router.per_expert_scale"},
      .input_norm = {"router.scale"},
      .expert_input_norm_weight = {"pre_feedforward_layernorm_2.weight"},
      .layouts = {Fused()},
  };
}

// Some of the experts return their input. The two dense MLPs of a layer are no part of the block.
Family LongcatFlash() {
  return {
      .model_type = "longcat_flash",
      .num_hidden_layers = {{"num_layers"}, {}},
      .intermediate_size = {{"expert_ffn_hidden_size"}, {}},
      .num_experts = {{"n_routed_experts"}, {}},
      .top_k = {{"moe_topk", "num_experts_per_tok"}, {}},
      .identity_experts = {{"zero_expert_num"}, 0},
      .gate = {.score = ScoreFunction::kSoftmax, .has_selection_bias = true},
      .choices = {Only("zero_expert_type", "identity"), Only("router_bias", "false"),
                  Only("norm_topk_prob", "false")},
      .scale = {{"routed_scaling_factor"}, {}},
      .router_weight = {"router.classifier.weight"},
      .selection_bias = {"router.e_score_correction_bias"},
      .layouts = {PerExpert(), Fused()},
  };
}

Family Cohere2Moe() {
  Family family = DeepSeekLike("cohere2_moe");
  family.intermediate_size = {{"intermediate_size"}, {}};
  family.num_experts = {{"num_experts", "num_local_experts"}, {}};
  family.dense_intermediate_size = {{"prefix_dense_intermediate_size"}, 0};
  family.shared_intermediate_size = {{"intermediate_size"}, {}};
  family.num_shared_experts = {{"num_shared_experts"}, 0};
  family.moe_layers.first = {{"first_k_dense_replace"}, 0};
  family.moe_layers.period = {{}, 1};
  family.gate = {.order = ScoreOrder::kTopKThenScore};
  family.choices = {{.name = "expert_selection_fn",
                     .fallback = "softmax",
                     .values = {{"softmax", nullptr},
                                {"sigmoid",
                                 [](LayerDescription& layer) {
                                   layer.router.score = ScoreFunction::kSigmoid;
                                   layer.router.norm = WeightNorm::kSum;
                                 }}}},
                    {.name = "shared_expert_combination_strategy",
                     .fallback = "average",
                     .values = {{"sum", nullptr}, {"average", [](LayerDescription& layer) {
                                                     layer.shared.averaged = true;
                                                   }}}}};
  family.normalise = {{"norm_topk_prob"}, true};
  family.scale = {{}, 1.0};
  return family;
}

std::vector<Family> MakeFamilies() {
  return {
      Mixtral(),
      Qwen3Moe(),
      Olmoe(),
      Qwen2Moe(),
      Qwen3Next(),
      Qwen35Moe(),
      Inside(Qwen35Moe(), "text_config", "qwen3_5_moe"),
      Qwen3VlMoe(),
      Inside(Qwen3VlMoe(), "text_config", "qwen3_vl_moe"),
      DeepSeekV2(),
      DeepSeekV3(),
      DeepSeekV3("deepseek_v32"),
      DeepSeekV3WithoutGroups("kimi_k2", true),
      DeepSeekV3WithoutGroups("glm4_moe", true),
      DeepSeekV3WithoutGroups("glm4_moe_lite", true),
      DeepSeekV3WithoutGroups("glm_moe_dsa", true),
      DeepSeekV3WithoutGroups("dots1", false),
      SolarOpen(),
      ExaoneMoe(),
      MiMoV2Flash(),
      Afmoe(),
      Laguna(),
      Mellum(),
      Renamed(Olmoe(), "flex_olmo"),
      GptOss(),
      Llama4(),
      Inside(Llama4(), "text_config", "llama4"),
      GraniteMoe(),
      GraniteMoeShared(),
      Renamed(GraniteMoeShared(), "granitemoehybrid"),
      Jamba(),
      Dbrx(),
      Ernie45Moe(),
      HunYuanV1(),
      MiniMax(),
      Renamed(MiniMax(), "minimax_text_01"),
      Renamed(MiniMax(), "minimax_m1"),
      MiniMaxM2(),
      PhiMoe(),
      NemotronH(),
      Lfm2Moe(),
      Gemma4(),
      Inside(Gemma4(), "text_config", "gemma4"),
      HunYuanV3(),
      Mistral4(),
      LongcatFlash(),
      Cohere2Moe(),
      Refused("zaya", "its gate carries a state from layer to layer"),
      Refused("deepseek_v4", "it chooses experts by the token's id and stores them in fp4"),
      Refused("kimi_k25", "its experts are packed int4"),
      Refused("kimi_k3",
              "its experts work in a latent space, with an activation of their own (situ)"),
      Refused("inkling", "its shared experts share the routed ones' softmax"),
      Refused("inkling_text", "its shared experts share the routed ones' softmax"),
      Refused("jetmoe", "its blocks add a bias, and attention is routed too"),
      Refused("axk1", "a norm is the last part of its blocks"),
      Refused("switch_transformers", "its experts have a capacity"),
      Refused("nllb_moe", "its experts have a capacity"),
  };
}

// ---- Reading a configuration
// ---------------------------------------------------------------------

absl::Status Invalid(const std::string& key, const std::string& expected,
                     const std::string& given) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": expected ", expected, ", given ", given));
}

// What `path` (names joined by dots) leads to, a JSON null included, or a null pointer.
const json* Find(const json& config, const std::string& path) {
  const json* value = &config;
  for (const absl::string_view name : absl::StrSplit(path, '.')) {
    if (!value->is_object()) return nullptr;
    const auto found = value->find(std::string(name));
    if (found == value->end()) return nullptr;
    value = &*found;
  }
  return value;
}

// The same, or a null pointer where it is null.
const json* Look(const json& config, const std::string& path) {
  const json* value = Find(config, path);
  return value == nullptr || value->is_null() ? nullptr : value;
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

// Names; integers are names too, and a string is a list of its characters.
absl::Status Convert(const std::string& name, const json& value, std::vector<std::string>* result) {
  if (value.is_string()) {
    for (const char c : value.get_ref<const std::string&>()) result->emplace_back(1, c);
    return absl::OkStatus();
  }
  if (!value.is_array()) return Invalid(name, "a list of strings or a string", value.dump());
  for (const json& element : value) {
    if (element.is_number_integer()) {
      result->push_back(element.dump());
    } else {
      RETURN_IF_ERROR(Convert(name, element, &result->emplace_back()));
    }
  }
  return absl::OkStatus();
}

// Which layer a value is for, where values may differ by layer.
struct LayerIndex {
  int64_t layer = 0;
  int64_t num_layers = 0;
};

// What the first of the names that is there says; nothing where none is.
template <typename T>
absl::StatusOr<std::optional<T>> GetOptional(const json& config, const Key<T>& key,
                                             LayerIndex index = {}) {
  const std::string* taken = nullptr;
  std::optional<T> result;
  bool null = false;
  for (const std::string& name : key.names) {
    const json* value = Find(config, name);
    if (value == nullptr) continue;
    if (value->is_null()) {
      null = true;
      continue;
    }
    if (key.per_layer && value->is_array()) {
      if (static_cast<int64_t>(value->size()) < index.num_layers) {
        return Invalid(name, absl::StrCat("an entry for each of ", index.num_layers, " layers"),
                       absl::StrCat(value->size()));
      }
      value = &(*value)[static_cast<size_t>(index.layer)];
    }
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
  if (!result && null) result = key.when_null;
  return result;
}

template <typename T>
absl::StatusOr<T> Get(const json& config, const Key<T>& key, LayerIndex index = {}) {
  ASSIGN_OR_RETURN(std::optional<T> result, GetOptional(config, key, index));
  if (result) return *std::move(result);
  if (key.fallback) return *key.fallback;
  return absl::InvalidArgumentError(absl::StrCat(
      absl::StrJoin(key.names, " or "), ": missing, and this model type has no default for it"));
}

// An integer from `least` to `limit`.
absl::StatusOr<int64_t> GetInteger(const json& config, const Key<int64_t>& key, int64_t least,
                                   LayerIndex index = {}, int64_t limit = kMaxExtent) {
  ASSIGN_OR_RETURN(const int64_t value, Get(config, key, index));
  if (value < least || value > limit) {
    return Invalid(absl::StrJoin(key.names, " or "),
                   absl::StrCat("an integer from ", least, " to ", limit), absl::StrCat(value));
  }
  return value;
}
absl::StatusOr<int64_t> GetPositive(const json& config, const Key<int64_t>& key,
                                    LayerIndex index = {}) {
  return GetInteger(config, key, 1, index);
}

absl::StatusOr<float> GetFloat(const json& config, const Key<double>& key) {
  ASSIGN_OR_RETURN(const double value, Get(config, key));
  if (!std::isfinite(static_cast<float>(value))) {
    return Invalid(absl::StrJoin(key.names, " or "), "a number that fits in fp32",
                   absl::StrCat(value));
  }
  return static_cast<float>(value);
}

// A float that may not be negative.
absl::StatusOr<float> GetMagnitude(const json& config, const Key<double>& key) {
  ASSIGN_OR_RETURN(const float value, GetFloat(config, key));
  if (value < 0.0f) {
    return Invalid(absl::StrJoin(key.names, " or "), "a number that is not negative",
                   absl::StrCat(value));
  }
  return value;
}

absl::Status Choose(const json& config, const Family& family, LayerDescription* layer) {
  for (const Choice& choice : family.choices) {
    const json* value = Look(config, choice.name);
    const std::string given = value == nullptr     ? choice.fallback
                              : value->is_string() ? value->get<std::string>()
                                                   : value->dump();
    const auto known = choice.values.find(given);
    if (known == choice.values.end()) {
      std::vector<std::string> supported;
      for (const auto& [text, unused] : choice.values) supported.push_back(text);
      return absl::UnimplementedError(
          absl::StrCat(choice.name, ": '", given, "' is not supported by model type '",
                       family.model_type, "' (supported: ", absl::StrJoin(supported, ", "), ")"));
    }
    if (known->second) known->second(*layer);
  }
  return absl::OkStatus();
}

// Completes what family and choices say of the gate.
absl::Status DescribeGate(const json& config, const Family& family, LayerIndex index,
                          int64_t hidden_size, RouterDescriptor* gate) {
  ASSIGN_OR_RETURN(const int64_t num_experts,
                   GetInteger(config, family.num_experts, 1, index, kMaxExperts));
  ASSIGN_OR_RETURN(const int64_t top_k, GetPositive(config, family.top_k, index));
  ASSIGN_OR_RETURN(const int64_t identity,
                   GetInteger(config, family.identity_experts, 0, {}, kMaxExperts));
  ASSIGN_OR_RETURN(const bool normalise, Get(config, family.normalise));
  ASSIGN_OR_RETURN(gate->scale, GetFloat(config, family.scale));
  ASSIGN_OR_RETURN(gate->routed_scale, GetFloat(config, family.routed_scale));
  ASSIGN_OR_RETURN(gate->softcap, GetMagnitude(config, family.softcap));
  ASSIGN_OR_RETURN(gate->jitter, GetMagnitude(config, family.jitter));
  if (!normalise) gate->norm = WeightNorm::kNone;
  if (!family.norm_epsilon.names.empty()) {
    ASSIGN_OR_RETURN(gate->norm_epsilon, GetMagnitude(config, family.norm_epsilon));
  }
  if (!family.norm_p.names.empty()) {
    ASSIGN_OR_RETURN(gate->norm_p, GetFloat(config, family.norm_p));
    if (gate->norm_p == 0.0f) {
      gate->norm = WeightNorm::kNone;
    } else if (gate->norm_p != 1.0f && gate->norm_p != 2.0f) {
      return absl::UnimplementedError(absl::StrCat(absl::StrJoin(family.norm_p.names, " or "),
                                                   ": a norm of order ", gate->norm_p,
                                                   " is not supported (supported: 1, 2)"));
    }
  }
  if (gate->input_norm.present) {
    ASSIGN_OR_RETURN(gate->input_norm.epsilon, GetMagnitude(config, family.input_norm_epsilon));
    if (family.input_norm_by_root) {
      gate->input_norm.factor = 1.0f / std::sqrt(static_cast<float>(hidden_size));
    }
  }
  if (top_k > num_experts + identity) {
    return absl::InvalidArgumentError(
        absl::StrCat("K > E: ", absl::StrJoin(family.top_k.names, "/"), " is ", top_k, ", ",
                     absl::StrJoin(family.num_experts.names, "/"), " is ", num_experts,
                     identity == 0 ? "" : absl::StrCat(", identity experts are ", identity)));
  }
  if (gate->score == ScoreFunction::kSparsemixer && top_k != 2) {
    return absl::UnimplementedError(absl::StrCat(absl::StrJoin(family.top_k.names, "/"),
                                                 ": model type '", family.model_type,
                                                 "' chooses 2 experts, not ", top_k));
  }
  gate->num_experts = static_cast<int32_t>(num_experts);
  gate->top_k = static_cast<int32_t>(top_k);
  gate->identity_experts = static_cast<int32_t>(identity);
  if (gate->group_score == GroupScore::kNone) return absl::OkStatus();

  ASSIGN_OR_RETURN(const int64_t num_groups, GetPositive(config, family.num_groups));
  ASSIGN_OR_RETURN(const int64_t topk_groups, GetPositive(config, family.topk_groups));
  const int64_t num_ids = num_experts + identity;
  if (num_ids % num_groups != 0) {
    return absl::InvalidArgumentError(absl::StrCat(absl::StrJoin(family.num_groups.names, "/"),
                                                   ": ", num_ids, " experts do not divide into ",
                                                   num_groups, " groups"));
  }
  const int64_t group_size = num_ids / num_groups;
  if (topk_groups > num_groups || top_k > topk_groups * group_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        absl::StrJoin(family.top_k.names, "/"), " and ",
        absl::StrJoin(family.topk_groups.names, "/"), ": top ", top_k, " of the best ", topk_groups,
        " of ", num_groups, " groups of ", group_size, " experts: there are too few"));
  }
  gate->num_groups = static_cast<int32_t>(num_groups);
  gate->topk_groups = static_cast<int32_t>(topk_groups);
  if (num_groups == 1) gate->group_score = GroupScore::kNone;
  if (gate->group_score == GroupScore::kTop2Sum && group_size < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(absl::StrJoin(family.num_groups.names, "/"), ": ", num_groups,
                     " groups of one expert have no sum of their best two scores"));
  }
  return absl::OkStatus();
}

absl::Status DescribeActivation(const json& config, const Family& family,
                                ExpertDescriptor* experts) {
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
  experts->activation = known->second;
  ASSIGN_OR_RETURN(experts->activation_alpha, GetFloat(config, family.activation_alpha));
  ASSIGN_OR_RETURN(experts->activation_limit, GetMagnitude(config, family.activation_limit));
  if (HasLimit(experts->activation) && experts->activation_limit == 0.0f) {
    return Invalid(absl::StrJoin(family.activation_limit.names, " or "), "a positive number", "0");
  }
  return absl::OkStatus();
}

// Refuses sizes whose bits could not be counted in 63 bits.
absl::Status CheckSize(int64_t count, const ExpertDescriptor& experts) {
  const int64_t bits[] = {count, 3, experts.intermediate_size, experts.hidden_size,
                          BitsOf(DType::kF32)};
  if (NumElements(bits) >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(count, " experts of hidden size ", experts.hidden_size,
                   " and intermediate size ", experts.intermediate_size, " do not fit in 63 bits"));
}

absl::StatusOr<LayerDescription> DescribeLayer(const json& config, const Family& family,
                                               LayerKind kind, LayerIndex index) {
  LayerDescription layer = {.layer = static_cast<int32_t>(index.layer),
                            .kind = kind,
                            .router = family.gate,
                            .experts = family.experts,
                            .shared = family.shared,
                            .expert_input_norm = family.expert_input_norm};
  ASSIGN_OR_RETURN(const int64_t hidden_size, GetPositive(config, family.hidden_size));
  ASSIGN_OR_RETURN(const int64_t width, GetPositive(config, family.intermediate_size, index));
  RETURN_IF_ERROR(Choose(config, family, &layer));
  layer.experts.hidden_size = hidden_size;
  RETURN_IF_ERROR(DescribeActivation(config, family, &layer.experts));
  layer.shared.experts = layer.experts;
  if (kind == LayerKind::kDense) {
    ASSIGN_OR_RETURN(const int64_t dense, GetInteger(config, family.dense_intermediate_size, 0));
    layer.router = {};
    layer.expert_input_norm = {};
    layer.shared = {.count = 1, .experts = layer.experts};
    layer.shared.experts.intermediate_size = dense == 0 ? width : dense;
    RETURN_IF_ERROR(CheckSize(1, layer.shared.experts));
    return layer;
  }

  layer.experts.intermediate_size = width;
  if (layer.expert_input_norm.present) {
    ASSIGN_OR_RETURN(layer.expert_input_norm.epsilon,
                     GetMagnitude(config, family.input_norm_epsilon));
  }
  RETURN_IF_ERROR(DescribeGate(config, family, index, hidden_size, &layer.router));
  RETURN_IF_ERROR(CheckSize(layer.router.num_experts, layer.experts));
  ASSIGN_OR_RETURN(const int64_t shared_width,
                   GetInteger(config, family.shared_intermediate_size, 0, index));
  ASSIGN_OR_RETURN(const int64_t num_shared,
                   GetInteger(config, family.num_shared_experts, 0, index));
  if (shared_width * num_shared > kMaxExtent) {
    return Invalid(
        absl::StrJoin(family.num_shared_experts.names, " or "),
        absl::StrCat("at most ", kMaxExtent / shared_width, " experts of size ", shared_width),
        absl::StrCat(num_shared));
  }
  if (shared_width * num_shared == 0) {
    layer.shared = {};
    return layer;
  }
  layer.shared.count = 1;  // joined in the files, and equal to what they would be one by one
  layer.shared.experts.intermediate_size = shared_width * num_shared;
  RETURN_IF_ERROR(CheckSize(1, layer.shared.experts));
  return layer;
}

// What each decoder layer is by its name in a list of the configuration; nothing if there is none.
absl::StatusOr<std::optional<std::vector<KindOfLayer>>> NamedKinds(const json& config,
                                                                   const LayerRule& rule) {
  std::optional<std::vector<KindOfLayer>> result;
  for (const std::string& key : rule.kinds.names) {
    if (Look(config, key) == nullptr) continue;
    ASSIGN_OR_RETURN(const std::vector<std::string> names,
                     Get(config, Key<std::vector<std::string>>{{key}, {}}));
    std::vector<KindOfLayer> kinds;
    for (const std::string& name : names) {
      const auto known = rule.kind_names.find(name);
      if (known == rule.kind_names.end()) {
        std::vector<std::string> supported;
        for (const auto& [text, unused] : rule.kind_names) supported.push_back(text);
        return absl::UnimplementedError(
            absl::StrCat(key, ": '", name,
                         "' is not supported (supported: ", absl::StrJoin(supported, ", "), ")"));
      }
      kinds.push_back(known->second);
    }
    if (result && *result != kinds) {
      return absl::InvalidArgumentError(
          absl::StrCat(absl::StrJoin(rule.kinds.names, " and "), " contradict each other"));
    }
    result = std::move(kinds);
  }
  return result;
}

// What each decoder layer is.
absl::StatusOr<std::vector<KindOfLayer>> Kinds(const json& config, const Family& family) {
  const LayerRule& rule = family.moe_layers;
  ASSIGN_OR_RETURN(std::optional<std::vector<KindOfLayer>> named, NamedKinds(config, rule));
  Key<int64_t> count = family.num_hidden_layers;
  if (named) count.fallback = static_cast<int64_t>(named->size());
  ASSIGN_OR_RETURN(const int64_t num_layers, GetInteger(config, count, 1, {}, kMaxLayers));
  if (named) {
    if (static_cast<int64_t>(named->size()) < num_layers) {
      return Invalid(absl::StrJoin(rule.kinds.names, " or "),
                     absl::StrCat("an entry for each of ", num_layers, " layers"),
                     absl::StrCat(named->size()));
    }
    named->resize(static_cast<size_t>(num_layers));
    return *std::move(named);
  }

  std::vector<KindOfLayer> kinds(static_cast<size_t>(num_layers), LayerKind::kDense);
  ASSIGN_OR_RETURN(const std::optional<std::vector<int64_t>> moe_list,
                   GetOptional(config, rule.moe_list));
  if (moe_list) {
    for (const int64_t i : *moe_list) {
      if (i < 0 || i >= num_layers) {
        return Invalid(absl::StrJoin(rule.moe_list.names, " or "),
                       absl::StrCat("layers below ", num_layers), absl::StrCat(i));
      }
      kinds[static_cast<size_t>(i)] = LayerKind::kMoe;
    }
    return kinds;
  }
  ASSIGN_OR_RETURN(const int64_t first, Get(config, rule.first));
  ASSIGN_OR_RETURN(int64_t last, Get(config, rule.last));
  if (last == -1) last = num_layers - 1;
  ASSIGN_OR_RETURN(const int64_t period, GetPositive(config, rule.period));
  ASSIGN_OR_RETURN(const int64_t offset, GetInteger(config, rule.offset, 0, {}, period - 1));
  ASSIGN_OR_RETURN(const std::vector<int64_t> dense_list, Get(config, rule.dense_list));
  const std::set<int64_t> dense(dense_list.begin(), dense_list.end());
  for (int64_t i = std::max<int64_t>(first, 0); i < num_layers && i <= last; ++i) {
    if ((i + rule.phase) % period != offset || dense.count(i) != 0) continue;
    kinds[static_cast<size_t>(i)] = LayerKind::kMoe;
  }
  return kinds;
}

// What the configuration, or its section for the language model, says of quantisation.
absl::StatusOr<Quantization> DescribeQuantization(const json& config, const json& section) {
  const json* const outer = Look(config, "quantization_config");
  const json* const inner = Look(section, "quantization_config");
  if (outer != nullptr && inner != nullptr && *outer != *inner) {
    return absl::InvalidArgumentError(
        "quantization_config: the configuration and its section for the language model contradict "
        "each other");
  }
  const json* const object = inner != nullptr ? inner : outer;
  return object == nullptr ? Quantization{} : ReadQuantizationConfig(*object);
}

}  // namespace

absl::Span<const Family> BuiltInFamilies() {
  static const auto* families = new std::vector<Family>(MakeFamilies());
  return *families;
}

absl::StatusOr<DescribedModel> DescribeModel(const json& config,
                                             absl::Span<const Family> families) {
  if (!config.is_object()) return Invalid("the file", "an object", config.type_name());
  const Key<std::string> type_key = {{"model_type"}, {}};
  ASSIGN_OR_RETURN(const std::string model_type, Get(config, type_key));
  const auto find = [&](const std::string& type) {
    return std::find_if(families.begin(), families.end(),
                        [&](const Family& candidate) { return candidate.model_type == type; });
  };
  auto family = find(model_type);
  std::string section_name = family == families.end() ? "" : family->config_section;
  // A model of several parts, whose language model is of a family.
  if (family == families.end() && Look(config, "text_config.model_type") != nullptr) {
    ASSIGN_OR_RETURN(const std::string text_type, Get(*Look(config, "text_config"), type_key));
    family = find(text_type);
    section_name = "text_config";
  }
  if (family == families.end()) {
    std::vector<std::string> supported;
    for (const Family& candidate : families) {
      if (candidate.refused.empty()) supported.push_back(candidate.model_type);
    }
    return absl::UnimplementedError(
        absl::StrCat("model_type: '", model_type,
                     "' is not supported (supported: ", absl::StrJoin(supported, ", "), ")"));
  }
  if (!family->refused.empty()) {
    return absl::UnimplementedError(
        absl::StrCat("model_type: '", family->model_type, "' is not supported: ", family->refused));
  }
  DescribedModel model;
  const json* section = &config;
  if (!section_name.empty()) {
    section = Look(config, section_name);
    if (section == nullptr || !section->is_object()) {
      return Invalid(section_name, "an object",
                     section == nullptr ? "nothing" : section->type_name());
    }
  }
  ASSIGN_OR_RETURN(model.quantization, DescribeQuantization(config, *section));
  model.family = &*family;
  model.description.model_type = model_type;
  ASSIGN_OR_RETURN(const std::vector<KindOfLayer> kinds, Kinds(*section, *family));
  model.description.num_hidden_layers = static_cast<int32_t>(kinds.size());
  if (std::find(kinds.begin(), kinds.end(), LayerKind::kMoe) == kinds.end()) {
    return absl::InvalidArgumentError("no layer is a MoE layer");
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (!kinds[i]) continue;
    if (kinds[i] == LayerKind::kDense && family->dense_layouts.empty()) continue;
    const LayerIndex index = {static_cast<int64_t>(i), static_cast<int64_t>(kinds.size())};
    ASSIGN_OR_RETURN(LayerDescription layer, DescribeLayer(*section, *family, *kinds[i], index));
    model.description.layers.push_back(std::move(layer));
  }
  return model;
}

}  // namespace expertmesh
