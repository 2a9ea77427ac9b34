// The same bits whatever the cluster, for every family in every layout and format, from its files:
// the reference is one server of plain loops in this process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_cluster.h"
#include "tests/families.h"
#include "tests/integration/grpc_cluster.h"

namespace expertmesh {
namespace {

using families::FamilyCase;

constexpr int64_t kTokens = 23;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

std::vector<FamilyCase> AllCases() {
  std::vector<FamilyCase> cases = families::Cases();
  for (const FamilyCase& one : families::QuantisedCases()) cases.push_back(one);
  return cases;
}

// What is asked, and what comes of it.
struct Question {
  int32_t layer;
  Tensor rows;
  MoeOutput expected;
};

class FamiliesTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Writes the folder, and asks the reference about every layer in every dtype.
  void Ask(const FamilyCase& one) {
    families::Write(families::MakeRandomFolder(one), folder_);
    const auto reference = LocalCluster::Start(folder_, ForLoops());
    ASSERT_TRUE(reference.ok()) << reference.status();
    for (const LayerDescription& layer : (*reference)->checkpoint().model().layers) {
      for (const DType dtype : kDTypes) {
        const Tensor rows = RandomRows(dtype, kTokens, layer.experts.hidden_size, 5);
        const auto output = (*reference)->Forward(layer.layer, rows);
        ASSERT_TRUE(output.ok()) << output.status();
        float largest = 0;
        for (int64_t i = 0; i < output->output.num_elements(); ++i) {
          const float value = LoadFloat(dtype, output->output.data(), i);
          ASSERT_TRUE(std::isfinite(value));
          largest = std::max(largest, std::abs(value));
        }
        ASSERT_GT(largest, 0);
        questions_.push_back({layer.layer, rows, *output});
      }
    }
  }

  // All tokens at once, a few, and one by one.
  void ExpectAnswers(auto& cluster) const {
    for (const auto& [layer, rows, expected] : questions_) {
      SCOPED_TRACE(absl::StrCat("layer ", layer, ", ", NameOf(rows.dtype())));
      ExpectSame(expected, 0, cluster.Forward(layer, rows));
      ExpectSame(expected, 3, cluster.Forward(layer, Slice(rows, 3, 11)));
      for (const int64_t t : {0, 9, 22}) {
        ExpectSame(expected, t, cluster.Forward(layer, Slice(rows, t, 1)));
      }
    }
  }

  const std::string folder_ =
      (std::filesystem::temp_directory_path() / absl::StrCat("families_test.", getpid())).string();
  std::vector<Question> questions_;
};

class InProcess : public FamiliesTest, public testing::WithParamInterface<FamilyCase> {};

TEST_P(InProcess, HasTheBitsOfPlainLoops) {
  ASSERT_NO_FATAL_FAILURE(Ask(GetParam()));
  const std::vector<std::pair<EngineKind, int>> engines = {
      {EngineKind::kGrouped, 1}, {EngineKind::kGrouped, 3}, {EngineKind::kForLoop, 1}};
  const BatchingOptions batchings[] = {{.max_tokens = 7}, {.rounds_per_layer = 0}};
  for (const int32_t servers : {1, 3, 13}) {  // 13: more than experts
    for (const auto& [engine, threads] : engines) {
      for (const BatchingOptions& batching : batchings) {
        SCOPED_TRACE(absl::StrCat(servers, " servers of ", threads, " threads, ", NameOf(engine),
                                  ", ", batching.rounds_per_layer, " rounds of ",
                                  batching.max_tokens));
        const auto cluster =
            LocalCluster::Start(folder_, {.servers = servers,
                                          .engine = {.kind = engine, .threads = threads},
                                          .router = {.engine = engine, .batching = batching}});
        ASSERT_TRUE(cluster.ok()) << cluster.status();
        ExpectAnswers(**cluster);
        if (HasFailure()) return;
      }
    }
  }
}

std::string NameOfCase(const testing::TestParamInfo<FamilyCase>& one) {
  return absl::StrCat(one.param.name, "_", one.index);
}
INSTANTIATE_TEST_SUITE_P(Families, InProcess, testing::ValuesIn(AllCases()), NameOfCase);

// What families differ in, and one that has it.
const std::map<std::string, std::string> kFeatures = {
    {"SigmoidGroupsBiasSharedDense", "deepseek_v3"},
    {"SoftmaxGroups", "deepseek_v2"},
    {"SharedGated", "qwen2_moe"},
    {"SharedAveraged", "cohere2_moe"},
    {"SoftcapRoutedScale", "laguna"},
    {"ClampedNorm", "ernie4_5_moe"},
    {"PNormJoined", "dbrx_2"},
    {"WeighedInput", "llama4_text"},
    {"IdentityExperts", "longcat_flash"},
    {"Sparsemixer", "phimoe"},
    {"InputNormsExpertScale", "gemma4_text"},
    {"BiasesClampedSwish", "gpt_oss"},
    {"Relu2NotGated", "nemotron_h"},
    {"Fp8Block", "deepseek_v3_fp8"},
    {"Fp8BlockUe8m0", "deepseek_v32_ue8m0"},
    {"Fp8BlockFused", "qwen3_moe_fused_fp8"},
    {"Fp8Row", "glm4_moe_fp8_row"},
    {"Fp8Tensor", "mixtral_fp8_tensor"},
    {"Mxfp4", "gpt_oss_mxfp4"},
};

class OverGrpc : public FamiliesTest,
                 public testing::WithParamInterface<std::pair<const std::string, std::string>> {};

TEST_P(OverGrpc, HasTheBitsOfPlainLoops) {
  const std::vector<FamilyCase> cases = AllCases();
  const auto one = std::find_if(cases.begin(), cases.end(), [](const FamilyCase& candidate) {
    return candidate.name == GetParam().second;
  });
  ASSERT_NE(one, cases.end());
  ASSERT_NO_FATAL_FAILURE(Ask(*one));
  for (const int32_t servers : {1, 2, 3}) {
    for (const int rounds : {1, 0}) {
      SCOPED_TRACE(absl::StrCat(servers, " servers, ", rounds, " rounds"));
      Cluster cluster(folder_, absl::Seconds(30), {}, {.rounds_per_layer = rounds});
      cluster.AddServers(servers, /*threads=*/servers);
      const auto client = cluster.NewClient();
      // Some of the calls of two callers are merged.
      std::thread other([&] { ExpectAnswers(*client); });
      ExpectAnswers(*client);
      other.join();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Features, OverGrpc, testing::ValuesIn(kFeatures),
                         [](const auto& test) { return test.param.first; });

}  // namespace
}  // namespace expertmesh
