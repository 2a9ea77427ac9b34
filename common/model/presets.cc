#include "common/model/presets.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/model/generated.h"
#include "common/model/registry.h"
#include "common/safetensors/strict_json.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr uint32_t kSeed = 0;

constexpr char kLlama4Debug[] = R"({"model_type": "llama4_text", "num_hidden_layers": 6,
    "hidden_size": 256, "intermediate_size": 512, "intermediate_size_mlp": 768,
    "num_local_experts": 8, "num_experts_per_tok": 1, "moe_layers": [1, 3, 5]})";

constexpr char kDeepSeekV3Debug[] = R"({"model_type": "deepseek_v2", "num_hidden_layers": 6,
    "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": false,
    "routed_scaling_factor": 1.0})";

std::vector<Preset> MakePresets() {
  return {
      {"llama4_debugmodel", "torchtitan's: 6 layers, 3 with 8 experts, top-1, the input weighed",
       kLlama4Debug, "native"},
      {"llama4_debugmodel_fp8", "the same in fp8_rowwise", kLlama4Debug, "fp8_rowwise"},
      {"deepseek_v3_debugmodel", "torchtitan's: 6 layers, 5 with 8 experts, top-3, softmax scores",
       kDeepSeekV3Debug, "native"},
      {"deepseek_v3_debugmodel_mxfp8", "the same in mxfp8", kDeepSeekV3Debug, "mxfp8"},
      {"gpt_oss_debugmodel", "torchtitan's: 4 layers of 8 experts, top-4, biases",
       R"({"model_type": "gpt_oss", "num_hidden_layers": 4, "hidden_size": 256,
           "intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 4})",
       "native"},
      {"olmoe_1b_7b_layer", "one layer in the shape of OLMoE-1B-7B",
       R"({"model_type": "olmoe", "num_hidden_layers": 1, "hidden_size": 2048,
           "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
           "norm_topk_prob": false})",
       "native"},
      {"qwen3_30b_a3b_layer", "one layer in the shape of Qwen3-30B-A3B",
       R"({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 2048,
           "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
           "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1,
           "mlp_only_layers": []})",
       "native"},
      {"mixtral_8x7b_layer", "one layer in the shape of Mixtral-8x7B",
       R"({"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 4096,
           "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2})",
       "native"},
      {"deepseek_v3_layer", "one layer in the shape of DeepSeek-V3",
       R"({"model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": 7168,
           "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
           "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 0,
           "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5})",
       "native"},
      {"llama4_scout_layer", "one layer in the shape of Llama-4-Scout",
       R"({"model_type": "llama4_text", "num_hidden_layers": 1, "hidden_size": 5120,
           "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
           "num_experts_per_tok": 1})",
       "native"},
      {"gpt_oss_20b_layer", "one layer in the shape of gpt-oss-20b",
       R"({"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 2880,
           "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4})",
       "native"},
  };
}

}  // namespace

absl::Span<const Preset> Presets() {
  static const auto* const presets = new std::vector<Preset>(MakePresets());
  return *presets;
}

absl::StatusOr<const Preset*> FindPreset(const std::string& name) {
  for (const Preset& preset : Presets()) {
    if (preset.name == name) return &preset;
  }
  return absl::NotFoundError(absl::StrCat(
      "--preset: expected one of ",
      absl::StrJoin(Presets(), ", ",
                    [](std::string* out, const Preset& preset) { out->append(preset.name); }),
      ", got '", name, "'"));
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenPreset(const Preset& preset) {
  ASSIGN_OR_RETURN(const nlohmann::json config, ParseStrictJson(preset.config));
  ASSIGN_OR_RETURN(const DescribedModel described, DescribeModel(config, BuiltInFamilies()));
  return GenerateCheckpoint(described.description, config.dump(), kSeed);
}

}  // namespace expertmesh
