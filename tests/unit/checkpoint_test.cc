// Model folders: written by the test itself (every layout, every malformed case) and, for the
// arrangement of the weights, by transformers (tests/golden/make_checkpoints.py).

#include "common/model/checkpoint.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/model/registry.h"
#include "common/safetensors/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using ::nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 5;        // D
constexpr int64_t kIntermediate = 3;  // F
constexpr int kExperts = 12;          // E, two digits: an order by name is not one by number
constexpr int kLayers = 2;

// The element of a matrix in its canonical arrangement: a small integer, exact in every dtype.
// `matrix` is 'g' (gate), 'u' (up), 'd' (down) or 'r' (router).
float Value(char matrix, int layer, int expert, int64_t row, int64_t col) {
  const uint64_t key = (((static_cast<uint64_t>(matrix) * 31 + static_cast<uint64_t>(layer)) * 131 +
                         static_cast<uint64_t>(expert)) *
                            137 +
                        static_cast<uint64_t>(row)) *
                           139 +
                       static_cast<uint64_t>(col);
  return static_cast<float>(key * 2654435761u % 251) - 125.0f;
}

// A tensor with element i = value(i).
Tensor Fill(DType dtype, const std::vector<int64_t>& shape,
            const std::function<float(int64_t)>& value) {
  Tensor tensor(dtype, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    StoreFloat(dtype, tensor.data(), i, value(i));
  }
  return tensor;
}

Tensor Matrix(DType dtype, char matrix, int layer, int expert, int64_t rows, int64_t cols) {
  return Fill(dtype, {rows, cols},
              [=](int64_t i) { return Value(matrix, layer, expert, i / cols, i % cols); });
}

// All experts of a layer as transformers 5 stacks them.
Tensor StackedGateUp(DType dtype, int layer, int experts = kExperts) {
  return Fill(dtype, {experts, 2 * kIntermediate, kHidden}, [=](int64_t i) {
    const int64_t row = i / kHidden % (2 * kIntermediate);
    return Value(row < kIntermediate ? 'g' : 'u', layer,
                 static_cast<int>(i / kHidden / (2 * kIntermediate)), row % kIntermediate,
                 i % kHidden);
  });
}
Tensor StackedDown(DType dtype, int layer, int experts = kExperts) {
  return Fill(dtype, {experts, kHidden, kIntermediate}, [=](int64_t i) {
    return Value('d', layer, static_cast<int>(i / kIntermediate / kHidden),
                 i / kIntermediate % kHidden, i % kIntermediate);
  });
}

std::string LayerName(int layer, const std::string& name) {
  return absl::StrCat("model.layers.", layer, ".", name);
}

// A folder before it is written: tests change it first.
struct Folder {
  json config;
  std::map<std::string, Tensor> tensors;
};

struct Names {
  std::string model_type;
  std::string block;
  std::string gate, up, down;  // empty: fused
};
const Names kMixtral = {"mixtral", "block_sparse_moe.", "w1", "w3", "w2"};
const Names kMixtralMlp = {"mixtral", "mlp.", "w1", "w3", "w2"};
const Names kMixtralFused = {"mixtral", "mlp.", "", "", ""};
const Names kMixtralOldFused = {"mixtral", "block_sparse_moe.", "", "", ""};
const Names kQwen = {"qwen3_moe", "mlp.", "gate_proj", "up_proj", "down_proj"};
const Names kQwenFused = {"qwen3_moe", "mlp.", "", "", ""};
const Names kOlmoe = {"olmoe", "mlp.", "gate_proj", "up_proj", "down_proj"};
const Names kOlmoeFused = {"olmoe", "mlp.", "", "", ""};

void AddLayer(const Names& names, int layer, DType dtype, Folder* folder) {
  const std::string block = LayerName(layer, names.block);
  auto& tensors = folder->tensors;
  tensors[block + "gate.weight"] = Matrix(dtype, 'r', layer, 0, kExperts, kHidden);
  if (names.gate.empty()) {
    tensors[block + "experts.gate_up_proj"] = StackedGateUp(dtype, layer);
    tensors[block + "experts.down_proj"] = StackedDown(dtype, layer);
    return;
  }
  for (int expert = 0; expert < kExperts; ++expert) {
    const std::string prefix = absl::StrCat(block, "experts.", expert, ".");
    tensors[prefix + names.gate + ".weight"] =
        Matrix(dtype, 'g', layer, expert, kIntermediate, kHidden);
    tensors[prefix + names.up + ".weight"] =
        Matrix(dtype, 'u', layer, expert, kIntermediate, kHidden);
    tensors[prefix + names.down + ".weight"] =
        Matrix(dtype, 'd', layer, expert, kHidden, kIntermediate);
  }
}

Folder MakeFolder(const Names& names = kOlmoe, DType dtype = DType::kBF16) {
  Folder folder;
  folder.config = {{"model_type", names.model_type}, {"num_hidden_layers", kLayers},
                   {"hidden_size", kHidden},         {"num_experts_per_tok", 2},
                   {"hidden_act", "silu"},           {"vocab_size", 7}};
  if (names.model_type == "mixtral") {
    folder.config["intermediate_size"] = kIntermediate;
    folder.config["num_local_experts"] = kExperts;
  } else if (names.model_type == "qwen3_moe") {
    folder.config["intermediate_size"] = 77;  // of dense layers: must not be taken
    folder.config["moe_intermediate_size"] = kIntermediate;
    folder.config["num_experts"] = kExperts;
    folder.config["norm_topk_prob"] = true;
  } else {
    folder.config["intermediate_size"] = kIntermediate;
    folder.config["num_experts"] = kExperts;
    folder.config["norm_topk_prob"] = false;
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    AddLayer(names, layer, dtype, &folder);
    folder.tensors[LayerName(layer, "input_layernorm.weight")] =
        Fill(DType::kF32, {kHidden}, [](int64_t) { return 1.0f; });
  }
  folder.tensors["model.embed_tokens.weight"] =
      Fill(DType::kBF16, {7, kHidden}, [](int64_t i) { return static_cast<float>(i); });
  return folder;
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

void WriteTensors(const std::string& path, const std::map<std::string, Tensor>& tensors) {
  const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
  ASSERT_TRUE(WriteSafetensors(path, views).ok());
}

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    for (char& c : name) c = c == '/' ? '_' : c;
    folder_ = (std::filesystem::temp_directory_path() /
               absl::StrCat("checkpoint_test.", getpid(), ".", name))
                  .string();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Clear() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  void Write(const Folder& folder) {
    Clear();
    WriteText(folder_ + "/config.json", folder.config.dump(1));
    WriteTensors(folder_ + "/model.safetensors", folder.tensors);
  }

  // Every `shards`-th tensor in the same file, and the index.
  json WriteSharded(const Folder& folder, size_t shards) {
    Clear();
    WriteText(folder_ + "/config.json", folder.config.dump(1));
    std::vector<std::map<std::string, Tensor>> parts(shards);
    json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
    size_t i = 0;
    for (const auto& [name, tensor] : folder.tensors) {
      const size_t part = i++ % shards;
      parts[part][name] = tensor;
      index["weight_map"][name] = absl::StrCat("model-", part, ".safetensors");
    }
    for (size_t part = 0; part < shards; ++part) {
      WriteTensors(absl::StrCat(folder_, "/model-", part, ".safetensors"), parts[part]);
    }
    WriteIndex(index);
    return index;
  }
  void WriteIndex(const json& index) {
    WriteText(folder_ + "/model.safetensors.index.json", index.dump());
  }

  std::shared_ptr<const Checkpoint> MustOpen() {
    auto checkpoint = Checkpoint::Open(folder_);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? *checkpoint : nullptr;
  }
  std::shared_ptr<const Checkpoint> MustOpen(const Folder& folder) {
    Write(folder);
    return MustOpen();
  }

  // The refusal of what is on disk, as "CODE: message"; "accepted" if there is none.
  std::string Refusal() {
    const auto checkpoint = Checkpoint::Open(folder_);
    return checkpoint.ok() ? "accepted" : checkpoint.status().ToString();
  }
  std::string Refusal(const Folder& folder) {
    Write(folder);
    return Refusal();
  }

  std::string folder_;
};

// Every weight of every expert and router is the one that was written.
void ExpectWeights(const Checkpoint& checkpoint, DType dtype) {
  for (const LayerDescription& layer : checkpoint.model().layers) {
    const auto router = checkpoint.ReadRouter(layer.layer);
    ASSERT_TRUE(router.ok()) << router.status();
    ASSERT_THAT(router->weight.shape(), ElementsAre(kExperts, kHidden));
    for (int64_t i = 0; i < kExperts * kHidden; ++i) {
      ASSERT_EQ(LoadFloat(router->weight.dtype(), router->weight.data(), i),
                Value('r', layer.layer, 0, i / kHidden, i % kHidden));
    }
    EXPECT_EQ(router->logits_bias.num_elements(), 0);
    EXPECT_EQ(layer.experts.weight_dtype, dtype);
    EXPECT_EQ(checkpoint.ExpertBytes(layer.layer), 3 * kHidden * kIntermediate * BytesOf(dtype));
    for (int expert = 0; expert < kExperts; ++expert) {
      const auto weights = checkpoint.ReadExpert(layer.layer, expert);
      ASSERT_TRUE(weights.ok()) << weights.status();
      ASSERT_EQ(weights->gate_up.dtype(), dtype);
      ASSERT_THAT(weights->gate_up.shape(), ElementsAre(2 * kIntermediate, kHidden));
      ASSERT_THAT(weights->down.shape(), ElementsAre(kHidden, kIntermediate));
      for (int64_t i = 0; i < 2 * kIntermediate * kHidden; ++i) {
        const int64_t row = i / kHidden;
        ASSERT_EQ(LoadFloat(dtype, weights->gate_up.data(), i),
                  Value(row < kIntermediate ? 'g' : 'u', layer.layer, expert, row % kIntermediate,
                        i % kHidden))
            << "layer " << layer.layer << " expert " << expert << " element " << i;
      }
      for (int64_t i = 0; i < kHidden * kIntermediate; ++i) {
        ASSERT_EQ(LoadFloat(dtype, weights->down.data(), i),
                  Value('d', layer.layer, expert, i / kIntermediate, i % kIntermediate));
      }
    }
  }
}

TEST_F(CheckpointTest, ReadsEveryFamilyLayoutAndDType) {
  for (const Names& names : {kMixtral, kMixtralMlp, kMixtralFused, kMixtralOldFused, kQwen,
                             kQwenFused, kOlmoe, kOlmoeFused}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(names.model_type + " " + names.block + names.gate + " " + NameOf(dtype));
      const auto checkpoint = MustOpen(MakeFolder(names, dtype));
      ASSERT_NE(checkpoint, nullptr);
      EXPECT_EQ(checkpoint->layout(), names.gate.empty() ? "fused" : "per-expert");
      EXPECT_EQ(checkpoint->model().layers.size(), 2u);
      ExpectWeights(*checkpoint, dtype);
      EXPECT_THAT(checkpoint->skipped_tensors(),
                  ElementsAre("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
                              "model.layers.1.input_layernorm.weight"));
    }
  }
}

TEST_F(CheckpointTest, DescribesTheModel) {
  const auto checkpoint = MustOpen(MakeFolder(kQwen));
  ASSERT_NE(checkpoint, nullptr);
  const ModelDescription& model = checkpoint->model();
  EXPECT_EQ(model.model_type, "qwen3_moe");
  EXPECT_EQ(model.num_hidden_layers, 2);
  const LayerDescription* layer = model.Find(1);
  ASSERT_NE(layer, nullptr);
  EXPECT_EQ(layer->kind, LayerKind::kMoe);
  EXPECT_EQ(layer->router.num_experts, kExperts);
  EXPECT_EQ(layer->router.top_k, 2);
  EXPECT_EQ(layer->router.score, ScoreFunction::kSoftmax);
  EXPECT_EQ(layer->router.order, ScoreOrder::kScoreThenTopK);
  EXPECT_EQ(layer->router.norm, WeightNorm::kSum);
  EXPECT_EQ(layer->router.scale, 1.0f);
  EXPECT_EQ(layer->experts.hidden_size, kHidden);
  EXPECT_EQ(layer->experts.intermediate_size, kIntermediate);
  EXPECT_EQ(layer->experts.activation, Activation::kSiluGlu);
  EXPECT_EQ(model.Find(2), nullptr);
}

TEST_F(CheckpointTest, ConfigKeysHaveOtherNamesAndDefaults) {
  const auto norm = [this](const Folder& folder) {
    return MustOpen(folder)->model().layers[0].router.norm;
  };
  Folder mixtral = MakeFolder(kMixtral);
  EXPECT_EQ(norm(mixtral), WeightNorm::kSum);
  mixtral.config["norm_topk_prob"] = false;  // a key the family does not have
  EXPECT_EQ(norm(mixtral), WeightNorm::kSum);

  for (const Names& names : {kQwen, kOlmoe}) {
    Folder folder = MakeFolder(names);
    folder.config["norm_topk_prob"] = true;
    EXPECT_EQ(norm(folder), WeightNorm::kSum);
    folder.config["norm_topk_prob"] = false;
    EXPECT_EQ(norm(folder), WeightNorm::kNone);
    folder.config.erase("norm_topk_prob");
    EXPECT_EQ(norm(folder), WeightNorm::kNone);
    folder.config["norm_topk_prob"] = nullptr;  // null is absent
    EXPECT_EQ(norm(folder), WeightNorm::kNone);
  }

  Folder qwen = MakeFolder(kQwen);
  qwen.config.erase("num_experts");
  qwen.config["num_local_experts"] = kExperts;
  EXPECT_EQ(Refusal(qwen), "accepted");
  qwen.config["num_experts"] = nullptr;
  EXPECT_EQ(Refusal(qwen), "accepted");
  qwen.config["num_experts"] = kExperts;
  EXPECT_EQ(Refusal(qwen), "accepted");
  qwen.config["num_experts"] = kExperts + 1;
  EXPECT_THAT(Refusal(qwen), AllOf(HasSubstr("num_experts = 13"),
                                   HasSubstr("num_local_experts = 12"), HasSubstr("contradict")));
  Folder top_e = MakeFolder();
  top_e.config["num_experts_per_tok"] = kExperts;
  EXPECT_EQ(Refusal(top_e), "accepted");
}

TEST_F(CheckpointTest, RefusesBadConfigurationsNamingTheKey) {
  const struct {
    const char* key;
    json value;  // discarded: the key is removed
    const char* code;
    std::vector<std::string> words;
  } cases[] = {
      {"model_type", "llama", "UNIMPLEMENTED", {"'llama'", "mixtral, qwen3_moe, olmoe"}},
      {"model_type", 3, "INVALID_ARGUMENT", {"model_type", "a string", "3"}},
      {"model_type", json::value_t::discarded, "INVALID_ARGUMENT", {"model_type", "missing"}},
      {"num_experts", 0, "INVALID_ARGUMENT", {"num_experts", "given 0"}},
      {"num_experts", -4, "INVALID_ARGUMENT", {"num_experts", "given -4"}},
      {"num_experts", "12", "INVALID_ARGUMENT", {"num_experts", "an integer", "\"12\""}},
      {"num_experts", 12.0, "INVALID_ARGUMENT", {"num_experts", "an integer", "12.0"}},
      {"num_experts", true, "INVALID_ARGUMENT", {"num_experts", "an integer", "true"}},
      {"num_experts", nullptr, "INVALID_ARGUMENT", {"num_experts", "missing"}},
      {"num_experts", json::value_t::discarded, "INVALID_ARGUMENT", {"num_experts", "missing"}},
      {"num_experts", json::array({12}), "INVALID_ARGUMENT", {"num_experts", "[12]"}},
      {"num_experts", 18446744073709551615u, "INVALID_ARGUMENT", {"num_experts", "an integer"}},
      {"num_experts_per_tok", 0, "INVALID_ARGUMENT", {"num_experts_per_tok", "given 0"}},
      {"num_experts_per_tok", 13, "INVALID_ARGUMENT", {"K > E", "13", "12"}},
      {"num_experts_per_tok",
       json::value_t::discarded,
       "INVALID_ARGUMENT",
       {"num_experts_per_tok", "missing"}},
      {"hidden_size", 0, "INVALID_ARGUMENT", {"hidden_size", "given 0"}},
      {"hidden_size", 1ll << 40, "INVALID_ARGUMENT", {"hidden_size", "1099511627776"}},
      {"hidden_size", json::value_t::discarded, "INVALID_ARGUMENT", {"hidden_size", "missing"}},
      {"intermediate_size", -1, "INVALID_ARGUMENT", {"intermediate_size", "given -1"}},
      {"num_hidden_layers", 0, "INVALID_ARGUMENT", {"num_hidden_layers", "given 0"}},
      {"num_hidden_layers", 1 << 30, "INVALID_ARGUMENT", {"num_hidden_layers", "4096"}},
      {"num_hidden_layers",
       3,
       "INVALID_ARGUMENT",
       {"layer 2", "no gate", "model.layers.2.mlp.gate"}},
      {"norm_topk_prob", 1, "INVALID_ARGUMENT", {"norm_topk_prob", "true or false", "given 1"}},
      {"hidden_act", "gelu", "UNIMPLEMENTED", {"hidden_act", "'gelu'", "silu"}},
      {"hidden_act", 1, "INVALID_ARGUMENT", {"hidden_act", "a string"}},
      {"quantization_config",
       {{"quant_method", "gptq"}},
       "UNIMPLEMENTED",
       {"quantization_config", "gptq"}},
      {"quantization_config", json::object(), "UNIMPLEMENTED", {"quantization_config"}},
  };
  for (const auto& bad : cases) {
    Folder folder = MakeFolder();
    if (bad.value.is_discarded()) {
      folder.config.erase(bad.key);
    } else {
      folder.config[bad.key] = bad.value;
    }
    const std::string refusal = Refusal(folder);
    EXPECT_THAT(refusal, HasSubstr(bad.code));
    EXPECT_THAT(refusal, HasSubstr("config.json")) << bad.key;
    for (const std::string& word : bad.words) EXPECT_THAT(refusal, HasSubstr(word)) << bad.key;
  }
  Folder huge = MakeFolder();
  huge.config["num_experts"] = (1 << 20) + 1;
  EXPECT_THAT(Refusal(huge), AllOf(HasSubstr("num_experts"), HasSubstr("from 1 to 1048576"),
                                   HasSubstr("given 1048577")));
  huge.config["num_experts"] = 1 << 20;
  huge.config["hidden_size"] = 1 << 30;
  huge.config["intermediate_size"] = 1 << 30;
  EXPECT_THAT(Refusal(huge), HasSubstr("do not fit in 63 bits"));
  Folder none = MakeFolder();
  none.config["quantization_config"] = nullptr;
  EXPECT_EQ(Refusal(none), "accepted");
}

TEST_F(CheckpointTest, RefusesConfigurationsThatAreNoJson) {
  Write(MakeFolder());
  const std::string text = MakeFolder().config.dump();
  for (size_t size = 0; size < text.size(); ++size) {
    WriteText(folder_ + "/config.json", text.substr(0, size));
    ASSERT_THAT(Refusal(), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("config.json"))) << size;
  }
  WriteText(folder_ + "/config.json", "[]");
  EXPECT_THAT(Refusal(), HasSubstr("expected an object, given array"));
  WriteText(folder_ + "/config.json", R"({"model_type":"olmoe","model_type":"olmoe"})");
  EXPECT_THAT(Refusal(), HasSubstr("duplicate key 'model_type'"));
  std::filesystem::remove(folder_ + "/config.json");
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("config.json")));
  std::filesystem::remove_all(folder_);
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("no such folder")));
}

TEST_F(CheckpointTest, DenseLayersAreServedAndOthersListed) {
  Folder folder = MakeFolder(kQwen);
  folder.config["num_hidden_layers"] = 4;
  folder.config["decoder_sparse_step"] = 2;  // layers 1 and 3 are MoE,
  folder.config["mlp_only_layers"] = {3};    // 3 is not
  for (auto it = folder.tensors.begin(); it != folder.tensors.end();) {
    it = it->first.rfind("model.layers.0.mlp", 0) == 0 ? folder.tensors.erase(it) : std::next(it);
  }
  folder.config["intermediate_size"] = 7;
  for (const int layer : {0, 2, 3}) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = name[0] == 'd';
      folder.tensors[LayerName(layer, absl::StrCat("mlp.", name, ".weight"))] =
          Matrix(DType::kF16, name[0], layer, 0, down ? kHidden : 7, down ? 7 : kHidden);
    }
  }
  // A layer past the last: for predicting several tokens at once.
  folder.tensors["model.layers.4.mlp.gate.weight"] = Matrix(DType::kBF16, 'g', 0, 0, 7, 5);
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  ASSERT_EQ(checkpoint->model().layers.size(), 4u);
  for (const int index : {0, 2, 3}) {
    const LayerDescription& layer = checkpoint->model().layers[static_cast<size_t>(index)];
    EXPECT_EQ(layer.layer, index);
    EXPECT_EQ(layer.kind, LayerKind::kDense);
    EXPECT_EQ(layer.router.num_experts, 0);
    EXPECT_EQ(layer.router.top_k, 0);
    EXPECT_EQ(layer.experts.hidden_size, kHidden);
    EXPECT_EQ(checkpoint->ExpertBytes(index), 0);
    ASSERT_EQ(layer.shared.count, 1);
    EXPECT_EQ(layer.shared.experts.intermediate_size, 7);
    EXPECT_EQ(BytesOfExpert(layer.shared.experts), 3 * 7 * kHidden * 2);
    const auto router = checkpoint->ReadRouter(index);
    ASSERT_TRUE(router.ok()) << router.status();
    EXPECT_EQ(router->weight.num_elements(), 0);
    const auto weights = checkpoint->ReadExpert(index, 0);
    ASSERT_TRUE(weights.ok()) << weights.status();
    ASSERT_THAT(weights->gate_up.shape(), ElementsAre(14, kHidden));
    const Tensor up = Matrix(DType::kF16, 'u', index, 0, 7, kHidden);
    const Tensor down = Matrix(DType::kF16, 'd', index, 0, kHidden, 7);
    EXPECT_EQ(std::memcmp(weights->gate_up.data() + up.num_bytes(), up.data(), up.num_bytes()), 0);
    EXPECT_EQ(std::memcmp(weights->down.data(), down.data(), down.num_bytes()), 0);
    EXPECT_EQ(checkpoint->ReadExpert(index, 1).status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_THAT(checkpoint->skipped_tensors(),
              ::testing::Contains(std::string("model.layers.4.mlp.gate.weight")));
  for (const std::string& skipped : checkpoint->skipped_tensors()) {
    EXPECT_THAT(skipped, ::testing::Not(HasSubstr("_proj")));
  }

  Folder incomplete = folder;
  incomplete.tensors.erase("model.layers.3.mlp.up_proj.weight");
  EXPECT_THAT(Refusal(incomplete), AllOf(HasSubstr("layers.3.mlp.up_proj"), HasSubstr("missing")));
  incomplete.tensors.erase("model.layers.3.mlp.gate_proj.weight");
  incomplete.tensors.erase("model.layers.3.mlp.down_proj.weight");
  EXPECT_THAT(Refusal(incomplete),
              AllOf(HasSubstr("layer 3 is dense"), HasSubstr("layers.3.mlp.gate_proj.weight")));
  Folder biased = folder;
  biased.tensors["model.layers.3.mlp.up_proj.bias"] = Matrix(DType::kBF16, 'g', 0, 0, 1, 7);
  EXPECT_THAT(Refusal(biased), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("up_proj.bias")));

  folder.config["mlp_only_layers"] = {1, 3};
  EXPECT_THAT(Refusal(folder), HasSubstr("no layer is a MoE layer"));
  folder.config["mlp_only_layers"] = "1";
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr("mlp_only_layers"), HasSubstr("a list of integers")));
  folder.config["mlp_only_layers"] = nullptr;
  EXPECT_THAT(Refusal(folder), HasSubstr("layer 3"));
  folder.config["mlp_only_layers"] = {3};
  folder.config["decoder_sparse_step"] = 0;
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("decoder_sparse_step"), HasSubstr("given 0")));
  // The files say MoE where the configuration says dense.
  Folder contradicting = MakeFolder(kQwen);
  contradicting.config["mlp_only_layers"] = {0};
  EXPECT_THAT(Refusal(contradicting), AllOf(HasSubstr("layer 0"), HasSubstr("not MoE")));
}

TEST_F(CheckpointTest, RefusesTensorsThatDoNotFitTheConfiguration) {
  for (const Names& names : {kOlmoe, kOlmoeFused}) {
    for (const int experts : {kExperts - 1, kExperts + 1}) {
      Folder folder = MakeFolder(names);
      folder.config["num_experts"] = experts;
      EXPECT_THAT(Refusal(folder),
                  AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("gate.weight"),
                        HasSubstr("[12, 5]"), HasSubstr(absl::StrCat("[", experts, ", 5]"))));
    }
    Folder folder = MakeFolder(names);
    folder.config["hidden_size"] = 4;
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("[12, 5]"), HasSubstr("[12, 4]")));
    folder.config["hidden_size"] = 5;
    folder.config["intermediate_size"] = 4;
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("experts.")));
  }
  // A gate of the right size, but experts that are not.
  const std::string expert11 = "model.layers.1.mlp.experts.11.up_proj.weight";
  Folder folder = MakeFolder();
  folder.tensors.erase(expert11);
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(expert11), HasSubstr("missing")));
  folder = MakeFolder();
  folder.tensors["model.layers.1.mlp.experts.12.up_proj.weight"] = folder.tensors[expert11];
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("experts.12.up_proj"),
                                     HasSubstr("12 experts")));
  folder = MakeFolder();
  folder.tensors[expert11] = Matrix(DType::kBF16, 'u', 1, 11, kHidden, kIntermediate);
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr(expert11), HasSubstr("[5, 3]"), HasSubstr("[3, 5]")));
  for (const int experts : {kExperts - 1, kExperts + 1}) {
    folder = MakeFolder(kOlmoeFused);
    folder.tensors["model.layers.0.mlp.experts.down_proj"] = StackedDown(DType::kBF16, 0, experts);
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("experts.down_proj"), HasSubstr("[12, 5, 3]"),
                                       HasSubstr(absl::StrCat("[", experts, ", 5, 3]"))));
  }
  folder = MakeFolder();
  folder.tensors.erase("model.layers.1.mlp.gate.weight");
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("layer 1"), HasSubstr("no gate")));
  // Layers of a base model saved alone have no "model." in front.
  Folder base = MakeFolder();
  base.tensors.clear();
  for (const auto& [name, tensor] : MakeFolder().tensors) {
    base.tensors[absl::StrReplaceAll(name, {{"model.", ""}})] = tensor;
  }
  EXPECT_EQ(Refusal(base), "accepted");
}

TEST_F(CheckpointTest, RefusesTensorsInABlockThatWouldChangeItsResult) {
  for (const char* name : {"mlp.experts.3.gate_proj.bias", "mlp.gate.e_score_correction_bias",
                           "mlp.shared_expert.up_proj.weight", "mlp.experts.x.up_proj.weight",
                           "mlp.experts.gate_up_proj"}) {
    Folder folder = MakeFolder();
    folder.tensors[LayerName(1, name)] = Matrix(DType::kBF16, 'g', 0, 0, 2, 2);
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(LayerName(1, name))));
  }
  // Layers in different layouts.
  Folder mixed = MakeFolder();
  const Folder fused = MakeFolder(kOlmoeFused);
  for (auto it = mixed.tensors.begin(); it != mixed.tensors.end();) {
    it = it->first.rfind("model.layers.1.mlp", 0) == 0 ? mixed.tensors.erase(it) : std::next(it);
  }
  for (const auto& [name, tensor] : fused.tensors) {
    if (name.rfind("model.layers.1.mlp", 0) == 0) mixed.tensors[name] = tensor;
  }
  EXPECT_THAT(Refusal(mixed),
              AllOf(HasSubstr("layer 1"), HasSubstr("fused"), HasSubstr("per-expert")));
}

TEST_F(CheckpointTest, DTypesMayDifferBetweenLayersButNotInOne) {
  Folder folder = MakeFolder(kOlmoe, DType::kBF16);
  AddLayer(kOlmoe, 1, DType::kF32, &folder);
  folder.tensors["model.layers.0.mlp.gate.weight"] =
      Matrix(DType::kF32, 'r', 0, 0, kExperts, kHidden);
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  EXPECT_EQ(checkpoint->model().Find(0)->experts.weight_dtype, DType::kBF16);
  EXPECT_EQ(checkpoint->model().Find(1)->experts.weight_dtype, DType::kF32);
  EXPECT_EQ(checkpoint->ReadRouter(0)->weight.dtype(), DType::kF32);
  EXPECT_EQ(checkpoint->ReadExpert(1, 2)->down.dtype(), DType::kF32);

  const std::string name = "model.layers.0.mlp.experts.7.down_proj.weight";
  folder.tensors[name] = Matrix(DType::kF16, 'd', 0, 7, kHidden, kIntermediate);
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(name),
                                     HasSubstr("F16"), HasSubstr("BF16")));
  folder.tensors[name] = Tensor(DType::kF8_E4M3, {kHidden, kIntermediate});
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(name), HasSubstr("F8_E4M3")));
}

TEST_F(CheckpointTest, RefusesNonFiniteWeightsNamingTensorAndIndex) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const float bad : {infinity, -infinity, std::nanf("")}) {
      Folder folder = MakeFolder(kOlmoeFused, dtype);
      Tensor& down = folder.tensors["model.layers.1.mlp.experts.down_proj"];
      StoreFloat(dtype, down.data(), (3 * kHidden + 4) * kIntermediate + 1, bad);
      StoreFloat(dtype, folder.tensors["model.layers.0.mlp.gate.weight"].data(), 2 * kHidden, bad);
      const auto checkpoint = MustOpen(folder);
      ASSERT_NE(checkpoint, nullptr);
      const absl::Status expert = checkpoint->ReadExpert(1, 3).status();
      EXPECT_EQ(expert.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(expert.message()),
                  AllOf(HasSubstr("layers.1.mlp.experts.down_proj"), HasSubstr("[3, 4, 1]")));
      const absl::Status router = checkpoint->ReadRouter(0).status();
      EXPECT_THAT(std::string(router.message()),
                  AllOf(HasSubstr("layers.0.mlp.gate.weight"), HasSubstr("[2, 0]")));
      // The neighbours in the same tensor are not even looked at.
      EXPECT_TRUE(checkpoint->ReadExpert(1, 2).ok());
      EXPECT_TRUE(checkpoint->ReadExpert(1, 4).ok());
      EXPECT_TRUE(checkpoint->ReadRouter(1).ok());
    }
  }
  // The largest finite values are fine.
  Folder folder = MakeFolder(kOlmoeFused, DType::kF16);
  StoreFloat(DType::kF16, folder.tensors["model.layers.1.mlp.experts.down_proj"].data(), 0,
             65504.0f);
  EXPECT_TRUE(MustOpen(folder)->ReadExpert(1, 0).ok());
}

TEST_F(CheckpointTest, FindsANonFiniteWeightAnywhereInALargeMatrix) {
  Folder folder = MakeFolder(kOlmoeFused, DType::kBF16);
  folder.config["num_hidden_layers"] = 1;
  folder.config["num_experts"] = 2;
  folder.config["hidden_size"] = 100;
  folder.config["intermediate_size"] = 51;
  folder.tensors = {{"model.layers.0.mlp.gate.weight",
                     Fill(DType::kBF16, {2, 100}, [](int64_t) { return 1.0f; })}};
  folder.tensors["model.layers.0.mlp.experts.gate_up_proj"] =
      Fill(DType::kBF16, {2, 102, 100}, [](int64_t) { return 1.0f; });
  for (const int64_t at : {0, 1023, 1024, 4000, 5099}) {
    folder.tensors["model.layers.0.mlp.experts.down_proj"] = Fill(
        DType::kBF16, {2, 100, 51},
        [at](int64_t i) { return i == 5100 + at ? std::numeric_limits<float>::infinity() : 1.0f; });
    const auto checkpoint = MustOpen(folder);
    ASSERT_NE(checkpoint, nullptr);
    EXPECT_THAT(std::string(checkpoint->ReadExpert(0, 1).status().message()),
                HasSubstr(absl::StrCat("[1, ", at / 51, ", ", at % 51, "]")));
    EXPECT_TRUE(checkpoint->ReadExpert(0, 0).ok());
  }
}

TEST_F(CheckpointTest, LayersAndExpertsThatDoNotExistAreNotFound) {
  const auto checkpoint = MustOpen(MakeFolder());
  ASSERT_NE(checkpoint, nullptr);
  for (const int32_t layer : {-1, 2}) {
    EXPECT_EQ(checkpoint->ReadRouter(layer).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(checkpoint->ReadExpert(layer, 0).status().code(), absl::StatusCode::kNotFound);
  }
  for (const int32_t expert : {-1, kExperts}) {
    EXPECT_EQ(checkpoint->ReadExpert(0, expert).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(CheckpointTest, ReadsShardsOfAnIndex) {
  for (const size_t shards : {1, 3, 7}) {
    json index = WriteSharded(MakeFolder(kMixtral), shards);
    const auto checkpoint = MustOpen();
    ASSERT_NE(checkpoint, nullptr);
    ExpectWeights(*checkpoint, DType::kBF16);
    index.erase("metadata");
    WriteIndex(index);
    EXPECT_EQ(Refusal(), "accepted");
  }
}

TEST_F(CheckpointTest, FollowsTheSymbolicLinksOfAHuggingFaceCache) {
  WriteSharded(MakeFolder(), 2);
  const std::string blobs = folder_ + "/cache/blobs";
  const std::string snapshot = folder_ + "/cache/snapshots/0123abc";
  std::filesystem::create_directories(blobs);
  std::filesystem::create_directories(snapshot);
  for (const char* name : {"config.json", "model.safetensors.index.json", "model-0.safetensors",
                           "model-1.safetensors"}) {
    std::filesystem::rename(folder_ + "/" + name, blobs + "/blob-of-" + name);
    std::filesystem::create_symlink(std::string("../../blobs/blob-of-") + name,
                                    snapshot + "/" + name);
  }
  const auto checkpoint = Checkpoint::Open(snapshot);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectWeights(**checkpoint, DType::kBF16);
}

TEST_F(CheckpointTest, RefusesBrokenIndexes) {
  const std::string gate = "model.layers.0.mlp.gate.weight";
  const Folder folder = MakeFolder();
  json index = WriteSharded(folder, 3);
  const std::string own_file = index["weight_map"][gate];

  std::filesystem::remove(folder_ + "/" + own_file);
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr(own_file),
                               HasSubstr("model.safetensors.index.json: weight_map: '"),
                               HasSubstr("No such file")));

  index = WriteSharded(folder, 3);
  const auto with = [&](const std::string& tensor, const json& file) {
    json changed = index;
    changed["weight_map"][tensor] = file;
    WriteIndex(changed);
    return Refusal();
  };
  EXPECT_THAT(with("ghost", own_file), AllOf(HasSubstr("'ghost'"), HasSubstr("is not in")));
  EXPECT_THAT(
      with(gate, own_file == "model-0.safetensors" ? "model-1.safetensors" : "model-0.safetensors"),
      AllOf(HasSubstr(gate), HasSubstr("is not in")));
  for (const char* path : {"../model-0.safetensors", "/etc/passwd", "a/../../b", "..", ""}) {
    EXPECT_THAT(with(gate, path), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate),
                                        HasSubstr("inside the model's folder")))
        << path;
  }
  EXPECT_THAT(with(gate, std::string("model-0.safetensors\0x", 21)), HasSubstr("inside"));
  for (const size_t bytes : {256, 5000, 100000}) {
    const std::string refusal = with(gate, std::string(bytes, 'm'));
    EXPECT_THAT(refusal, AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate),
                               HasSubstr(absl::StrCat("given one of ", bytes))));
    EXPECT_LT(refusal.size(), 1000u);
  }
  EXPECT_THAT(with(gate, std::string(255, 'm')), AllOf(HasSubstr("NOT_FOUND"), HasSubstr(gate)));
  std::string deep;
  while (deep.size() < 5000) deep += "folder/";
  EXPECT_THAT(with(gate, deep), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate)));
  std::filesystem::create_directory(folder_ + "/sub");
  for (const char* name : {"sub", "sub/", "."}) {
    EXPECT_THAT(with(gate, name),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate), HasSubstr("given a folder")));
  }
  ASSERT_EQ(mkfifo((folder_ + "/pipe").c_str(), 0600), 0);
  EXPECT_THAT(with(gate, "pipe"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate), HasSubstr("given a FIFO")));
  EXPECT_THAT(with(gate, 1), HasSubstr("expected a file name"));
  EXPECT_THAT(with("model-0.safetensors", json::array({gate})), HasSubstr("inverted"));
  json lacking = index;
  lacking["weight_map"].erase(gate);
  WriteIndex(lacking);
  EXPECT_THAT(Refusal(), AllOf(HasSubstr(gate), HasSubstr("is missing")));
  for (const json& bad : {json::object(), json::array(), json({{"weight_map", 1}})}) {
    WriteIndex(bad);
    EXPECT_THAT(Refusal(), HasSubstr("weight_map"));
  }
  WriteText(folder_ + "/model.safetensors.index.json",
            R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})");
  EXPECT_THAT(Refusal(), HasSubstr("duplicate key 'a'"));
  const std::string text = index.dump();
  for (size_t size = 0; size < text.size(); size += 7) {
    WriteText(folder_ + "/model.safetensors.index.json", text.substr(0, size));
    EXPECT_THAT(Refusal(), HasSubstr("INVALID_ARGUMENT"));
  }

  // The same tensor in two shards.
  index = WriteSharded(folder, 3);
  WriteTensors(folder_ + "/model-9.safetensors",
               {{gate, folder.tensors.at(gate)}, {"other", folder.tensors.at(gate)}});
  index["weight_map"]["other"] = "model-9.safetensors";
  WriteIndex(index);
  EXPECT_THAT(Refusal(),
              AllOf(HasSubstr(gate), HasSubstr("model-9.safetensors"), HasSubstr("is in both")));

  std::filesystem::remove(folder_ + "/model.safetensors.index.json");
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("model.safetensors.index.json")));
}

// Nothing is waited for, whatever lies where a file should.
TEST_F(CheckpointTest, RefusesWhatIsNoFile) {
  for (const char* name : {"config.json", "model.safetensors", "hf_quant_config.json",
                           "model.safetensors.index.json"}) {
    const std::string path = folder_ + "/" + name;
    for (const char* kind : {"a FIFO", "a folder", "a device"}) {
      Write(MakeFolder());
      std::filesystem::remove(path);
      if (std::string(name).find("index") != std::string::npos) {
        std::filesystem::remove(folder_ + "/model.safetensors");
      }
      if (kind == std::string("a FIFO")) {
        ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
      } else if (kind == std::string("a folder")) {
        std::filesystem::create_directory(path);
      } else {
        std::filesystem::create_symlink("/dev/zero", path);
      }
      EXPECT_THAT(Refusal(), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(path),
                                   HasSubstr(absl::StrCat("given ", kind))));
    }
  }
}

TEST_F(CheckpointTest, EveryTruncationOfTheFileIsRefused) {
  Write(MakeFolder());
  const std::string path = folder_ + "/model.safetensors";
  const auto size = std::filesystem::file_size(path);
  ASSERT_EQ(Refusal(), "accepted");
  for (auto shorter = size; shorter-- > 0;) {
    std::filesystem::resize_file(path, shorter);
    const std::string refusal = Refusal();
    ASSERT_THAT(refusal, AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(path))) << shorter;
  }
}

TEST_F(CheckpointTest, AFileCutShortWhileOpenIsAnErrorOfTheRead) {
  const auto checkpoint = MustOpen(MakeFolder());
  ASSERT_NE(checkpoint, nullptr);
  std::filesystem::resize_file(folder_ + "/model.safetensors", 100);
  EXPECT_EQ(checkpoint->ReadExpert(0, 0).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, FingerprintIsOfTheContent) {
  const auto fingerprint = [this](const Folder& folder) { return MustOpen(folder)->fingerprint(); };
  const Folder folder = MakeFolder();
  const std::string original = fingerprint(folder);
  EXPECT_THAT(original, ::testing::MatchesRegex("[0-9a-f]{64}"));
  EXPECT_EQ(fingerprint(folder), original);
  for (const size_t shards : {2, 5}) {
    WriteSharded(folder, shards);
    EXPECT_EQ(MustOpen()->fingerprint(), original);
  }
  // White space and the order of keys are no content.
  Write(folder);
  WriteText(folder_ + "/config.json", "\n" + folder.config.dump(3) + "\n");
  EXPECT_EQ(MustOpen()->fingerprint(), original);

  std::set<std::string> different = {original};
  const auto expect_new = [&](const Folder& changed) {
    EXPECT_TRUE(different.insert(fingerprint(changed)).second);
  };
  Folder changed = folder;
  changed.config["rope_theta"] = 5;
  expect_new(changed);
  changed = folder;
  changed.config["num_experts_per_tok"] = 3;
  expect_new(changed);
  expect_new(MakeFolder(kOlmoe, DType::kF16));
  expect_new(MakeFolder(kOlmoe, DType::kF32));
  expect_new(MakeFolder(kOlmoeFused));
  for (const char* name : {"model.layers.1.mlp.experts.11.down_proj.weight",
                           "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"}) {
    changed = MakeFolder();
    Tensor& tensor = changed.tensors[name];
    tensor.data()[tensor.num_bytes() - 2] ^= std::byte{1};
    expect_new(changed);
  }
  changed = MakeFolder();
  Tensor& norm = changed.tensors["model.layers.0.input_layernorm.weight"];
  changed.tensors["model.layers.0.input_layernorm.weight2"] = norm;
  expect_new(changed);
  // The same bytes as another dtype or in another shape.
  const char* embedding = "model.embed_tokens.weight";
  for (const auto& [dtype, shape] : std::vector<std::pair<DType, std::vector<int64_t>>>{
           {DType::kF16, {7, kHidden}}, {DType::kBF16, {kHidden, 7}}}) {
    changed = MakeFolder();
    Tensor retyped(dtype, shape);
    std::memcpy(retyped.data(), changed.tensors[embedding].data(), retyped.num_bytes());
    changed.tensors[embedding] = retyped;
    expect_new(changed);
  }
  // A large tensor is sampled at both ends.
  for (const int64_t at : {-1, 0, 9999}) {
    changed = MakeFolder();
    changed.tensors["large"] =
        Fill(DType::kF32, {10000}, [at](int64_t i) { return i == at ? 1.0f : 0.0f; });
    expect_new(changed);
  }
}

TEST_F(CheckpointTest, ReadingLeavesNothingOfTheFilesMapped) {
  Folder folder = MakeFolder();
  folder.tensors["large"] = Fill(DType::kF32, {1 << 20}, [](int64_t) { return 0.0f; });
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  ExpectWeights(*checkpoint, DType::kBF16);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    EXPECT_EQ(line.find(folder_), std::string::npos) << line;
  }
}

// A family nobody has: everything an entry can say that the first families do not need.
Family InventedFamily() {
  return {
      .model_type = "invented",
      .config_section = "text_config",
      .intermediate_size = {{"width"}, {}},
      .num_experts = {{"n_routed_experts"}, {}},
      .top_k = {{"moe_topk", "moe_k"}, 3},
      .moe_layers = {.first = {{"first_k_dense_replace"}, 0}},
      .gate = {.score = ScoreFunction::kSigmoid,
               .has_logits_bias = true,
               .has_selection_bias = true,
               .group_score = GroupScore::kTop2Sum,
               .norm = WeightNorm::kSum,
               .norm_epsilon = 1e-20f},
      .scale = {{"routed_scaling_factor"}, 1.0},
      .num_groups = {{"n_group"}, 1},
      .topk_groups = {{"topk_group"}, 1},
      .activation = {{"act"}, "g"},
      .activations = {{"g", Activation::kGeluTanhGlu}},
      .layer_prefixes = {"deep.{layer}."},
      .blocks = {"ffn."},
      .router_weight = {"pick.weight", "router.weight"},
      .logits_bias = {"router.bias"},
      .selection_bias = {"router.selection"},
      .layouts = {{.name = "woven",
                   .gate_up = "all.gate_up",
                   .down = "all.down",
                   .order = GateUpOrder::kInterleaved,
                   .transposed = true},
                  {.name = "apart",
                   .gate_up = "one.{expert}.up_gate",
                   .down = "one.{expert}.down",
                   .order = GateUpOrder::kUpFirst}},
  };
}

Folder InventedFolder(bool woven) {
  Folder folder;
  folder.config = {{"model_type", "invented"},
                   {"hidden_size", 999},  // not in the section: must not be taken
                   {"text_config",
                    {{"num_hidden_layers", 2},
                     {"hidden_size", kHidden},
                     {"width", kIntermediate},
                     {"n_routed_experts", kExperts},
                     {"first_k_dense_replace", 1},
                     {"routed_scaling_factor", 2.5},
                     {"n_group", 4},
                     {"topk_group", 2}}}};
  auto& tensors = folder.tensors;
  tensors["deep.1.ffn.router.weight"] = Matrix(DType::kF32, 'r', 1, 0, kExperts, kHidden);
  tensors["deep.1.ffn.router.bias"] =
      Fill(DType::kBF16, {kExperts}, [](int64_t i) { return static_cast<float>(i); });
  tensors["deep.1.ffn.router.selection"] =
      Fill(DType::kF32, {1, kExperts}, [](int64_t i) { return static_cast<float>(-i); });
  if (woven) {
    tensors["deep.1.ffn.all.gate_up"] =
        Fill(DType::kF16, {kExperts, kHidden, 2 * kIntermediate}, [](int64_t i) {
          const int64_t row = i % (2 * kIntermediate);
          return Value(row % 2 == 0 ? 'g' : 'u', 1,
                       static_cast<int>(i / (2 * kIntermediate) / kHidden), row / 2,
                       i / (2 * kIntermediate) % kHidden);
        });
    tensors["deep.1.ffn.all.down"] =
        Fill(DType::kF16, {kExperts, kIntermediate, kHidden}, [](int64_t i) {
          return Value('d', 1, static_cast<int>(i / kHidden / kIntermediate), i % kHidden,
                       i / kHidden % kIntermediate);
        });
    return folder;
  }
  for (int expert = 0; expert < kExperts; ++expert) {
    tensors[absl::StrCat("deep.1.ffn.one.", expert, ".up_gate")] =
        Fill(DType::kF16, {2 * kIntermediate, kHidden}, [expert](int64_t i) {
          const int64_t row = i / kHidden;
          return Value(row < kIntermediate ? 'u' : 'g', 1, expert, row % kIntermediate,
                       i % kHidden);
        });
    tensors[absl::StrCat("deep.1.ffn.one.", expert, ".down")] =
        Matrix(DType::kF16, 'd', 1, expert, kHidden, kIntermediate);
  }
  return folder;
}

TEST_F(CheckpointTest, AFamilyIsOneEntryOfData) {
  const std::vector<Family> families = {InventedFamily()};
  for (const bool woven : {true, false}) {
    Write(InventedFolder(woven));
    EXPECT_THAT(Refusal(), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("'invented'")));
    const auto checkpoint = Checkpoint::Open(folder_, families);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ((*checkpoint)->layout(), woven ? "woven" : "apart");
    ASSERT_EQ((*checkpoint)->model().layers.size(), 1u);
    const LayerDescription& layer = (*checkpoint)->model().layers[0];
    EXPECT_EQ(layer.layer, 1);
    EXPECT_EQ(layer.router.top_k, 3);
    EXPECT_EQ(layer.router.score, ScoreFunction::kSigmoid);
    EXPECT_EQ(layer.router.group_score, GroupScore::kTop2Sum);
    EXPECT_EQ(layer.router.num_groups, 4);
    EXPECT_EQ(layer.router.topk_groups, 2);
    EXPECT_EQ(layer.router.scale, 2.5f);
    EXPECT_EQ(layer.router.norm_epsilon, 1e-20f);
    EXPECT_EQ(layer.experts.activation, Activation::kGeluTanhGlu);
    EXPECT_EQ(layer.experts.weight_dtype, DType::kF16);

    const auto router = (*checkpoint)->ReadRouter(1);
    ASSERT_TRUE(router.ok()) << router.status();
    ASSERT_THAT(router->logits_bias.shape(), ElementsAre(kExperts));
    ASSERT_THAT(router->selection_bias.shape(), ElementsAre(kExperts));
    EXPECT_EQ(router->logits_bias.as<float>()[11], 11.0f);
    EXPECT_EQ(router->selection_bias.as<float>()[11], -11.0f);
    for (int expert = 0; expert < kExperts; ++expert) {
      const auto weights = (*checkpoint)->ReadExpert(1, expert);
      ASSERT_TRUE(weights.ok()) << weights.status();
      const Tensor gate = Matrix(DType::kF16, 'g', 1, expert, kIntermediate, kHidden);
      const Tensor up = Matrix(DType::kF16, 'u', 1, expert, kIntermediate, kHidden);
      const Tensor down = Matrix(DType::kF16, 'd', 1, expert, kHidden, kIntermediate);
      EXPECT_EQ(std::memcmp(weights->gate_up.data(), gate.data(), gate.num_bytes()), 0);
      EXPECT_EQ(std::memcmp(weights->gate_up.data() + gate.num_bytes(), up.data(), up.num_bytes()),
                0);
      EXPECT_EQ(std::memcmp(weights->down.data(), down.data(), down.num_bytes()), 0);
    }
  }
}

TEST(DescribeModel, AClampHasALimit) {
  json config = {{"model_type", "gpt_oss"}, {"num_hidden_layers", 1}, {"hidden_size", 4},
                 {"intermediate_size", 4},  {"num_local_experts", 2}, {"num_experts_per_tok", 1},
                 {"swiglu_limit", nullptr}};
  ASSERT_TRUE(DescribeModel(config, BuiltInFamilies()).ok());
  EXPECT_EQ(
      DescribeModel(config, BuiltInFamilies())->description.layers[0].experts.activation_limit,
      7.0f);
  for (const json& bad : {json(0), json(-0.0), json(-7), json("7"), json(1e39)}) {
    config["swiglu_limit"] = bad;
    const absl::Status status = DescribeModel(config, BuiltInFamilies()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("swiglu_limit")) << bad;
  }
}

// The page that people read names what the registry has.
TEST(Readme, ListsTheFamiliesThatAreServed) {
  std::ifstream stream(EXPERTMESH_TEST_DATA "/../../README.md");
  std::set<std::string> listed, served;
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind("| `", 0) != 0) continue;
    if (line.rfind("| `model_type`", 0) != 0 && listed.empty()) continue;  // another table
    if (line.find("quant_method") != std::string::npos) break;
    const std::string cell = line.substr(0, line.find('|', 1));
    for (size_t at = cell.find('`'); at != std::string::npos; at = cell.find('`', at + 1)) {
      const size_t end = cell.find('`', at + 1);
      listed.insert(cell.substr(at + 1, end - at - 1));
      at = end;
    }
  }
  listed.erase("model_type");
  for (const Family& family : BuiltInFamilies()) {
    if (family.refused.empty()) served.insert(family.model_type);
  }
  EXPECT_EQ(listed, served);
}

TEST_F(CheckpointTest, RefusesGroupsThatCannotBe) {
  const std::vector<Family> families = {InventedFamily()};
  const auto refusal = [&](const std::map<std::string, json>& changes) {
    Folder folder = InventedFolder(true);
    for (const auto& [key, value] : changes) folder.config["text_config"][key] = value;
    Write(folder);
    return Checkpoint::Open(folder_, families).status().ToString();
  };
  EXPECT_EQ(refusal({}), "OK");
  EXPECT_THAT(refusal({{"n_group", 5}}),
              HasSubstr("n_group: 12 experts do not divide into 5 groups"));
  EXPECT_THAT(refusal({{"topk_group", 5}}), AllOf(HasSubstr("topk_group"), HasSubstr("too few")));
  EXPECT_EQ(refusal({{"moe_k", 6}}), "OK");
  EXPECT_THAT(refusal({{"moe_k", 7}}),
              HasSubstr("moe_topk/moe_k and topk_group: top 7 of the best 2 of 4 groups of 3 "
                        "experts: there are too few"));
  EXPECT_THAT(refusal({{"n_group", 12}, {"topk_group", 12}}),
              HasSubstr("n_group: 12 groups of one expert"));
  EXPECT_THAT(refusal({{"moe_k", 3}, {"moe_topk", 2}}), HasSubstr("contradict"));
  EXPECT_THAT(refusal({{"routed_scaling_factor", "2"}}), HasSubstr("a number"));
  EXPECT_THAT(
      refusal({{"routed_scaling_factor", 1e39}}),
      AllOf(HasSubstr("routed_scaling_factor"), HasSubstr("fits in fp32"), HasSubstr("1e+39")));
  Folder folder = InventedFolder(true);
  folder.tensors.erase("deep.1.ffn.router.selection");
  Write(folder);
  EXPECT_THAT(Checkpoint::Open(folder_, families).status().ToString(),
              AllOf(HasSubstr("router.selection"), HasSubstr("missing")));
  folder = InventedFolder(true);
  folder.config["text_config"] = 1;
  Write(folder);
  EXPECT_THAT(Checkpoint::Open(folder_, families).status().ToString(), HasSubstr("text_config"));
}

// Every family, as transformers itself writes it: its save_pretrained has split the experts, its
// modules hold them fused, and both must read as the same weights. EXPERTMESH_CHECKPOINTS may name
// another folder that make_checkpoints.py has written.
TEST(TransformersCheckpoint, SavedAndFusedReadAsTheSameWeights) {
  const char* other = std::getenv("EXPERTMESH_CHECKPOINTS");
  const std::string root = other != nullptr ? other : EXPERTMESH_TEST_DATA "/checkpoints";
  const json cases = json::parse(std::ifstream(root + "/cases.json"));
  int compared = 0;
  for (const json& one : cases) {
    const std::string name = one["name"];
    SCOPED_TRACE(name);
    const auto checkpoint = Checkpoint::Open(absl::StrCat(root, "/", name));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (one.contains("expected_layout")) {
      EXPECT_EQ((*checkpoint)->layout(), one["expected_layout"]);
    } else {
      EXPECT_EQ((*checkpoint)->layout(), one["layout"] == "fused" ? "fused" : "per-expert");
    }
    EXPECT_EQ((*checkpoint)->model().model_type, one["family"]);
    for (const std::string& skipped : (*checkpoint)->skipped_tensors()) {
      EXPECT_THAT(skipped, ::testing::Not(HasSubstr("expert")));
    }
    if (one["layout"] == "fused") continue;
    const auto twin = Checkpoint::Open(absl::StrCat(
        root, "/", absl::StrReplaceAll(name, {{"-saved", "-fused"}, {"-sharded", "-fused"}})));
    ASSERT_TRUE(twin.ok()) << twin.status();
    for (const LayerDescription& layer : (*checkpoint)->model().layers) {
      if (layer.kind == LayerKind::kMoe) {
        EXPECT_EQ(layer.router.num_experts, one["num_experts"]);
        EXPECT_EQ(layer.router.top_k, one["top_k"]);
      }
      const auto a = (*checkpoint)->ReadRouter(layer.layer);
      const auto b = (*twin)->ReadRouter(layer.layer);
      ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
      ASSERT_EQ(std::memcmp(a->weight.data(), b->weight.data(), a->weight.num_bytes()), 0);
      for (int32_t expert = 0; expert < layer.router.num_experts + layer.shared.count; ++expert) {
        const auto c = (*checkpoint)->ReadExpert(layer.layer, expert);
        const auto d = (*twin)->ReadExpert(layer.layer, expert);
        ASSERT_TRUE(c.ok() && d.ok()) << c.status() << d.status();
        ASSERT_EQ(std::memcmp(c->gate_up.data(), d->gate_up.data(), c->gate_up.num_bytes()), 0);
        ASSERT_EQ(std::memcmp(c->down.data(), d->down.data(), c->down.num_bytes()), 0);
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 33);  // three families of eleven experts
}

}  // namespace
}  // namespace expertmesh
