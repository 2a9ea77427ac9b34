// Every model family is described, and read, as what was written. Every tensor holds values that
// name its place, so that one that is transposed, interleaved or in the wrong order is seen.

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
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
#include "tests/families.h"

namespace expertmesh::families {
namespace {

using ::nlohmann::json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::vector<float> ValuesOf(const Tensor& tensor) {
  std::vector<float> values;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    values.push_back(LoadFloat(tensor.dtype(), tensor.data(), i));
  }
  return values;
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

// ---- The tests ---------------------------------------------------------------------------------

// The same bytes in another shape.
Tensor Reshaped(const Tensor& tensor, const std::vector<int64_t>& shape) {
  Tensor other(tensor.dtype(), shape);
  std::memcpy(other.data(), tensor.data(), tensor.num_bytes());
  return other;
}

// Whether a tensor of one dtype may stand where one of the other does: numbers may be F32, BF16 or
// F16, and scales bytes with exponents as well.
bool IsOfAKind(DType dtype, DType stored, bool scales) {
  if (dtype == stored) return true;
  if (scales && dtype == DType::kF8_E8M0) return true;
  return IsActivationDType(dtype) && stored != DType::kU8 && (scales || IsActivationDType(stored));
}

class FolderTest : public ::testing::Test {
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
  const int64_t hidden = shape.hidden_size;
  const int64_t width = shape.intermediate_size;
  const int64_t rows = (shape.gated ? 2 : 1) * width;
  ASSERT_THAT(weights->gate_up.shape(), ::testing::ElementsAre(rows, hidden));
  ASSERT_THAT(weights->down.shape(), ::testing::ElementsAre(hidden, width));
  EXPECT_EQ(weights->gate_up.dtype(), shape.weight_dtype);
  EXPECT_EQ(weights->down.dtype(), shape.weight_dtype);
  if (shape.gated) ExpectMatrix(weights->gate_up, 0, width, tag('g'), layer, expert);
  ExpectMatrix(weights->gate_up, rows - width, width, tag('u'), layer, expert);
  ExpectMatrix(weights->down, 0, hidden, tag('d'), layer, expert);
  if (!shape.has_bias) {
    EXPECT_EQ(weights->gate_up_bias.num_elements() + weights->down_bias.num_elements(), 0);
    return;
  }
  ASSERT_THAT(weights->gate_up_bias.shape(), ::testing::ElementsAre(rows));
  ASSERT_THAT(weights->down_bias.shape(), ::testing::ElementsAre(hidden));
  EXPECT_EQ(weights->gate_up_bias.dtype(), DType::kF32);
  ExpectMatrix(weights->gate_up_bias, 0, width, 'a', layer, expert);
  ExpectMatrix(weights->gate_up_bias, width, width, 'b', layer, expert);
  ExpectMatrix(weights->down_bias, 0, hidden, 'c', layer, expert);
}

// Values of a vector of the gate; empty where the case has no such tensor.
void ExpectVector(const FamilyCase& one, const Tensor& vector, char what, int layer) {
  const auto spec = std::find_if(one.moe_tensors.begin(), one.moe_tensors.end(),
                                 [what](const Spec& s) { return s.what == what; });
  if (spec == one.moe_tensors.end()) {
    EXPECT_EQ(vector.num_elements(), 0) << what;
    return;
  }
  const std::vector<float> values = ValuesOf(Fill(one, *spec, layer, 0));
  ASSERT_EQ(vector.num_elements(), static_cast<int64_t>(values.size())) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(LoadFloat(vector.dtype(), vector.data(), static_cast<int64_t>(i)), values[i]) << what;
  }
}

class ModelFamilies : public FolderTest, public ::testing::WithParamInterface<FamilyCase> {};

TEST_P(ModelFamilies, IsDescribedAndReadAsItWasWritten) {
  const FamilyCase& one = GetParam();
  Folder folder = MakeFolder(one);
  // What is past the last layer predicts further tokens, and is skipped.
  folder.tensors["model.layers.9.mlp.gate.weight"] = MakeTensor({1}, {1});
  // The gate and its vectors may be more precise than the experts.
  for (const Spec& spec : one.moe_tensors) {
    if (std::string("Rlspnm").find(spec.what) == std::string::npos) continue;
    for (const int layer : one.moe_layers) {
      if (layer % 2 != 0) continue;
      Tensor& tensor =
          folder.tensors[absl::StrReplaceAll(spec.name, {{"{l}", absl::StrCat(layer)}})];
      tensor = MakeTensor(tensor.shape(), ValuesOf(tensor), DType::kF32);
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
    EXPECT_EQ(layer.experts.hidden_size, one.hidden);
    const bool moe = layer.kind == LayerKind::kMoe;
    EXPECT_EQ(Summary(layer), moe ? one.moe : one.dense);
    const auto router = checkpoint.ReadRouter(layer.layer);
    ASSERT_TRUE(router.ok()) << router.status();
    if (moe) {
      EXPECT_EQ(layer.experts.weight_dtype, DType::kBF16);
      ASSERT_THAT(router->weight.shape(),
                  ::testing::ElementsAre(kExperts + one.identity, one.hidden));
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

class BrokenFamilies : public FolderTest, public ::testing::WithParamInterface<FamilyCase> {};

// Whatever is wrong with any one tensor, the checkpoint is refused, and the tensor is named.
TEST_P(BrokenFamilies, ABrokenTensorIsRefusedByName) {
  const FamilyCase& one = GetParam();
  const Folder good = MakeFolder(one);
  ASSERT_TRUE(Open(good).ok()) << Open(good).status();
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
      return std::string(status.message());
    };
    const auto instead = [&, name = name](const Tensor& other) {
      Folder changed = good;
      changed.tensors[name] = other;
      return changed;
    };
    const bool scales = one.scheme != Scheme::kNone && name.find("_scale") != std::string::npos;
    std::vector<int64_t> shape = tensor.shape();
    Folder changed = good;
    changed.tensors.erase(name);
    expect_refusal(changed, "removed");

    // Numbers of other kinds. The codes and scales of a format may have several.
    for (const DType dtype : {DType::kI32, DType::kF8_E5M2, DType::kU8, DType::kF8_E4M3,
                              DType::kF8_E8M0, DType::kBF16}) {
      if (IsOfAKind(dtype, tensor.dtype(), scales)) continue;
      const std::string what = absl::StrCat("as ", NameOf(dtype));
      const std::string message = expect_refusal(instead(Tensor(dtype, shape)), what);
      // What is given, or that what belongs to it is not expected.
      EXPECT_THAT(message, AnyOf(HasSubstr(NameOf(dtype)), HasSubstr("is missing"),
                                 HasSubstr("is not supported")))
          << what;
    }

    if (!shape.empty()) ++shape[0];
    const std::string given = expect_refusal(instead(Tensor(tensor.dtype(), shape)), "larger");
    EXPECT_THAT(given, AllOf(HasSubstr(ShapeToString(shape)), HasSubstr("expected [")));

    shape = tensor.shape();
    shape.push_back(1);
    if (one.scheme != Scheme::kFp8Tensor || tensor.num_elements() > 1) {  // [1, 1] is one too
      expect_refusal(instead(Reshaped(tensor, shape)), "with another dimension");
    }

    if (!previous.empty() && good.tensors.at(previous).shape() != tensor.shape()) {
      changed = good;
      std::swap(changed.tensors[name], changed.tensors[previous]);
      const absl::Status status = Open(changed).status();
      EXPECT_FALSE(status.ok()) << name << " swapped with " << previous;
      EXPECT_THAT(std::string(status.message()), AnyOf(HasSubstr(name), HasSubstr(previous)));
    }
    previous = name;
  }
}

// A file that ends too early, wherever that is: there is no byte that nobody misses.
TEST_P(BrokenFamilies, ATruncatedFileIsRefused) {
  ASSERT_TRUE(Open(MakeFolder(GetParam())).ok());
  const std::string file = folder_ + "/model.safetensors";
  const auto size = static_cast<int64_t>(std::filesystem::file_size(file));
  for (int64_t left = size - 1; left >= 0; left -= 1 + left / 8) {
    std::filesystem::resize_file(file, static_cast<uintmax_t>(left));
    const absl::Status status = Checkpoint::Open(folder_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << left << " of " << size;
    EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  }
}

std::string NameOfCase(const ::testing::TestParamInfo<FamilyCase>& one) {
  return absl::StrCat(one.param.name, "_", one.index);
}
INSTANTIATE_TEST_SUITE_P(Zoo, ModelFamilies, ::testing::ValuesIn(Cases()), NameOfCase);
INSTANTIATE_TEST_SUITE_P(Zoo, BrokenFamilies, ::testing::ValuesIn(Cases()), NameOfCase);
INSTANTIATE_TEST_SUITE_P(Quantised, BrokenFamilies, ::testing::ValuesIn(QuantisedCases()),
                         NameOfCase);

// No tool writes scales for all experts' rows in one dimension.
TEST_F(FolderTest, JoinedExpertsThatAreQuantisedAreRefused) {
  for (FamilyCase one : Cases()) {
    if (one.layout != "joined") continue;
    one.scheme = Scheme::kFp8Tensor;
    const absl::Status status = Open(MakeFolder(one)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("transformer.blocks.0.ffn.experts.mlp.w1"),
                      HasSubstr("all experts are rows of this one matrix")));
  }
}

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

// Families are data: what knows one by name are the registry and the presets, and nothing else that
// is served.
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
      const std::string name = entry.path().filename().string();
      if (!entry.is_regular_file() || name == "registry.cc" || name == "presets.cc") continue;
      ++files;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        std::string text;
        for (const char c : line) {
          if (c != '_' && c != '-') text += static_cast<char>(std::tolower(c));
        }
        for (const std::string& family : names) {
          EXPECT_EQ(text.find(family), std::string::npos)
              << entry.path() << " knows '" << family << "': " << line;
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
    folder.tensors[name] = MakeTensor(shape, values, DType::kF16);
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

  const auto& values = ValuesOf;
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
}  // namespace expertmesh::families
