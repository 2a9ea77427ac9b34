#include "tests/families.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/dtype.h"
#include "tests/random_tensor.h"

namespace expertmesh::families {

using ::nlohmann::json;

float Value(char what, int layer, int64_t expert, int64_t row, int64_t col) {
  uint64_t key = static_cast<uint64_t>(what);
  for (const int64_t part : {static_cast<int64_t>(layer), expert, row, col}) {
    key = (key * 1000003 + static_cast<uint64_t>(part) + 17) * 2654435761u % 1000000007u;
  }
  return static_cast<float>(key % 251) - 125.0f;
}

Tensor MakeTensor(const std::vector<int64_t>& shape, const std::vector<float>& values,
                  DType dtype) {
  Tensor tensor(dtype, shape);
  for (size_t i = 0; i < values.size(); ++i) {
    StoreFloat(dtype, tensor.data(), static_cast<int64_t>(i), values[i]);
  }
  return tensor;
}

Tensor Fill(const FamilyCase& one, const Spec& spec, int layer, int64_t expert_of_name) {
  // Axes with their extents, and which dimension of the file each belongs to.
  std::vector<std::pair<char, int64_t>> axes;
  std::vector<int64_t> shape;
  std::vector<float> values;
  const int64_t width = spec.what == 'S'   ? one.shared
                        : spec.what == 'M' ? one.dense_width
                                           : one.width;
  bool joined = false, first = true;
  for (const char c : spec.axes) {
    if (c == '(' || c == ')') {
      joined = c == '(';
      first = true;
      continue;
    }
    const int64_t extent = c == 'e'               ? kExperts
                           : c == 'D'             ? one.hidden
                           : c == 'N'             ? kExperts + one.identity
                           : c == '1'             ? 1
                           : c == 'j' || c == 'i' ? 2 * width
                                                  : width;
    axes.emplace_back(c, extent);
    if (joined && !first) {
      shape.back() *= extent;
    } else {
      shape.push_back(extent);
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
    values.push_back(Value(projection, layer, expert, row, col));
  }
  return MakeTensor(shape, values);
}

namespace {

json QuantizationConfig(Scheme scheme) {
  if (scheme == Scheme::kMxfp4) return {{"quant_method", "mxfp4"}};
  if (scheme == Scheme::kFp8Block || scheme == Scheme::kFp8BlockUe8m0) {
    return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  }
  const char* const strategy = scheme == Scheme::kFp8Row ? "channel" : "tensor";
  return {
      {"quant_method", "compressed-tensors"},
      {"format", "float-quantized"},
      {"config_groups",
       {{"group_0", {{"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", strategy}}}}}}}};
}

// Random codes and scales instead of a matrix, or of a stack of them, of that shape.
void AddQuantised(Scheme scheme, const std::string& name, const std::vector<int64_t>& shape,
                  Folder* folder) {
  std::seed_seq seed(name.begin(), name.end());
  std::mt19937 rng(seed);
  const auto bytes = [&rng](DType dtype, const std::vector<int64_t>& extents, auto value) {
    Tensor tensor(dtype, extents);
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      tensor.as<uint8_t>()[i] = static_cast<uint8_t>(value(rng()));
    }
    return tensor;
  };
  const auto any = [](uint32_t bits) { return bits; };
  const auto exponent = [](uint32_t bits) { return 116 + bits % 6; };
  if (scheme == Scheme::kMxfp4) {  // rows of outputs, though the plain ones are columns
    const int64_t experts = shape[0], k = shape[1], n = shape[2];
    folder->tensors[name + "_blocks"] = bytes(DType::kU8, {experts, n, k / 32, 16}, any);
    folder->tensors[name + "_scales"] = bytes(DType::kU8, {experts, n, k / 32}, exponent);
    return;
  }
  folder->tensors[name] = bytes(DType::kF8_E4M3, shape, [](uint32_t code) {
    return IsNaNE4M3(static_cast<uint8_t>(code)) ? 0 : code;
  });
  std::vector<int64_t> extents = {1};
  if (scheme == Scheme::kFp8Row) extents = {shape[0], 1};
  if (scheme == Scheme::kFp8Block || scheme == Scheme::kFp8BlockUe8m0) {
    extents = shape;
    for (size_t i = shape.size() - 2; i < shape.size(); ++i) extents[i] = (shape[i] + 127) / 128;
    if (scheme == Scheme::kFp8BlockUe8m0) {
      folder->tensors[name + "_scale_inv"] = bytes(DType::kF8_E8M0, extents, exponent);
      return;
    }
  }
  Tensor scales(DType::kF32, extents);
  for (int64_t i = 0; i < scales.num_elements(); ++i) {
    scales.as<float>()[i] = 1e-4f * static_cast<float>(1 + rng() % 20);
  }
  folder->tensors[name + (scheme == Scheme::kFp8Block ? "_scale_inv" : "_scale")] = scales;
}

void Add(const FamilyCase& one, const std::vector<Spec>& specs, int layer, Folder* folder) {
  for (const Spec& spec : specs) {
    const bool per_expert = spec.name.find("{e}") != std::string::npos;
    for (int64_t expert = 0; expert < (per_expert ? kExperts : 1); ++expert) {
      const std::string name = absl::StrReplaceAll(
          spec.name, {{"{l}", absl::StrCat(layer)}, {"{e}", absl::StrCat(expert)}});
      const Tensor plain = Fill(one, spec, layer, expert);
      const bool matrix = std::string("XSM").find(spec.what) != std::string::npos;
      if (matrix && one.scheme != Scheme::kNone) {
        AddQuantised(one.scheme, name, plain.shape(), folder);
      } else {
        folder->tensors[name] = plain;
      }
    }
  }
}

}  // namespace

Folder MakeFolder(const FamilyCase& one) {
  Folder folder;
  folder.config = json::parse(one.config);
  for (const int layer : one.moe_layers) Add(one, one.moe_tensors, layer, &folder);
  for (const int layer : one.dense_layers) Add(one, one.dense_tensors, layer, &folder);
  folder.tensors["lm_head.weight"] = MakeTensor({2}, {1, 2});
  if (one.scheme != Scheme::kNone) {
    folder.config["quantization_config"] = QuantizationConfig(one.scheme);
  }
  return folder;
}

Folder MakeRandomFolder(const FamilyCase& one) {
  Folder folder = MakeFolder(one);
  std::mt19937 rng(7);
  for (auto& [name, tensor] : folder.tensors) {
    if (tensor.dtype() != DType::kBF16) continue;  // codes and scales are
    tensor = RandomTensor(DType::kBF16, tensor.shape(), 0.5f, rng);
  }
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
    data.append(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
    header[name] = {{"dtype", NameOf(tensor.dtype())},
                    {"shape", tensor.shape()},
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

// ---- The cases ---------------------------------------------------------------------------------

namespace {

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

}  // namespace

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
    const FamilyCase one = {
        .name = "qwen3_vl_moe",
        .config = absl::StrCat(R"({"model_type": "qwen3_vl_moe", "text_config": {)", text, "}}"),
        .moe = "E12 K3 softmax norm 0, F3 silu",
        .moe_layers = {0, 1},
        .moe_tensors = gate_of_text + Transposed(deep),
        .layout = "fused"};
    add(one);
    fused(one, gate_of_text + Fused(deep));
    // The stacked gate and up projections are square: which dimension is which, the others say.
    FamilyCase square = one;
    square.config =
        absl::StrReplaceAll(one.config, {{R"("hidden_size": 5)", R"("hidden_size": 6)"}});
    square.hidden = 2 * kWidth;
    add(square);
    fused(square, gate_of_text + Fused(deep));
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

std::vector<FamilyCase> QuantisedCases() {
  const std::vector<FamilyCase> plain = Cases();
  std::vector<FamilyCase> cases;
  const auto add = [&](const std::string& family, const char* format, Scheme scheme, int64_t hidden,
                       int64_t width) {
    FamilyCase one = *std::find_if(plain.begin(), plain.end(), [&family](const FamilyCase& other) {
      return other.name == family;
    });
    one.name += format;
    one.scheme = scheme;
    one.hidden = hidden;
    one.shared = one.shared / one.width * width;
    one.width = width;
    one.dense_width = 150;
    json config = json::parse(one.config);
    config["hidden_size"] = hidden;
    const bool named = config.contains("moe_intermediate_size");
    if (named) config["intermediate_size"] = one.dense_width;
    config[named ? "moe_intermediate_size" : "intermediate_size"] = width;
    one.config = config.dump();
    cases.push_back(one);
  };
  add("deepseek_v3", "_fp8", Scheme::kFp8Block, 144, 68);
  add("deepseek_v32", "_ue8m0", Scheme::kFp8BlockUe8m0, 68, 144);
  add("qwen3_moe", "_fp8", Scheme::kFp8Block, 140, 132);
  add("qwen3_moe_fused", "_fp8", Scheme::kFp8Block, 68, 76);  // of 152 rows
  add("minimax_m2", "_fp8", Scheme::kFp8Block, 33, 130);
  add("glm4_moe", "_fp8_row", Scheme::kFp8Row, 50, 37);
  add("mixtral", "_fp8_row", Scheme::kFp8Row, 37, 50);
  add("mixtral", "_fp8_tensor", Scheme::kFp8Tensor, 50, 21);
  add("gpt_oss", "_mxfp4", Scheme::kMxfp4, 96, 160);
  return cases;
}

}  // namespace expertmesh::families
