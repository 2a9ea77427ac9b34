// Models of random weights by name: the generator against its authors' known answers and a
// restatement in numpy (tests/golden/make_preset_golden.py), and what they compute.
#include "common/model/presets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/local_cluster.h"
#include "common/model/generated.h"
#include "common/model/open_model.h"
#include "common/numerics/philox.h"
#include "nlohmann/json.hpp"
#include "router/gating/gate.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Random123's kat_vectors.
TEST(Philox, HasTheKnownAnswers) {
  EXPECT_THAT(Philox({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

std::string Digest(const Tensor& tensor) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(tensor.data()), tensor.num_bytes(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return absl::BytesToHexString(digest);
}

std::shared_ptr<const Checkpoint> Open(const std::string& preset) {
  auto checkpoint = OpenModel({.preset = preset});
  EXPECT_TRUE(checkpoint.ok()) << preset << ": " << checkpoint.status();
  return checkpoint.ok() ? *checkpoint : nullptr;
}

TEST(Presets, HaveTheWeightsThatAreWrittenDown) {
  std::ifstream file(EXPERTMESH_TEST_DATA "/presets.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden.size(), 6u);
  for (const auto& [name, layers] : golden.items()) {
    const auto checkpoint = Open(name);
    ASSERT_NE(checkpoint, nullptr);
    for (const auto& [index, layer] : layers.items()) {
      SCOPED_TRACE(absl::StrCat(name, ", layer ", index));
      const RouterWeights router = *checkpoint->ReadRouter(std::stoi(index));
      if (layer.contains("router")) {
        EXPECT_EQ(Digest(router.weight), layer["router"]);
      }
      if (layer.contains("logits_bias")) {
        EXPECT_EQ(Digest(router.logits_bias), layer["logits_bias"]);
      }
      for (const auto& [number, tensors] : layer["experts"].items()) {
        const ExpertWeights expert = *checkpoint->ReadExpert(std::stoi(index), std::stoi(number));
        const std::map<std::string, const Tensor*> read = {{"gate_up", &expert.gate_up},
                                                           {"down", &expert.down},
                                                           {"gate_up_bias", &expert.gate_up_bias},
                                                           {"down_bias", &expert.down_bias}};
        for (const auto& [tensor, digest] : tensors.items()) {
          EXPECT_EQ(Digest(*read.at(tensor)), digest) << "expert " << number << ": " << tensor;
        }
      }
    }
  }
}

TEST(Presets, EveryEntryOpens) {
  std::set<std::string> names, fingerprints;
  for (const Preset& preset : Presets()) {
    const auto checkpoint = Open(preset.name);
    ASSERT_NE(checkpoint, nullptr);
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_TRUE(fingerprints.insert(checkpoint->fingerprint()).second) << preset.name;
    EXPECT_EQ(checkpoint->fingerprint().size(), 64u);
    EXPECT_GT(checkpoint->model().layers.size(), 0u);
    for (const LayerDescription& layer : checkpoint->model().layers) {
      EXPECT_EQ(layer.row_format().has_value(),
                preset.precision != "native" && layer.kind == LayerKind::kMoe);
    }
  }
  // Another precision than the entry's.
  const auto native = *OpenModel({.preset = "llama4_debugmodel_fp8", .precision = "native"});
  EXPECT_EQ(native->fingerprint(), Open("llama4_debugmodel")->fingerprint());
}

TEST(Presets, TheDebugModelsAreThoseOfTorchtitan) {
  const auto layers = [](const std::string& name) {
    std::vector<std::string> text;
    const auto checkpoint = Open(name);
    for (const LayerDescription& layer : checkpoint->model().layers) {
      text.push_back(absl::StrCat(
          "D", layer.experts.hidden_size, " E", layer.router.num_experts, " K", layer.router.top_k,
          layer.kind == LayerKind::kMoe ? absl::StrCat(" F", layer.experts.intermediate_size) : "",
          layer.shared.count > 0
              ? absl::StrCat(" S", layer.shared.count, "x", layer.shared.experts.intermediate_size)
              : ""));
    }
    return text;
  };
  const std::string llama_dense = "D256 E0 K0 S1x768", llama_moe = "D256 E8 K1 F512 S1x512";
  EXPECT_THAT(layers("llama4_debugmodel"),
              ElementsAre(llama_dense, llama_moe, llama_dense, llama_moe, llama_dense, llama_moe));
  EXPECT_TRUE(Open("llama4_debugmodel")->model().layers[1].router.weigh_input);
  const std::string deepseek =
      "D256 E8 K3 F256 S1x512";  // two shared experts are one of their width
  EXPECT_THAT(layers("deepseek_v3_debugmodel"),
              ElementsAre("D256 E0 K0 S1x1024", deepseek, deepseek, deepseek, deepseek, deepseek));
  EXPECT_EQ(Open("deepseek_v3_debugmodel")->model().layers[1].router.score,
            ScoreFunction::kSoftmax);
  const std::string gpt_oss = "D256 E8 K4 F384";
  EXPECT_THAT(layers("gpt_oss_debugmodel"), ElementsAre(gpt_oss, gpt_oss, gpt_oss, gpt_oss));
  const ExpertDescriptor expert = Open("gpt_oss_debugmodel")->model().layers[0].experts;
  EXPECT_TRUE(expert.has_bias);
  EXPECT_EQ(expert.activation, Activation::kClampedSwishGlu);
}

// Unit-normal rows give rows of an ordinary size, and no expert is left out.
void ExpectOrdinary(const std::string& preset) {
  const auto checkpoint = Open(preset);
  const auto cluster = LocalCluster::Start(checkpoint).value();
  for (const LayerDescription& layer : checkpoint->model().layers) {
    SCOPED_TRACE(absl::StrCat(preset, ", layer ", layer.layer));
    const int32_t num_experts = layer.router.num_experts;
    const int64_t tokens = num_experts == 0 ? 64 : 64 * num_experts / layer.router.top_k;
    std::mt19937 rng(17);
    const Tensor rows = RandomTensor(DType::kBF16, {tokens, layer.experts.hidden_size}, 1.0f, rng);
    const auto result = cluster->Forward(layer.layer, rows);
    ASSERT_TRUE(result.ok()) << result.status();
    double sum = 0;
    for (int64_t i = 0; i < result->output.num_elements(); ++i) {
      sum += std::pow(LoadFloat(DType::kBF16, result->output.data(), i), 2);
    }
    const double rms = std::sqrt(sum / static_cast<double>(result->output.num_elements()));
    EXPECT_GT(rms, 0.05);
    EXPECT_LT(rms, 10.0);
    std::set<int32_t> hit;
    for (int64_t i = 0; i < result->topk_ids.num_elements(); ++i) {
      hit.insert(result->topk_ids.as<int32_t>()[i]);
    }
    EXPECT_EQ(static_cast<int32_t>(hit.size()), num_experts);
  }
}

TEST(Presets, DebugModelsGiveOrdinaryRowsAndUseEveryExpert) {
  for (const Preset& preset : Presets()) {
    if (preset.name.find("debugmodel") != std::string::npos) ExpectOrdinary(preset.name);
  }
}

TEST(Presets, LayersInTheShapeOfModelsDoToo) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "takes minutes";
#endif
  ExpectOrdinary("olmoe_1b_7b_layer");
}

// So that a benchmark in one of the large shapes has work for every expert, too; the gate is enough
// to tell.
TEST(Presets, EveryExpertIsChosen) {
  for (const Preset& preset : Presets()) {
    const auto checkpoint = Open(preset.name);
    for (const LayerDescription& layer : checkpoint->model().layers) {
      const int32_t num_experts = layer.router.num_experts;
      if (num_experts == 0) continue;
      SCOPED_TRACE(absl::StrCat(preset.name, ", layer ", layer.layer));
      const auto gate = Gate::Create(layer.router, *checkpoint->ReadRouter(layer.layer));
      ASSERT_TRUE(gate.ok()) << gate.status();
      std::mt19937 rng(29);
      const Tensor rows = RandomTensor(
          DType::kBF16, {64 * num_experts / layer.router.top_k, gate->hidden_size()}, 1.0f, rng);
      const auto routing = gate->Route(rows);
      ASSERT_TRUE(routing.ok()) << routing.status();
      const auto* const ids = routing->topk_ids.as<int32_t>();
      const std::set<int32_t> chosen(ids, ids + routing->topk_ids.num_elements());
      EXPECT_EQ(static_cast<int32_t>(chosen.size()), num_experts);
    }
  }
}

TEST(Presets, WrongOnesAreRefused) {
  EXPECT_EQ(OpenModel({}).status().ToString(),
            "INVALID_ARGUMENT: expected a model folder or --preset, got neither");
  EXPECT_EQ(OpenModel({.folder = "a", .preset = "b"}).status().ToString(),
            "INVALID_ARGUMENT: expected a model folder or --preset, got both");
  EXPECT_THAT(OpenModel({.preset = "llama5"}).status().ToString(),
              HasSubstr("--preset: expected one of llama4_debugmodel, llama4_debugmodel_fp8"));
  const auto checkpoint = Open("llama4_debugmodel");
  EXPECT_EQ(checkpoint->ReadExpert(1, 9).status().ToString(),
            "NOT_FOUND: layer 1 has experts 0 to 8, not 9");
  EXPECT_EQ(checkpoint->ReadRouter(6).status().ToString(), "NOT_FOUND: the model has no layer 6");
}

}  // namespace
}  // namespace expertmesh
