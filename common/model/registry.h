// The model families that are supported, one entry of data each, and the reading of a config.json
// by such an entry. A new family is a new entry (and, where it does what no entry before it did, a
// new field); no code asks for a family's name.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/description.h"
#include "nlohmann/json_fwd.hpp"

namespace expertmesh {

// One value of the configuration: what the keys say, else the fallback. null counts as absent; keys
// that are present must agree; a value that is absent and has no fallback is refused.
template <typename T>
struct Key {
  std::vector<std::string> names = {};
  std::optional<T> fallback = {};
};

// Decoder layer i is MoE if i >= first, (i + phase) % period == 0, and dense_list does not name it.
struct MoeLayerRule {
  Key<int64_t> first = {{}, 0};
  Key<int64_t> period = {{}, 1};
  int64_t phase = 0;
  Key<std::vector<int64_t>> dense_list = {{}, std::vector<int64_t>{}};
};

// How the rows of a joined gate and up projection are ordered.
enum class GateUpOrder {
  kGateFirst,    // F gate rows, F up rows
  kUpFirst,      // F up rows, F gate rows
  kInterleaved,  // gate 0, up 0, gate 1, up 1, ...
};

// One arrangement of an expert's matrices in the files. Names follow the block's prefix; "{expert}"
// stands for the id, and a name without it is one tensor of all experts with a first dimension E.
struct ExpertLayout {
  std::string name = {};  // what Checkpoint::layout() reports
  std::string gate = {};  // [F, D] and up [F, D], or instead of both:
  std::string up = {};
  std::string gate_up = {};  // [2F, D]
  std::string down = {};     // [D, F]
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposed = false;  // every matrix is stored [in, out]
};

struct Family {
  std::string model_type = {};
  std::string config_section = {};  // object of config.json with the keys below; empty: all of it

  // Sizes.
  Key<int64_t> num_hidden_layers = {{"num_hidden_layers"}, {}};
  Key<int64_t> hidden_size = {{"hidden_size"}, {}};
  Key<int64_t> intermediate_size = {};  // of one expert
  Key<int64_t> num_experts = {};
  Key<int64_t> top_k = {{"num_experts_per_tok"}, {}};
  MoeLayerRule moe_layers = {};

  // The gate: what all models of the family share (sizes unset), and what their configuration says.
  RouterDescriptor gate = {};
  Key<bool> normalise = {{}, true};  // false: gate.norm does not apply
  Key<double> scale = {{}, 1.0};
  Key<int64_t> num_groups = {{}, 1};  // 1: gate.group_score does not apply
  Key<int64_t> topk_groups = {{}, 1};

  // The experts.
  Key<std::string> activation = {{"hidden_act"}, {}};
  std::map<std::string, Activation> activations = {{"silu", Activation::kSiluGlu}};

  // Tensors are called prefix + block + name; "{layer}" stands for the decoder index. The first
  // combination that a layer has is taken.
  std::vector<std::string> layer_prefixes = {"model.layers.{layer}.", "layers.{layer}."};
  std::vector<std::string> blocks = {"mlp."};
  std::vector<std::string> router_weight = {"gate.weight"};  // [E, D]
  std::vector<std::string> logits_bias = {};                 // [E], where gate.has_logits_bias
  std::vector<std::string> selection_bias = {};              // [E], where gate.has_selection_bias
  std::vector<std::string> per_expert_scale = {};            // [E], where gate.has_per_expert_scale
  std::vector<ExpertLayout> layouts = {};
};

// The supported families.
absl::Span<const Family> BuiltInFamilies();

// A configuration, understood.
struct DescribedModel {
  const Family* family = nullptr;  // one of those given
  // weight_dtype of the layers is not known yet: the files say it.
  ModelDescription description;
};

// Reads a parsed config.json. INVALID_ARGUMENT (a key that is missing, of the wrong type or
// impossible) or UNIMPLEMENTED (model type, activation, quantisation); the message names the key,
// what was expected and what was given.
absl::StatusOr<DescribedModel> DescribeModel(const nlohmann::json& config,
                                             absl::Span<const Family> families);

}  // namespace expertmesh
