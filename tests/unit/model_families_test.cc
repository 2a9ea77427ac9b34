// Every model family: a tiny checkpoint in the layout of its released files (and in transformers'
// own, where that differs) is described, and read, as what was written. Every tensor holds values
// that name its place, so that one that is transposed, interleaved or in the wrong order is seen.
//
// The names, shapes and keys here are written down a second time on purpose, from the released
// files, and not derived from common/model/registry.cc.

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/model/checkpoint.h"
#include "common/model/registry.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using ::nlohmann::json;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 5;    // D
constexpr int64_t kWidth = 3;     // F of a routed expert
constexpr int64_t kShared = 6;    // F of the shared experts together, where the case says no other
constexpr int64_t kDense = 7;     // F of a dense layer
constexpr int64_t kExperts = 12;  // two digits: an order by name is not one by number
constexpr int64_t kIdentity = 4;  // where there are identity experts

// A tensor of a layer. `what`:
//   X matrices of routed experts, S of the shared one, M of a dense layer's MLP, B their biases
//   R gate, l logits bias, s selection bias, p per-expert scale, n input norm, m experts' input
//   norm, G shared gate
// `axes`: one letter for each dimension, or several in brackets for one that joins them:
//   e experts, D hidden, F intermediate; g and u: intermediate, of the gate or up projection alone;
//   j both, gate first; i interleaved; N ids of the gate; 1 one
struct Spec {
  std::string name;  // {l}: layer, {e}: expert
  std::string axes;
  char what = 'X';
};

struct FamilyCase {
  std::string name = {};
  std::string config = {};
  std::string moe = {};    // summary of the MoE layers, see Summary()
  std::string dense = {};  // and of the dense ones
  std::vector<int> moe_layers = {};
  std::vector<int> dense_layers = {};
  std::vector<Spec> moe_tensors = {};
  std::vector<Spec> dense_tensors = {};
  std::string layout = "per-expert";
  int64_t shared = kShared;
  int64_t identity = 0;
};

// The value of one element: a small integer, exact in every dtype, different for every place.
float Value(char what, int layer, int64_t expert, int64_t row, int64_t col) {
  uint64_t key = static_cast<uint64_t>(what);
  for (const int64_t part : {static_cast<int64_t>(layer), expert, row, col}) {
    key = (key * 1000003 + static_cast<uint64_t>(part) + 17) * 2654435761u % 1000000007u;
  }
  return static_cast<float>(key % 251) - 125.0f;
}

// One tensor, filled element by element from what its axes say.
struct Stored {
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

Stored Fill(const FamilyCase& one, const Spec& spec, int layer, int64_t expert_of_name) {
  // Axes with their extents, and which dimension of the file each belongs to.
  std::vector<std::pair<char, int64_t>> axes;
  Stored stored;
  const int64_t width = spec.what == 'S' ? one.shared : spec.what == 'M' ? kDense : kWidth;
  bool joined = false, first = true;
  for (const char c : spec.axes) {
    if (c == '(' || c == ')') {
      joined = c == '(';
      first = true;
      continue;
    }
    const int64_t extent = c == 'e'               ? kExperts
                           : c == 'D'             ? kHidden
                           : c == 'N'             ? kExperts + one.identity
                           : c == '1'             ? 1
                           : c == 'j' || c == 'i' ? 2 * width
                                                  : width;
    axes.emplace_back(c, extent);
    if (joined && !first) {
      stored.shape.back() *= extent;
    } else {
      stored.shape.push_back(extent);
    }
    first = false;
  }
  int64_t count = 1;
  for (const auto& [letter, extent] : axes) count *= extent;
  for (int64_t i = 0; i < count; ++i) {
    std::map<char, int64_t> at;
    int64_t rest = i;
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
      at[axis->first] = rest % axis->second;
      rest /= axis->second;
    }
    const int64_t expert = at.count('e') != 0 ? at['e'] : expert_of_name;
    // Projection and row within it.
    char projection = spec.what;
    int64_t row = at.count('N') != 0 ? at['N'] : 0;
    int64_t col = at.count('D') != 0 ? at['D'] : 0;
    if (std::string("XSMB").find(spec.what) != std::string::npos) {
      const bool bias = spec.what == 'B';
      const auto set = [&](bool gate, int64_t r) {
        projection = bias ? (gate ? 'a' : 'b') : (gate ? 'g' : 'u');
        row = r;
      };
      if (at.count('g') != 0) {
        set(true, at['g']);
      } else if (at.count('u') != 0) {
        set(false, at['u']);
      } else if (at.count('j') != 0) {
        set(at['j'] < width, at['j'] % width);
      } else if (at.count('i') != 0) {
        set(at['i'] % 2 == 0, at['i'] / 2);
      } else {
        projection = bias ? 'c' : 'd';
        row = at['D'];
        col = bias ? 0 : at['F'];
      }
      if (spec.what == 'S') projection = static_cast<char>(projection - 32);  // upper case
      if (spec.what == 'M') projection = static_cast<char>(projection - 64);
    }
    stored.values.push_back(Value(projection, layer, expert, row, col));
  }
  return stored;
}

// A folder before it is written.
struct Folder {
  json config;
  std::map<std::string, Stored> tensors;
};

void Add(const FamilyCase& one, const std::vector<Spec>& specs, int layer, Folder* folder) {
  for (const Spec& spec : specs) {
    const bool per_expert = spec.name.find("{e}") != std::string::npos;
    for (int64_t expert = 0; expert < (per_expert ? kExperts : 1); ++expert) {
      const std::string name = absl::StrReplaceAll(
          spec.name, {{"{l}", absl::StrCat(layer)}, {"{e}", absl::StrCat(expert)}});
      folder->tensors[name] = Fill(one, spec, layer, expert);
    }
  }
}

Folder MakeFolder(const FamilyCase& one) {
  Folder folder;
  folder.config = json::parse(one.config);
  for (const int layer : one.moe_layers) Add(one, one.moe_tensors, layer, &folder);
  for (const int layer : one.dense_layers) Add(one, one.dense_tensors, layer, &folder);
  folder.tensors["lm_head.weight"] = {DType::kBF16, {2}, {1, 2}};
  return folder;
}

void Write(const Folder& folder, const std::string& path) {
  std::filesystem::create_directories(path);
  std::filesystem::remove(path + "/config.json");
  std::ofstream(path + "/config.json") << folder.config.dump();
  json header = json::object();
  std::string data;
  for (const auto& [name, tensor] : folder.tensors) {
    const size_t begin = data.size();
    data.resize(begin + tensor.values.size() * static_cast<size_t>(BytesOf(tensor.dtype)));
    for (size_t i = 0; i < tensor.values.size() && IsActivationDType(tensor.dtype); ++i) {
      StoreFloat(tensor.dtype, data.data() + begin, static_cast<int64_t>(i), tensor.values[i]);
    }
    header[name] = {{"dtype", NameOf(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  // Not over the old one: closing a file that was cut short may wait for the disk.
  std::filesystem::remove(path + "/model.safetensors");
  std::ofstream file(path + "/model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << text << data;
}

std::string Name(Activation activation) {
  switch (activation) {
    case Activation::kSiluGlu:
      return "silu";
    case Activation::kClampedSwishGlu:
      return "gpt-oss";
    case Activation::kGeluTanhGlu:
      return "gelu-tanh";
    case Activation::kRelu2:
      return "relu2";
    default:
      return "other";
  }
}

std::string Summary(const ExpertDescriptor& expert) {
  std::string text = absl::StrCat("F", expert.intermediate_size, " ", Name(expert.activation));
  if (expert.activation_limit != 0) {
    absl::StrAppend(&text, " ", expert.activation_alpha, " ", expert.activation_limit);
  }
  if (!expert.gated) text += " not gated";
  if (expert.has_bias) text += " bias";
  return text;
}

// All of a description that is not the usual, in words.
std::string Summary(const LayerDescription& layer) {
  const RouterDescriptor& gate = layer.router;
  std::string text;
  if (layer.kind == LayerKind::kMoe) {
    text = absl::StrCat("E", gate.num_experts, " K", gate.top_k);
    const std::vector<std::string> scores = {"softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"};
    absl::StrAppend(&text, gate.order == ScoreOrder::kTopKThenScore ? " topk-" : " ",
                    scores[static_cast<size_t>(gate.score)]);
    if (gate.has_logits_bias) text += " logits-bias";
    if (gate.has_selection_bias) text += " bias";
    if (gate.group_score != GroupScore::kNone) {
      absl::StrAppend(&text, " groups ", gate.topk_groups, "/", gate.num_groups,
                      gate.group_score == GroupScore::kMax ? " max" : " top2",
                      gate.mask_fill == MaskFill::kZero ? " fill 0" : "");
    }
    if (gate.norm == WeightNorm::kSum) absl::StrAppend(&text, " norm ", gate.norm_epsilon);
    if (gate.norm == WeightNorm::kSumClamped) absl::StrAppend(&text, " clamp ", gate.norm_epsilon);
    if (gate.norm == WeightNorm::kPNorm) absl::StrAppend(&text, " p ", gate.norm_p);
    if (gate.scale != 1) absl::StrAppend(&text, " x", gate.scale);
    if (gate.routed_scale != 1) absl::StrAppend(&text, " sum x", gate.routed_scale);
    if (gate.softcap != 0) absl::StrAppend(&text, " cap ", gate.softcap);
    if (gate.jitter != 0) absl::StrAppend(&text, " jitter ", gate.jitter);
    if (gate.has_per_expert_scale) text += " per-expert-scale";
    if (gate.weigh_input) text += " weigh-input";
    if (gate.identity_experts != 0) absl::StrAppend(&text, " identity ", gate.identity_experts);
    if (gate.input_norm.present) {
      absl::StrAppend(&text, " normed ", gate.input_norm.epsilon, " ", gate.input_norm.factor);
    }
    absl::StrAppend(&text, ", ", Summary(layer.experts));
    if (layer.expert_input_norm.present) {
      absl::StrAppend(&text, " normed ", layer.expert_input_norm.epsilon);
    }
  } else if (gate.num_experts != 0 || gate.top_k != 0 || layer.experts.intermediate_size != 0) {
    text = "dense with experts";
  }
  if (layer.shared.count != 0) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", layer.shared.count, " shared ",
                    Summary(layer.shared.experts));
    if (layer.shared.gated_by_sigmoid) text += " gated";
    if (layer.shared.averaged) text += " averaged";
  }
  return text;
}

// ---- The cases ---------------------------------------------------------------------------------

using Specs = std::vector<Spec>;

Specs operator+(Specs a, const Specs& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Specs Mlp(const std::string& prefix, char what, const std::string& gate = "gate_proj",
          const std::string& up = "up_proj", const std::string& down = "down_proj") {
  return {{prefix + gate + ".weight", "gD", what},
          {prefix + up + ".weight", "uD", what},
          {prefix + down + ".weight", "DF", what}};
}
Specs PerExpert(const std::string& block) { return Mlp(block + "experts.{e}.", 'X'); }
Specs PerExpertW(const std::string& block) {
  return Mlp(block + "experts.{e}.", 'X', "w1", "w3", "w2");
}
Specs Fused(const std::string& block) {
  return {{block + "experts.gate_up_proj", "ejD"}, {block + "experts.down_proj", "eDF"}};
}
Specs Transposed(const std::string& block) {
  return {{block + "experts.gate_up_proj", "eDj"}, {block + "experts.down_proj", "eFD"}};
}

std::vector<FamilyCase> Cases() {
  const std::string mlp = "model.layers.{l}.mlp.";
  const std::string sparse = "model.layers.{l}.block_sparse_moe.";
  const std::string forward = "model.layers.{l}.feed_forward.";
  const Specs gate = {{mlp + "gate.weight", "ND", 'R'}};
  const Specs dense = Mlp(mlp, 'M');
  std::vector<FamilyCase> cases;
  const auto add = [&](const FamilyCase& one) { cases.push_back(one); };
  // The same model as transformers holds it.
  const auto fused = [&](FamilyCase one, const Specs& tensors) {
    one.name += "_fused";
    one.layout = "fused";
    one.moe_tensors = tensors;
    cases.push_back(one);
  };

  {
    const FamilyCase one = {
        .name = "mixtral",
        .config = R"({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 5,
            "intermediate_size": 3, "num_local_experts": 12, "num_experts_per_tok": 3})",
        .moe = "E12 K3 softmax norm 0, F3 silu",
        .moe_layers = {0, 1},
        .moe_tensors = Specs{{sparse + "gate.weight", "ND", 'R'}} + PerExpertW(sparse)};
    add(one);
    fused(one, gate + Fused(mlp));
    for (const char* type : {"minimax", "minimax_text_01", "minimax_m1"}) {
      FamilyCase minimax = one;
      minimax.name = type;
      minimax.config = absl::StrReplaceAll(
          one.config,
          {{"\"mixtral\"", absl::StrCat("\"", type, R"(", "shared_intermediate_size": 0)")}});
      add(minimax);
    }
    fused(cases[cases.size() - 3], gate + Fused(mlp));
  }
  {
    const FamilyCase one = {
        .name = "phimoe",
        .config = R"({"model_type": "phimoe", "num_hidden_layers": 1, "hidden_size": 5,
            "intermediate_size": 3, "num_local_experts": 12, "num_experts_per_tok": 2,
            "router_jitter_noise": 0.25, "input_jitter_noise": 0.01, "hidden_act": "silu"})",
        .moe = "E12 K2 sparsemixer jitter 0.25, F3 silu",
        .moe_layers = {0},
        .moe_tensors = Specs{{sparse + "gate.weight", "ND", 'R'}} + PerExpertW(sparse)};
    add(one);
    fused(one, Specs{{mlp + "router.weight", "ND", 'R'}} + Fused(mlp));
  }
  {
    const FamilyCase one = {
        .name = "minimax_m2",
        .config = R"({"model_type": "minimax_m2", "num_hidden_layers": 2, "hidden_size": 5,
            "intermediate_size": 3, "num_local_experts": 12, "num_experts_per_tok": 3,
            "scoring_func": "sigmoid", "use_routing_bias": true, "shared_intermediate_size": 0,
            "num_mtp_modules": 3})",
        .moe = "E12 K3 sigmoid bias norm 0, F3 silu",
        .moe_layers = {0, 1},
        .moe_tensors = Specs{{sparse + "gate.weight", "ND", 'R'},
                             {sparse + "e_score_correction_bias", "N", 's'}} +
                       PerExpertW(sparse)};
    add(one);
    fused(one, gate + Specs{{mlp + "e_score_correction_bias", "N", 's'}} + Fused(mlp));
  }
  {
    const FamilyCase one = {
        .name = "olmoe",
        .config = R"({"model_type": "olmoe", "num_hidden_layers": 1, "hidden_size": 5,
            "intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3,
            "norm_topk_prob": false})",
        .moe = "E12 K3 softmax, F3 silu",
        .moe_layers = {0},
        .moe_tensors = gate + PerExpert(mlp)};
    add(one);
    fused(one, gate + Fused(mlp));
  }
  const std::string qwen = R"("num_hidden_layers": 4, "hidden_size": 5, "intermediate_size": 7,
      "moe_intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3,
      "decoder_sparse_step": 2, "mlp_only_layers": [3], "hidden_act": "silu")";
  {
    const FamilyCase one = {
        .name = "qwen3_moe",
        .config = absl::StrCat(R"({"model_type": "qwen3_moe", "norm_topk_prob": true,
            "shared_expert_intermediate_size": 0, )",
                               qwen, "}"),
        .moe = "E12 K3 softmax norm 0, F3 silu",
        .dense = "1 shared F7 silu",
        .moe_layers = {1},
        .dense_layers = {0, 2, 3},
        .moe_tensors = gate + PerExpert(mlp),
        .dense_tensors = dense};
    add(one);
    fused(one, gate + Fused(mlp));
  }
  const Specs qwen2_shared =
      Specs{{mlp + "shared_expert_gate.weight", "1D", 'G'}} + Mlp(mlp + "shared_expert.", 'S');
  for (const bool next : {false, true}) {
    const FamilyCase one = {
        .name = next ? "qwen3_next" : "qwen2_moe",
        .config = absl::StrCat(R"({"model_type": ")", next ? "qwen3_next" : "qwen2_moe",
                               R"(", "shared_expert_intermediate_size": 6, "norm_topk_prob": )",
                               next ? "true" : "false", ", ", qwen, "}"),
        .moe = absl::StrCat("E12 K3 softmax", next ? " norm 0" : "",
                            ", F3 silu, 1 shared F6 silu gated"),
        .dense = "1 shared F7 silu",
        .moe_layers = {1},
        .dense_layers = {0, 2, 3},
        .moe_tensors = gate + PerExpert(mlp) + qwen2_shared,
        .dense_tensors = dense};
    add(one);
    fused(one, gate + Fused(mlp) + qwen2_shared);
  }
  {
    const std::string deep = "model.language_model.layers.{l}.mlp.";
    const std::string text = R"("num_hidden_layers": 2, "hidden_size": 5,
        "moe_intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3, "top_k": 50)";
    const Specs gate_of_text = {{deep + "gate.weight", "ND", 'R'}};
    add({.name = "qwen3_5_moe",
         .config = absl::StrCat(R"({"model_type": "qwen3_5_moe", "hidden_size": 999, "text_config":
            {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 6, )",
                                text, "}}"),
         .moe = "E12 K3 softmax norm 0, F3 silu, 1 shared F6 silu gated",
         .moe_layers = {0, 1},
         .moe_tensors = gate_of_text + Fused(deep) +
                        Specs{{deep + "shared_expert_gate.weight", "1D", 'G'}} +
                        Mlp(deep + "shared_expert.", 'S'),
         .layout = "fused"});
    add({.name = "qwen3_vl_moe",
         .config = absl::StrCat(R"({"model_type": "qwen3_vl_moe", "text_config": {)", text, "}}"),
         .moe = "E12 K3 softmax norm 0, F3 silu",
         .moe_layers = {0, 1},
         .moe_tensors = gate_of_text + Transposed(deep),
         .layout = "fused"});
  }
  const Specs joined_shared = Mlp(mlp + "shared_experts.", 'S');
  const Specs selection_bias = {{mlp + "gate.e_score_correction_bias", "N", 's'}};
  const std::string deepseek = R"("num_hidden_layers": 3, "hidden_size": 5, "intermediate_size": 7,
      "moe_intermediate_size": 3, "n_routed_experts": 12, "num_experts_per_tok": 3,
      "n_shared_experts": 2, "hidden_act": "silu", )";
  const auto add_deepseek = [&](const std::string& type, const std::string& config,
                                const std::string& moe, const Specs& bias) {
    const FamilyCase one = {
        .name = type,
        .config = absl::StrCat(R"({"model_type": ")", type, R"(", )", deepseek, config, "}"),
        .moe = absl::StrCat("E12 K3 ", moe, ", F3 silu, 1 shared F6 silu"),
        .dense = "1 shared F7 silu",
        .moe_layers = {1, 2},
        .dense_layers = {0},
        .moe_tensors = gate + bias + PerExpert(mlp) + joined_shared,
        .dense_tensors = dense};
    add(one);
    fused(one, gate + bias + Fused(mlp) + joined_shared);
  };
  const std::string first_dense = R"("first_k_dense_replace": 1, )";
  const std::string groups = first_dense + R"("n_group": 4, "topk_group": 2)";
  const std::string one_group = first_dense + R"("n_group": 1, "topk_group": 1)";
  add_deepseek("deepseek_v2", groups + R"(, "topk_method": "group_limited_greedy",
      "scoring_func": "softmax", "norm_topk_prob": false, "routed_scaling_factor": 16.0)",
               "softmax groups 2/4 max fill 0 x16", {});
  add_deepseek("deepseek_v2", one_group + R"(, "topk_method": "greedy", "moe_layer_freq": 1,
      "norm_topk_prob": false, "routed_scaling_factor": 1.0)",
               "softmax", {});
  add_deepseek("deepseek_v3", groups + R"(, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "moe_layer_freq": 1,
      "num_nextn_predict_layers": 1)",
               "sigmoid bias groups 2/4 top2 norm 1e-20 x2.5", selection_bias);
  add_deepseek("deepseek_v32", R"("mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 4,
      "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": null)",
               "sigmoid bias groups 2/4 top2 norm 1e-20", selection_bias);
  add_deepseek("kimi_k2", one_group + R"(, "routed_scaling_factor": 2.827)",
               "sigmoid bias norm 1e-20 x2.827", selection_bias);
  add_deepseek("glm4_moe", one_group + R"(, "routed_scaling_factor": 1.0)",
               "sigmoid bias norm 1e-20", selection_bias);
  add_deepseek("dots1", one_group + R"(, "routed_scaling_factor": 2.5)", "sigmoid bias x2.5",
               selection_bias);
  add_deepseek("solar_open", one_group + R"(, "routed_scaling_factor": 1.0)",
               "sigmoid bias norm 1e-20", selection_bias);
  add_deepseek("mistral4", groups + R"(, "routed_scaling_factor": 2.0)",
               "softmax groups 2/4 top2 fill 0 norm 1e-20 x2", {});
  {
    const std::string sizes = R"("num_hidden_layers": 3, "hidden_size": 5, "intermediate_size": 7,
        "moe_intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3, )";
    const auto add_like = [&](const std::string& type, const std::string& config,
                              const std::string& moe, const Specs& tensors) {
      add({.name = type,
           .config = absl::StrCat(R"({"model_type": ")", type, R"(", )", sizes, config, "}"),
           .moe = "E12 K3 " + moe,
           .dense = "1 shared F7 silu",
           .moe_layers = {1, 2},
           .dense_layers = {0},
           .moe_tensors = tensors,
           .dense_tensors = dense});
    };
    add_like(
        "exaone_moe", R"("num_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": true)",
        "sigmoid bias groups 2/4 top2 norm 1e-20 x2.5, F3 silu, 1 shared F6 silu",
        gate + Specs{{mlp + "e_score_correction_bias", "N", 's'}} + PerExpert(mlp) + joined_shared);
    add_like("mimo_v2_flash", R"("n_shared_experts": null, "moe_layer_freq": [0, 1, 1],
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": null, "norm_topk_prob": true)",
             "sigmoid bias norm 1e-20, F3 silu", gate + selection_bias + PerExpert(mlp));
    add_like("afmoe", R"("num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 2.0,
        "score_func": "sigmoid", "route_norm": true)",
             "sigmoid bias norm 1e-20 x2, F3 silu, 1 shared F6 silu",
             Specs{{mlp + "router.gate.weight", "ND", 'R'}, {mlp + "expert_bias", "N", 's'}} +
                 PerExpert(mlp) + joined_shared);
    add_like("laguna", R"("shared_expert_intermediate_size": 6, "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 30.0, "mlp_layer_types": ["dense", "sparse", "sparse"])",
             "sigmoid bias norm 0 sum x2.5 cap 30, F3 silu, 1 shared F6 silu",
             gate + Specs{{mlp + "experts.e_score_correction_bias", "N", 's'}} + PerExpert(mlp) +
                 Mlp(mlp + "shared_expert.", 'S'));
    add_like("mellum",
             R"("norm_topk_prob": true, "mlp_layer_types": ["dense", "sparse", "sparse"])",
             "softmax norm 0, F3 silu", gate + PerExpert(mlp));
  }
  {
    const std::string config = R"({"model_type": "hy_v3", "num_hidden_layers": 3, "hidden_size": 5,
        "intermediate_size": 7, "moe_intermediate_size": 3, "num_experts": 12,
        "num_experts_per_tok": 3, "num_shared_experts": 2, "first_k_dense_replace": 1,
        "router_scaling_factor": 2.826})";
    const FamilyCase one = {
        .name = "hy_v3",
        .config = config,
        .moe = "E12 K3 sigmoid bias norm 1e-20 x2.826, F3 silu, 1 shared F6 silu",
        .dense = "1 shared F7 silu",
        .moe_layers = {1, 2},
        .dense_layers = {0},
        .moe_tensors =
            Specs{{mlp + "router.gate.weight", "ND", 'R'}, {mlp + "expert_bias", "N", 's'}} +
            PerExpert(mlp) + Mlp(mlp + "shared_mlp.", 'S'),
        .dense_tensors = dense};
    add(one);
    fused(one,
          gate + Specs{{mlp + "e_score_correction_bias", "N", 's'}} + Fused(mlp) + joined_shared);
  }
  add({.name = "gpt_oss",
       .config = R"({"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 5,
           "intermediate_size": 3, "num_local_experts": 12, "num_experts_per_tok": 3,
           "experts_per_token": 3, "hidden_act": "silu", "swiglu_limit": 6.5})",
       .moe = "E12 K3 topk-softmax logits-bias, F3 gpt-oss 1.702 6.5 bias",
       .moe_layers = {0, 1},
       .moe_tensors = {{mlp + "router.weight", "ND", 'R'},
                       {mlp + "router.bias", "N", 'l'},
                       {mlp + "experts.gate_up_proj", "eDi"},
                       {mlp + "experts.gate_up_proj_bias", "ei", 'B'},
                       {mlp + "experts.down_proj", "eFD"},
                       {mlp + "experts.down_proj_bias", "eD", 'B'}},
       .layout = "fused"});
  for (const bool whole : {false, true}) {
    const std::string block = (whole ? "language_model." : "") + forward;
    const std::string text = R"("model_type": "llama4_text", "num_hidden_layers": 3,
        "hidden_size": 5, "intermediate_size": 3, "intermediate_size_mlp": 7,
        "num_local_experts": 12, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2)";
    add({.name = whole ? "llama4" : "llama4_text",
         .config = whole ? absl::StrCat(R"({"model_type": "llama4", "text_config": {)", text, "}}")
                         : absl::StrCat("{", text, R"(, "moe_layers": [1]})"),
         .moe = "E12 K1 topk-sigmoid weigh-input, F3 silu, 1 shared F3 silu",
         .dense = "1 shared F7 silu",
         .moe_layers = {1},
         .dense_layers = {0, 2},
         .moe_tensors = Specs{{block + "router.weight", "ND", 'R'}} + Transposed(block) +
                        Mlp(block + "shared_expert.", 'S'),
         .dense_tensors = Mlp(block, 'M'),
         .layout = "fused",
         .shared = kWidth});
  }
  for (const bool shared : {false, true}) {
    const std::string shared_mlp = "model.layers.{l}.shared_mlp.";
    const Specs shared_tensors = {{shared_mlp + "input_linear.weight", "jD", 'S'},
                                  {shared_mlp + "output_linear.weight", "DF", 'S'}};
    const FamilyCase one = {
        .name = shared ? "granitemoeshared" : "granitemoe",
        .config = absl::StrCat(R"({"model_type": ")", shared ? "granitemoeshared" : "granitemoe",
                               R"(", "num_hidden_layers": 2, "hidden_size": 5,
            "intermediate_size": 3, "num_local_experts": 12, "num_experts_per_tok": 3,
            "shared_intermediate_size": 6, "residual_multiplier": 0.22})"),
        .moe = absl::StrCat("E12 K3 topk-softmax, F3 silu", shared ? ", 1 shared F6 silu" : ""),
        .moe_layers = {0, 1},
        .moe_tensors = Specs{{sparse + "router.layer.weight", "ND", 'R'},
                             {sparse + "input_linear.weight", "ejD"},
                             {sparse + "output_linear.weight", "eDF"}} +
                       (shared ? shared_tensors : Specs{}),
        .layout = "stacked"};
    add(one);
    fused(one, Specs{{sparse + "router.weight", "ND", 'R'}} + Fused(sparse) +
                   (shared ? shared_tensors : Specs{}));
  }
  {
    const FamilyCase one = {
        .name = "jamba",
        .config = R"({"model_type": "jamba", "num_hidden_layers": 4, "hidden_size": 5,
            "intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3,
            "expert_layer_period": 3, "expert_layer_offset": 1, "attn_layer_period": 2})",
        .moe = "E12 K3 softmax, F3 silu",
        .dense = "1 shared F3 silu",
        .moe_layers = {1},
        .dense_layers = {0, 2, 3},
        .moe_tensors = Specs{{forward + "router.weight", "ND", 'R'}} + PerExpert(forward),
        .dense_tensors = Mlp(forward, 'S'),
        .shared = kWidth};
    add(one);
    fused(one, Specs{{forward + "router.weight", "ND", 'R'}} + Fused(forward));
  }
  for (const char* norm : {"1", "2", "null"}) {
    const std::string block = "transformer.blocks.{l}.ffn.";
    add({.name = absl::StrCat("dbrx_", norm),
         .config = absl::StrCat(R"({"model_type": "dbrx", "n_layers": 2, "d_model": 5,
             "ffn_config": {"ffn_hidden_size": 3, "moe_num_experts": 12, "moe_top_k": 3,
             "ffn_act_fn": {"name": "silu"}, "moe_normalize_expert_weights": )",
                                norm, "}}"),
         .moe = absl::StrCat("E12 K3 softmax", *norm == 'n' ? "" : " p ", *norm == 'n' ? "" : norm,
                             ", F3 silu"),
         .moe_layers = {0, 1},
         .moe_tensors = {{block + "router.layer.weight", "ND", 'R'},
                         {block + "experts.mlp.w1", "(eg)D"},
                         {block + "experts.mlp.v1", "(eu)D"},
                         {block + "experts.mlp.w2", "(eF)D"}},
         .layout = "joined"});
  }
  {
    const FamilyCase one = {
        .name = "ernie4_5_moe",
        .config = R"({"model_type": "ernie4_5_moe", "num_hidden_layers": 4, "hidden_size": 5,
            "intermediate_size": 7, "moe_intermediate_size": 3, "moe_num_experts": 12, "moe_k": 3,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
            "moe_layer_interval": 1, "moe_norm_min": 1e-12, "use_bias": false})",
        .moe = "E12 K3 softmax bias clamp 1e-12, F3 silu, 1 shared F6 silu",
        .dense = "1 shared F7 silu",
        .moe_layers = {1, 2},
        .dense_layers = {0, 3},
        .moe_tensors = gate + Specs{{mlp + "moe_statics.e_score_correction_bias", "1N", 's'}} +
                       PerExpert(mlp) + joined_shared,
        .dense_tensors = dense};
    add(one);
    fused(one, gate + Specs{{mlp + "gate.moe_statics.e_score_correction_bias", "1N", 's'}} +
                   Fused(mlp) + joined_shared);
  }
  for (const bool lists : {false, true}) {
    const FamilyCase one = {
        .name = absl::StrCat("hunyuan_v1_moe", lists ? "_lists" : ""),
        .config = absl::StrCat(R"({"model_type": "hunyuan_v1_moe", "num_hidden_layers": 2,
            "hidden_size": 5, "intermediate_size": 3, "num_experts": 12,
            "use_mixed_mlp_moe": true, "norm_topk_prob": true, "moe_layer_num_skipped": 0, )",
                               lists ? R"("moe_topk": [3, 3], "moe_intermediate_size": [3, 3],
            "num_shared_expert": [1, 1]})"
                                     : R"("moe_topk": 3})"),
        .moe = "E12 K3 softmax norm 0, F3 silu, 1 shared F3 silu",
        .moe_layers = {0, 1},
        .moe_tensors = Specs{{mlp + "gate.wg.weight", "ND", 'R'}} + PerExpert(mlp) +
                       Mlp(mlp + "shared_mlp.", 'S'),
        .shared = kWidth};
    add(one);
  }
  for (const bool list : {false, true}) {
    const std::string block = list ? "model.layers.{l}.mixer." : "backbone.layers.{l}.mixer.";
    const Specs up_down = {{block + "up_proj.weight", "uD", 'M'},
                           {block + "down_proj.weight", "DF", 'M'}};
    const Specs shared = {{block + "shared_experts.up_proj.weight", "uD", 'S'},
                          {block + "shared_experts.down_proj.weight", "DF", 'S'}};
    const Specs experts =
        list ? Specs{{block + "experts.up_proj", "euD"}, {block + "experts.down_proj", "eDF"}}
             : Specs{{block + "experts.{e}.up_proj.weight", "uD"},
                     {block + "experts.{e}.down_proj.weight", "DF"}};
    add({.name = absl::StrCat("nemotron_h", list ? "_fused" : ""),
         .config = absl::StrCat(R"({"model_type": "nemotron_h", "hidden_size": 5,
             "intermediate_size": 7, "moe_intermediate_size": 3, "n_routed_experts": 12,
             "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 6,
             "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
             "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "moe_latent_size": null, )",
                                list ? R"("layers_block_type": ["linear_attention", "moe", "mlp",
             "full_attention", "moe"]})"
                                     : R"("num_hidden_layers": 5,
             "hybrid_override_pattern": "ME-*E"})"),
         .moe = "E12 K3 sigmoid bias norm 1e-20 x2.5, F3 relu2 not gated, "
                "1 shared F6 relu2 not gated",
         .dense = "1 shared F7 relu2 not gated",
         .moe_layers = {1, 4},
         .dense_layers = {2},
         .moe_tensors = Specs{{block + "gate.weight", "ND", 'R'},
                              {block + "gate.e_score_correction_bias", "N", 's'}} +
                        experts + shared,
         .dense_tensors = up_down,
         .layout = list ? "fused" : "per-expert"});
  }
  for (const bool bias : {true, false}) {
    const Specs router = Specs{{forward + "gate.weight", "ND", 'R'}} +
                         (bias ? Specs{{forward + "expert_bias", "N", 's'}} : Specs{});
    const FamilyCase one = {
        .name = absl::StrCat("lfm2_moe", bias ? "" : "_unbiased"),
        .config = absl::StrCat(R"({"model_type": "lfm2_moe", "num_hidden_layers": 3,
            "hidden_size": 5, "intermediate_size": 7, "moe_intermediate_size": 3,
            "num_experts": 12, "num_experts_per_tok": 3, "num_dense_layers": 1,
            "norm_topk_prob": true, "routed_scaling_factor": 1.0,
            "layer_types": ["conv", "full_attention", "conv"], "use_expert_bias": )",
                               bias ? "true}" : "false}"),
        .moe = absl::StrCat("E12 K3 sigmoid", bias ? " bias" : "", " norm 1e-06, F3 silu"),
        .dense = "1 shared F7 silu",
        .moe_layers = {1, 2},
        .dense_layers = {0},
        .moe_tensors = router + PerExpertW(forward),
        .dense_tensors = Mlp(forward, 'M', "w1", "w3", "w2")};
    add(one);
    fused(one, router + Fused(forward));
  }
  for (const bool whole : {false, true}) {
    const std::string layer = whole ? "model.language_model.layers.{l}." : "model.layers.{l}.";
    const std::string text = R"("model_type": "gemma4_text", "num_hidden_layers": 2,
        "hidden_size": 5, "intermediate_size": 7, "moe_intermediate_size": 3, "num_experts": 12,
        "top_k_experts": 3, "enable_moe_block": true, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06)";
    add({.name = whole ? "gemma4" : "gemma4_text",
         .config = whole ? absl::StrCat(R"({"model_type": "gemma4", "text_config": {)", text, "}}")
                         : absl::StrCat("{", text, "}"),
         .moe = "E12 K3 softmax norm 0 per-expert-scale normed 1e-06 0.447214, F3 gelu-tanh "
                "normed 1e-06",
         .moe_layers = {0, 1},
         .moe_tensors = Specs{{layer + "router.proj.weight", "ND", 'R'},
                              {layer + "router.scale", "D", 'n'},
                              {layer + "router.per_expert_scale", "N", 'p'},
                              {layer + "pre_feedforward_layernorm_2.weight", "D", 'm'}} +
                        Fused(layer),
         .layout = "fused"});
  }
  {
    const FamilyCase one = {
        .name = "longcat_flash",
        .config = R"({"model_type": "longcat_flash", "num_layers": 2, "hidden_size": 5,
            "ffn_hidden_size": 7, "expert_ffn_hidden_size": 3, "n_routed_experts": 12,
            "zero_expert_num": 4, "zero_expert_type": "identity", "moe_topk": 3,
            "routed_scaling_factor": 6.0, "hidden_act": "silu"})",
        .moe = "E12 K3 softmax bias x6 identity 4, F3 silu",
        .moe_layers = {0, 1},
        .moe_tensors = Specs{{mlp + "router.classifier.weight", "ND", 'R'},
                             {mlp + "router.e_score_correction_bias", "N", 's'}} +
                       PerExpert(mlp),
        .identity = kIdentity};
    add(one);
    fused(one, Specs{{mlp + "router.classifier.weight", "ND", 'R'},
                     {mlp + "router.e_score_correction_bias", "N", 's'}} +
                   Fused(mlp));
  }
  for (const bool sigmoid : {false, true}) {
    const FamilyCase one = {
        .name = absl::StrCat("cohere2_moe", sigmoid ? "_sigmoid" : ""),
        .config = absl::StrCat(R"({"model_type": "cohere2_moe", "num_hidden_layers": 3,
            "hidden_size": 5, "intermediate_size": 3, "num_experts": 12, "num_experts_per_tok": 3,
            "num_shared_experts": 2, "prefix_dense_intermediate_size": 7, "norm_topk_prob": true, )",
                               sigmoid ? R"("first_k_dense_replace": 1,
            "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"})"
                                       : R"("mlp_layer_types": ["dense", "sparse", "sparse"],
            "expert_selection_fn": "softmax", "shared_expert_combination_strategy": "average"})"),
        .moe = sigmoid ? "E12 K3 topk-sigmoid norm 0, F3 silu, 1 shared F6 silu"
                       : "E12 K3 topk-softmax, F3 silu, 1 shared F6 silu averaged",
        .dense = "1 shared F7 silu",
        .moe_layers = {1, 2},
        .dense_layers = {0},
        .moe_tensors = gate + PerExpert(mlp) + joined_shared,
        .dense_tensors = dense};
    add(one);
    fused(one, gate + Fused(mlp) + joined_shared);
  }
  return cases;
}

// ---- The tests ---------------------------------------------------------------------------------

class ModelFamilies : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    folder_ =
        (std::filesystem::temp_directory_path() / absl::StrCat("model_families_test.", getpid()))
            .string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const Folder& folder) {
    Write(folder, folder_);
    return Checkpoint::Open(folder_);
  }

  std::string folder_;
};

// row -> column -> value of a matrix of `tag`, as it was written.
void ExpectMatrix(const Tensor& tensor, int64_t first_row, int64_t rows, char tag, int layer,
                  int64_t expert) {
  const int64_t cols = tensor.shape().size() == 1 ? 1 : tensor.dim(1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      ASSERT_EQ(LoadFloat(tensor.dtype(), tensor.data(), (first_row + r) * cols + c),
                Value(tag, layer, expert, r, c))
          << "matrix '" << tag << "' of expert " << expert << " at row " << r << ", column " << c;
    }
  }
}

// `shift` turns the letters of the routed experts' projections into those of others, see Fill().
void ExpectExpert(const Checkpoint& checkpoint, const ExpertDescriptor& shape, int layer,
                  int32_t id, int64_t expert, int shift) {
  const auto tag = [shift](char c) { return static_cast<char>(c - shift); };
  const auto weights = checkpoint.ReadExpert(layer, id);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const int64_t width = shape.intermediate_size;
  const int64_t rows = (shape.gated ? 2 : 1) * width;
  ASSERT_THAT(weights->gate_up.shape(), ::testing::ElementsAre(rows, kHidden));
  ASSERT_THAT(weights->down.shape(), ::testing::ElementsAre(kHidden, width));
  EXPECT_EQ(weights->gate_up.dtype(), shape.weight_dtype);
  EXPECT_EQ(weights->down.dtype(), shape.weight_dtype);
  if (shape.gated) ExpectMatrix(weights->gate_up, 0, width, tag('g'), layer, expert);
  ExpectMatrix(weights->gate_up, rows - width, width, tag('u'), layer, expert);
  ExpectMatrix(weights->down, 0, kHidden, tag('d'), layer, expert);
  if (!shape.has_bias) {
    EXPECT_EQ(weights->gate_up_bias.num_elements() + weights->down_bias.num_elements(), 0);
    return;
  }
  ASSERT_THAT(weights->gate_up_bias.shape(), ::testing::ElementsAre(rows));
  ASSERT_THAT(weights->down_bias.shape(), ::testing::ElementsAre(kHidden));
  EXPECT_EQ(weights->gate_up_bias.dtype(), DType::kF32);
  ExpectMatrix(weights->gate_up_bias, 0, width, 'a', layer, expert);
  ExpectMatrix(weights->gate_up_bias, width, width, 'b', layer, expert);
  ExpectMatrix(weights->down_bias, 0, kHidden, 'c', layer, expert);
}

// Values of a vector of the gate; empty where the case has no such tensor.
void ExpectVector(const FamilyCase& one, const Tensor& vector, char what, int layer) {
  const auto spec = std::find_if(one.moe_tensors.begin(), one.moe_tensors.end(),
                                 [what](const Spec& s) { return s.what == what; });
  if (spec == one.moe_tensors.end()) {
    EXPECT_EQ(vector.num_elements(), 0) << what;
    return;
  }
  const std::vector<float> values = Fill(one, *spec, layer, 0).values;
  ASSERT_EQ(vector.num_elements(), static_cast<int64_t>(values.size())) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(LoadFloat(vector.dtype(), vector.data(), static_cast<int64_t>(i)), values[i]) << what;
  }
}

TEST_P(ModelFamilies, IsDescribedAndReadAsItWasWritten) {
  const FamilyCase& one = GetParam();
  Folder folder = MakeFolder(one);
  // What is past the last layer predicts further tokens, and is skipped.
  folder.tensors["model.layers.9.mlp.gate.weight"] = {DType::kBF16, {1}, {1}};
  // The gate and its vectors may be more precise than the experts.
  for (const Spec& spec : one.moe_tensors) {
    if (std::string("Rlspnm").find(spec.what) == std::string::npos) continue;
    for (const int layer : one.moe_layers) {
      folder.tensors[absl::StrReplaceAll(spec.name, {{"{l}", absl::StrCat(layer)}})].dtype =
          layer % 2 == 0 ? DType::kF32 : DType::kBF16;
    }
  }
  const auto opened = Open(folder);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Checkpoint& checkpoint = **opened;
  EXPECT_EQ(checkpoint.layout(), one.layout);
  EXPECT_THAT(checkpoint.skipped_tensors(),
              ::testing::ElementsAre("lm_head.weight", "model.layers.9.mlp.gate.weight"));

  std::map<int, LayerKind> kinds;
  for (const int layer : one.moe_layers) kinds[layer] = LayerKind::kMoe;
  for (const int layer : one.dense_layers) kinds[layer] = LayerKind::kDense;
  ASSERT_EQ(checkpoint.model().layers.size(), kinds.size());
  for (const LayerDescription& layer : checkpoint.model().layers) {
    SCOPED_TRACE(absl::StrCat("layer ", layer.layer));
    ASSERT_EQ(kinds.count(layer.layer), 1u);
    EXPECT_EQ(layer.kind, kinds[layer.layer]);
    EXPECT_EQ(layer.experts.hidden_size, kHidden);
    const bool moe = layer.kind == LayerKind::kMoe;
    EXPECT_EQ(Summary(layer), moe ? one.moe : one.dense);
    const auto router = checkpoint.ReadRouter(layer.layer);
    ASSERT_TRUE(router.ok()) << router.status();
    if (moe) {
      EXPECT_EQ(layer.experts.weight_dtype, DType::kBF16);
      ASSERT_THAT(router->weight.shape(), ::testing::ElementsAre(kExperts + one.identity, kHidden));
      ExpectMatrix(router->weight, 0, kExperts + one.identity, 'R', layer.layer, 0);
      ExpectVector(one, router->logits_bias, 'l', layer.layer);
      ExpectVector(one, router->selection_bias, 's', layer.layer);
      ExpectVector(one, router->per_expert_scale, 'p', layer.layer);
      ExpectVector(one, router->input_norm, 'n', layer.layer);
      ExpectVector(one, router->expert_input_norm, 'm', layer.layer);
      ExpectVector(one, router->shared_gate, 'G', layer.layer);
      EXPECT_EQ(checkpoint.ExpertBytes(layer.layer), BytesOfExpert(layer.experts));
    } else {
      EXPECT_EQ(router->weight.num_elements(), 0);
      EXPECT_EQ(checkpoint.ExpertBytes(layer.layer), 0);
    }
    const int32_t routed = layer.router.num_experts;
    for (int32_t expert = 0; expert < routed; ++expert) {
      ExpectExpert(checkpoint, layer.experts, layer.layer, expert, expert, 0);
      if (HasFatalFailure()) return;
    }
    if (layer.shared.count == 1) {
      // A case may say that its dense layers are as wide as the routed experts.
      const bool as_dense = !moe && layer.shared.experts.intermediate_size == kDense;
      ExpectExpert(checkpoint, layer.shared.experts, layer.layer, routed, 0, as_dense ? 64 : 32);
    }
    EXPECT_EQ(checkpoint.ReadExpert(layer.layer, routed + layer.shared.count).status().code(),
              absl::StatusCode::kNotFound);
  }
}

// Whatever is wrong with any one tensor, the checkpoint is refused, and the tensor is named.
TEST_P(ModelFamilies, ABrokenTensorIsRefusedByName) {
  const FamilyCase& one = GetParam();
  const Folder good = MakeFolder(one);
  std::string previous;
  for (const auto& [name, tensor] : good.tensors) {
    if (name == "lm_head.weight") continue;
    // Of the experts in between nothing new is to be learned.
    const size_t at = name.find("experts.");
    const std::string id = at == std::string::npos ? "" : name.substr(at + 8, 3);
    if (!id.empty() && std::isdigit(id[0]) && id.substr(0, 2) != "0." && id != "11.") continue;
    const auto expect_refusal = [&](const Folder& folder, const std::string& what) {
      const absl::Status status = Open(folder).status();
      EXPECT_TRUE(status.code() == absl::StatusCode::kInvalidArgument ||
                  status.code() == absl::StatusCode::kUnimplemented)
          << name << " " << what << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(name)) << what;
    };
    Folder changed = good;
    changed.tensors.erase(name);
    expect_refusal(changed, "removed");

    changed = good;
    changed.tensors[name].dtype = DType::kI32;
    changed.tensors[name].values.resize(tensor.values.size());
    expect_refusal(changed, "as integers");

    changed = good;
    Stored& larger = changed.tensors[name];
    larger.values.resize(larger.values.size() / static_cast<size_t>(larger.shape[0]) *
                         static_cast<size_t>(larger.shape[0] + 1));
    ++larger.shape[0];
    expect_refusal(changed, "one row larger");

    changed = good;
    changed.tensors[name].shape.push_back(1);
    expect_refusal(changed, "with another dimension");

    if (!previous.empty() && good.tensors.at(previous).shape != tensor.shape) {
      changed = good;
      std::swap(changed.tensors[name], changed.tensors[previous]);
      const absl::Status status = Open(changed).status();
      EXPECT_FALSE(status.ok()) << name << " swapped with " << previous;
      EXPECT_THAT(std::string(status.message()),
                  ::testing::AnyOf(HasSubstr(name), HasSubstr(previous)));
    }
    previous = name;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, ModelFamilies, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<FamilyCase>& one) {
                           return absl::StrCat(one.param.name, "_", one.index);
                         });

// Every family that is served has a case above, but for those that are another one renamed.
TEST(ModelFamiliesTest, EveryFamilyHasACase) {
  std::set<std::string> tested;
  for (const FamilyCase& one : Cases()) tested.insert(json::parse(one.config)["model_type"]);
  const std::set<std::string> renamed = {"flex_olmo",        "glm4_moe_lite",
                                         "glm_moe_dsa",      "granitemoehybrid",
                                         "qwen3_5_moe_text", "qwen3_vl_moe_text"};
  for (const Family& family : BuiltInFamilies()) {
    if (!family.refused.empty() || renamed.count(family.model_type) != 0) continue;
    EXPECT_EQ(tested.count(family.model_type), 1u) << family.model_type;
  }
}

TEST(ModelFamiliesTest, WhatCannotBeServedIsRefusedByNameWithTheReason) {
  const struct {
    const char* type;
    const char* word;
  } refused[] = {{"zaya", "state"},        {"deepseek_v4", "token's id"},
                 {"kimi_k25", "int4"},     {"kimi_k3", "latent"},
                 {"inkling", "softmax"},   {"jetmoe", "bias"},
                 {"axk1", "norm"},         {"inkling_text", "softmax"},
                 {"nllb_moe", "capacity"}, {"switch_transformers", "capacity"}};
  EXPECT_EQ(std::size(refused),
            static_cast<size_t>(std::count_if(BuiltInFamilies().begin(), BuiltInFamilies().end(),
                                              [](const Family& f) { return !f.refused.empty(); })));
  for (const auto& [type, word] : refused) {
    const auto model = DescribeModel(json{{"model_type", type}}, BuiltInFamilies());
    EXPECT_EQ(model.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(model.status().message()),
                ::testing::AllOf(HasSubstr(type), HasSubstr(word)));
  }
}

// Keys that would change the result, with a value that is not supported.
TEST(ModelFamiliesTest, ValuesThatWouldChangeTheResultAreRefusedNamingTheKey) {
  const auto config_of = [](const std::string& name) {
    for (const FamilyCase& one : Cases()) {
      if (one.name == name) return json::parse(one.config);
    }
    return json();
  };
  const struct {
    const char* family;
    const char* key;
    json value;  // discarded: the key is removed
  } cases[] = {
      {"deepseek_v2", "topk_method", "noaux_tc"},
      {"deepseek_v2", "scoring_func", "sigmoid"},
      {"deepseek_v2", "norm_topk_prob", true},
      {"deepseek_v2", "n_group", json(json::value_t::discarded)},
      {"deepseek_v3", "topk_method", "greedy"},
      {"deepseek_v3", "scoring_func", "softmax"},
      {"deepseek_v3", "first_k_dense_replace", json(json::value_t::discarded)},
      {"deepseek_v3", "routed_scaling_factor", json(json::value_t::discarded)},
      {"deepseek_v3", "n_group", 5},
      {"deepseek_v32", "mlp_layer_types", json::array({"dense", "sparse"})},
      {"deepseek_v32", "mlp_layer_types", json::array({"dense", "sparse", "wide"})},
      {"qwen2_moe", "shared_expert_intermediate_size", json(json::value_t::discarded)},
      {"minimax_m2", "scoring_func", "softmax"},
      {"minimax_m1", "shared_intermediate_size", 16},
      {"phimoe", "num_experts_per_tok", 3},
      {"gpt_oss", "experts_per_token", 2},
      {"gpt_oss", "hidden_act", "gelu"},
      {"llama4_text", "moe_layers", json::array({3})},
      {"llama4_text", "moe_layers", json::array()},
      {"jamba", "expert_layer_offset", 3},
      {"ernie4_5_moe", "use_bias", true},
      {"hunyuan_v1_moe_lists", "moe_topk", json::array({3})},
      {"hunyuan_v1_moe_lists", "moe_intermediate_size", json::array({3, 4})},
      {"nemotron_h", "moe_latent_size", 16},
      {"nemotron_h", "mlp_hidden_act", "silu"},
      {"nemotron_h", "hybrid_override_pattern", "ME-"},
      {"nemotron_h", "hybrid_override_pattern", "ME-?E"},
      {"lfm2_moe", "use_expert_bias", "perhaps"},
      {"gemma4_text", "enable_moe_block", false},
      {"gemma4_text", "hidden_activation", "silu"},
      {"longcat_flash", "zero_expert_type", "copy"},
      {"longcat_flash", "router_bias", true},
      {"cohere2_moe", "expert_selection_fn", "max"},
      {"cohere2_moe", "shared_expert_combination_strategy", "product"},
  };
  for (const auto& [family, key, value] : cases) {
    json config = config_of(family);
    ASSERT_TRUE(DescribeModel(config, BuiltInFamilies()).ok()) << family;
    if (value.is_discarded()) {
      config.erase(key);
    } else {
      config[key] = value;
    }
    const auto model = DescribeModel(config, BuiltInFamilies());
    EXPECT_FALSE(model.ok()) << family << " " << key << " " << value;
    const std::string message(model.status().message());
    const std::string expected = std::string(key) == "moe_layers" && value.empty()
                                     ? "no layer is a MoE layer"
                                 : std::string(key) == "n_group" && value == 5 ? "5 groups"
                                                                               : key;
    EXPECT_THAT(message, HasSubstr(expected)) << family;
  }
}

// Families are data: what knows one by name is the registry and nothing else that is served.
TEST(ModelFamiliesTest, NoCodeButTheRegistryKnowsAFamilysName) {
  std::vector<std::string> names = {"deepseek", "qwen",    "llama",   "mistral", "kimi",
                                    "gptoss",   "granite", "hunyuan", "ernie",   "cohere"};
  for (const Family& family : BuiltInFamilies()) {
    if (family.model_type == "minimax") continue;  // a kind of polynomial, too
    names.push_back(absl::StrReplaceAll(family.model_type, {{"_", ""}}));
  }
  ASSERT_GE(names.size(), 40u);
  int files = 0;
  for (const char* part : {"proto", "router", "expert_server", "common"}) {
    const std::filesystem::path root =
        std::filesystem::path(EXPERTMESH_TEST_DATA).parent_path().parent_path() / part;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      if (!entry.is_regular_file() || entry.path().filename() == "registry.cc") continue;
      ++files;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        std::string text;
        for (const char c : line) {
          if (c != '_' && c != '-') text += static_cast<char>(std::tolower(c));
        }
        for (const std::string& name : names) {
          EXPECT_EQ(text.find(name), std::string::npos)
              << entry.path() << " knows '" << name << "': " << line;
        }
      }
    }
  }
  EXPECT_GT(files, 100);
}

// A family that nobody has, as one entry: all that the built-in ones may say at once.
TEST(ModelFamiliesTest, AnInventedFamilyIsOneEntry) {
  const Family invented = {
      .model_type = "invented",
      .intermediate_size = {{"w"}, {}, {}, true},
      .num_experts = {{"n"}, {}},
      .top_k = {{"k"}, {}, {}, true},
      .identity_experts = {{"z"}, 0},
      .dense_intermediate_size = {{"dense.w"}, {}},
      .shared_intermediate_size = {{"shared.w"}, {}},
      .num_shared_experts = {{"shared.n"}, {}, 0},
      .moe_layers = {.kinds = {{"pattern"}, {}},
                     .kind_names = {{"x", LayerKind::kMoe}, {"o", LayerKind::kDense}, {".", {}}}},
      .experts = {.has_bias = true},
      .shared = {.gated_by_sigmoid = true},
      .blocks = {""},
      .parts_of_block = {"pick.", "all.", "one."},
      .router_weight = {"pick.w"},
      .shared_gate = {"pick.shared"},
      .layouts = {{.name = "up first",
                   .gate_up = "one.{expert}.up_gate",
                   .down = "one.{expert}.down",
                   .gate_up_bias = "one.{expert}.up_gate_bias",
                   .down_bias = "one.{expert}.down_bias",
                   .order = GateUpOrder::kUpFirst,
                   .transposed = true}},
      .shared_layouts = {{.gate = "all.g",
                          .up = "all.u",
                          .down = "all.d",
                          .gate_bias = "all.gb",
                          .up_bias = "all.ub",
                          .down_bias = "all.db"}},
      .dense_layouts = {{.gate_up = "all.gu",
                         .down = "all.d",
                         .gate_up_bias = "all.gub",
                         .down_bias = "all.db",
                         .order = GateUpOrder::kInterleaved}},
  };
  Folder folder;
  // Layer 1 has experts of its own size, layer 2 has no feed-forward block at all.
  folder.config = json::parse(R"({"model_type": "invented", "hidden_size": 2, "w": [1, 2, 1, 1],
      "n": 2, "k": [1, 2, 1, 1], "z": 1, "shared": {"w": 1, "n": 2}, "dense": {"w": 2},
      "pattern": "xx.o"})");
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape,
                       const std::vector<float>& values) {
    folder.tensors[name] = {DType::kF16, shape, values};
  };
  for (const int64_t layer : {0, 1}) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const int64_t w = layer + 1;
    add(prefix + "pick.w", {3, 2}, {1, 2, 3, 4, 5, 6});
    add(prefix + "pick.shared", {1, 2}, {7, 8});
    for (const int64_t expert : {0, 1}) {
      const std::string one = absl::StrCat(prefix, "one.", expert, ".");
      const auto numbers = [&](int64_t count, float first) {
        std::vector<float> values;
        for (int64_t i = 0; i < count; ++i) {
          values.push_back(first + static_cast<float>(i + 100 * expert));
        }
        return values;
      };
      add(one + "up_gate", {2, 2 * w}, numbers(4 * w, 0));
      add(one + "down", {w, 2}, numbers(2 * w, 50));
      add(one + "up_gate_bias", {2 * w}, numbers(2 * w, 70));
      add(one + "down_bias", {2}, numbers(2, 80));
    }
    add(prefix + "all.g", {2, 2}, {1, 2, 3, 4});
    add(prefix + "all.u", {2, 2}, {5, 6, 7, 8});
    add(prefix + "all.d", {2, 2}, {9, 10, 11, 12});
    add(prefix + "all.gb", {2}, {13, 14});
    add(prefix + "all.ub", {2}, {15, 16});
    add(prefix + "all.db", {2}, {17, 18});
  }
  add("model.layers.3.all.gu", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  add("model.layers.3.all.d", {2, 2}, {9, 10, 11, 12});
  add("model.layers.3.all.gub", {4}, {13, 14, 15, 16});
  add("model.layers.3.all.db", {2}, {17, 18});
  const std::string path = (std::filesystem::temp_directory_path() /
                            absl::StrCat("model_families_test.invented.", getpid()))
                               .string();
  Write(folder, path);
  const std::vector<Family> families = {invented};
  const auto checkpoint = Checkpoint::Open(path, families);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelDescription& model = (*checkpoint)->model();
  EXPECT_EQ(model.num_hidden_layers, 4);
  ASSERT_EQ(model.layers.size(), 3u);
  EXPECT_EQ(Summary(model.layers[0]),
            "E2 K1 softmax identity 1, F1 silu bias, 1 shared F2 silu bias gated");
  EXPECT_EQ(Summary(model.layers[1]),
            "E2 K2 softmax identity 1, F2 silu bias, 1 shared F2 silu bias gated");
  EXPECT_EQ(model.layers[2].layer, 3);
  EXPECT_EQ(Summary(model.layers[2]), "1 shared F2 silu bias");
  EXPECT_EQ(BytesOfExpert(model.layers[1].experts), 12 * 2 + 6 * 4);

  const auto values = [](const Tensor& tensor) {
    std::vector<float> result;
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      result.push_back(LoadFloat(tensor.dtype(), tensor.data(), i));
    }
    return result;
  };
  using ::testing::ElementsAre;
  const auto routed = (*checkpoint)->ReadExpert(1, 1);  // up_gate: [2, 4], up first
  ASSERT_TRUE(routed.ok()) << routed.status();
  EXPECT_THAT(values(routed->gate_up), ElementsAre(102, 106, 103, 107, 100, 104, 101, 105));
  EXPECT_THAT(values(routed->down), ElementsAre(150, 152, 151, 153));
  EXPECT_THAT(values(routed->gate_up_bias), ElementsAre(172, 173, 170, 171));
  EXPECT_THAT(values(routed->down_bias), ElementsAre(180, 181));
  const auto shared = (*checkpoint)->ReadExpert(0, 2);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_THAT(values(shared->gate_up), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(values(shared->gate_up_bias), ElementsAre(13, 14, 15, 16));
  const auto dense = (*checkpoint)->ReadExpert(3, 0);
  ASSERT_TRUE(dense.ok()) << dense.status();
  EXPECT_THAT(values(dense->gate_up), ElementsAre(1, 2, 5, 6, 3, 4, 7, 8));
  EXPECT_THAT(values(dense->gate_up_bias), ElementsAre(13, 15, 14, 16));
  EXPECT_THAT(values(dense->down_bias), ElementsAre(17, 18));
  const auto router = (*checkpoint)->ReadRouter(0);
  ASSERT_TRUE(router.ok()) << router.status();
  EXPECT_THAT(values(router->shared_gate), ElementsAre(7, 8));
  EXPECT_THAT(router->weight.shape(), ElementsAre(3, 2));

  // null means no shared experts here.
  folder.config["shared"]["n"] = nullptr;
  Write(folder, path);
  EXPECT_THAT(Checkpoint::Open(path, families).status().ToString(),
              ::testing::AllOf(HasSubstr("pick.shared"), HasSubstr("not supported")));
  std::filesystem::remove_all(path);
}

// A text model inside a model of several parts whose own type nobody knows.
TEST(ModelFamiliesTest, FindsTheLanguageModelInsideAnother) {
  const json inner = json::parse(Cases().front().config);
  const auto model =
      DescribeModel({{"model_type", "see_and_speak"}, {"text_config", inner}}, BuiltInFamilies());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->family->model_type, inner["model_type"]);
  EXPECT_EQ(model->description.model_type, "see_and_speak");
  EXPECT_EQ(DescribeModel({{"model_type", "see_and_speak"}, {"text_config", {{"model_type", "x"}}}},
                          BuiltInFamilies())
                .status()
                .code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace expertmesh
