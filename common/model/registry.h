// The model families that are supported, one entry of data each, and the reading of a config.json
// by such an entry. A new family is a new entry (and, where it does what no entry before it did, a
// new field); no code asks for a family's name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/description.h"
#include "common/model/quantization.h"
#include "nlohmann/json_fwd.hpp"

namespace expertmesh {

// One value of the configuration: what the keys say, else the fallback. A name with dots is a path
// through nested objects. null counts as absent unless `when_null` says what it means; keys that
// are present must agree; a value that is absent and has no fallback is refused.
template <typename T>
struct Key {
  std::vector<std::string> names = {};
  std::optional<T> fallback = {};
  std::optional<T> when_null = {};
  bool per_layer = false;  // the value may be a list, one for each decoder layer
};

// What a decoder layer can be; nothing: it has no feed-forward block, and is not served.
using KindOfLayer = std::optional<LayerKind>;

// Which decoder layers are MoE. Where `kinds` or `moe_list` is present it alone decides; otherwise
// layer i is MoE if first <= i <= last, (i + phase) % period == offset, and dense_list does not
// name it. All others are dense.
struct LayerRule {
  Key<std::vector<std::string>> kinds = {};  // one name per layer; a string is one name a character
  std::map<std::string, KindOfLayer> kind_names = {};
  Key<std::vector<int64_t>> moe_list = {};
  Key<int64_t> first = {{}, 0};
  Key<int64_t> last = {{}, -1};  // -1: the last one
  Key<int64_t> period = {{}, 1};
  Key<int64_t> offset = {{}, 0};
  int64_t phase = 0;
  Key<std::vector<int64_t>> dense_list = {{}, std::vector<int64_t>{}};
};

// A key that chooses between ways to compute. A value (its text, without quotes; `fallback` where
// the key is absent or null) that is not among `values` is refused by name.
struct Choice {
  std::string name = {};
  std::string fallback = {};
  std::map<std::string, std::function<void(LayerDescription&)>> values = {};  // may be empty
};

// How the rows of a joined gate and up projection are ordered.
enum class GateUpOrder {
  kGateFirst,    // F gate rows, F up rows
  kUpFirst,      // F up rows, F gate rows
  kInterleaved,  // gate 0, up 0, gate 1, up 1, ...
};

// One arrangement of an expert's matrices in the files. Names follow the block's prefix; "{expert}"
// stands for the id. Of routed experts a name without it is one tensor of all experts with a first
// dimension E.
struct ExpertLayout {
  std::string name = {};  // what Checkpoint::layout() reports
  std::string gate = {};  // [F, D] and up [F, D] (up alone where experts are not gated), or instead
  std::string up = {};
  std::string gate_up = {};    // [2F, D]
  std::string down = {};       // [D, F]
  std::string gate_bias = {};  // [F], where the experts have biases, and so on
  std::string up_bias = {};
  std::string gate_up_bias = {};  // [2F], in the order of gate_up
  std::string down_bias = {};     // [D]
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposed = false;       // every matrix is stored [in, out]
  bool down_transposed = false;  // down alone is
  bool joined = false;           // the first dimension is E times the matrix's instead of E
};

struct Family {
  std::string model_type = {};
  std::string refused = {};         // not empty: why no layer of this family is served
  std::string config_section = {};  // object of config.json with the keys below; empty: all of it

  // Sizes.
  Key<int64_t> num_hidden_layers = {{"num_hidden_layers"}, {}};
  Key<int64_t> hidden_size = {{"hidden_size"}, {}};
  Key<int64_t> intermediate_size = {};  // of one expert
  Key<int64_t> num_experts = {};
  Key<int64_t> top_k = {{"num_experts_per_tok"}, {}};
  Key<int64_t> identity_experts = {{}, 0};
  Key<int64_t> dense_intermediate_size = {{}, 0};  // 0: that of one expert
  // Shared experts are one MLP, num_shared_experts times as wide as the size; 0: there are none.
  Key<int64_t> shared_intermediate_size = {{}, 0};
  Key<int64_t> num_shared_experts = {{}, 1};
  LayerRule moe_layers = {};

  // What all models of the family have in common (sizes unset), and then what their configuration
  // says, the choices first.
  RouterDescriptor gate = {};
  ExpertDescriptor experts = {};
  SharedExperts shared = {};
  InputNorm expert_input_norm = {};
  std::vector<Choice> choices = {};
  Key<bool> normalise = {{}, true};  // false: gate.norm does not apply
  Key<double> norm_epsilon = {};     // without names: gate.norm_epsilon
  Key<double> norm_p = {};           // without names: gate.norm_p; 0: gate.norm does not apply
  Key<double> scale = {{}, 1.0};
  Key<double> routed_scale = {{}, 1.0};
  Key<double> softcap = {{}, 0.0};
  Key<int64_t> num_groups = {{}, 1};  // 1: gate.group_score does not apply
  Key<int64_t> topk_groups = {{}, 1};
  Key<double> jitter = {{}, 0.0};
  Key<double> input_norm_epsilon = {{}, 0.0};  // where the gate or the experts have an InputNorm
  bool input_norm_by_root = false;             // gate.input_norm.factor is hidden_size^-1/2

  // The experts, dense and shared ones included.
  Key<std::string> activation = {{"hidden_act"}, "silu"};
  std::map<std::string, Activation> activations = {{"silu", Activation::kSiluGlu}};
  Key<double> activation_alpha = {{}, 1.0};
  Key<double> activation_limit = {{}, 0.0};

  // Tensors are called prefix + block + name; "{layer}" stands for the decoder index. The first
  // combination that a layer has is taken.
  std::vector<std::string> layer_prefixes = {"model.layers.{layer}.", "layers.{layer}.",
                                             "model.language_model.layers.{layer}.",
                                             "language_model.model.layers.{layer}."};
  std::vector<std::string> blocks = {"mlp."};
  // Where the block is "": what belongs to it. Tensors of a block that are not used are refused.
  std::vector<std::string> parts_of_block = {};
  std::vector<std::string> router_weight = {"gate.weight"};  // [N, D], N with identity experts
  std::vector<std::string> logits_bias = {};                 // [N], where gate.has_logits_bias
  std::vector<std::string> selection_bias = {};              // [N], where gate.has_selection_bias
  std::vector<std::string> per_expert_scale = {};            // [N], where gate.has_per_expert_scale
  std::vector<std::string> input_norm = {};                  // [D], where gate.input_norm.present
  std::vector<std::string> expert_input_norm_weight = {};    // [D], where expert_input_norm.present
  std::vector<std::string> shared_gate = {};  // [1, D], where shared.gated_by_sigmoid
  std::vector<ExpertLayout> layouts = {};
  std::vector<ExpertLayout> shared_layouts = {};
  std::vector<ExpertLayout> dense_layouts = {};  // none: dense layers are not served
};

// All families that are known, those that are refused included.
absl::Span<const Family> BuiltInFamilies();

// A configuration, understood.
struct DescribedModel {
  const Family* family = nullptr;  // one of those given
  // How the layers' weights and scales are stored is not known yet: the files say it.
  ModelDescription description;
  Quantization quantization;
};

// Reads a parsed config.json. INVALID_ARGUMENT (a key that is missing, of the wrong type or
// impossible) or UNIMPLEMENTED (model type, activation, quantisation); the message names the key,
// what was expected and what was given.
absl::StatusOr<DescribedModel> DescribeModel(const nlohmann::json& config,
                                             absl::Span<const Family> families);

}  // namespace expertmesh
