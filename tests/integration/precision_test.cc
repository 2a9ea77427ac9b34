// Low precision through whole clusters over gRPC: eight data-parallel clients and four expert
// servers give the bits of one process of plain loops, for every debug preset in every precision.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/open_model.h"
#include "common/model/precision.h"
#include "tests/integration/grpc_cluster.h"

namespace expertmesh {
namespace {

constexpr int kClients = 8;
constexpr int64_t kTokensEach = 4;

// Of the Frobenius norm.
double RelativeError(const Tensor& got, const Tensor& expected) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < expected.num_elements(); ++i) {
    const double e = LoadFloat(expected.dtype(), expected.data(), i);
    difference += std::pow(LoadFloat(got.dtype(), got.data(), i) - e, 2);
    norm += e * e;
  }
  return std::sqrt(difference / norm);
}

class DebugPresets : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(DebugPresets, EightClientsOnFourServersHaveTheBitsOfPlainLoops) {
  const auto& [preset, precision] = GetParam();
  auto checkpoint = OpenModel({.preset = preset, .precision = precision});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto reference = LocalCluster::Start(*checkpoint, ForLoops()).value();
  const auto unquantised =
      LocalCluster::Start(*OpenModel({.preset = preset, .precision = "native"})).value();
  RouterOptions options;
  // Either way, over the presets and precisions.
  if ((preset + precision).size() % 2 == 0) options.empty_experts = EmptyExperts::kOneBlock;
  Cluster cluster(*checkpoint, options);
  cluster.AddServers(4);
  std::vector<std::unique_ptr<Client>> clients;
  for (int c = 0; c < kClients; ++c) clients.push_back(cluster.NewClient());
  for (const LayerDescription& layer : cluster.model().layers) {
    const DType dtype = layer.layer % 4 < 2 ? DType::kBF16 : DType::kF32;
    SCOPED_TRACE(absl::StrCat("layer ", layer.layer, ", ", NameOf(dtype)));
    const Tensor rows =
        RandomRows(dtype, kClients * kTokensEach, layer.experts.hidden_size, layer.layer);
    const auto expected = reference->Forward(layer.layer, rows);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const auto plain = unquantised->Forward(layer.layer, rows);
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_LE(RelativeError(expected->output, plain->output), precision == "native"  ? 0.0
                                                              : precision == "mxfp8" ? 0.09
                                                                                     : 0.08);
    std::vector<std::thread> callers;
    for (int c = 0; c < kClients; ++c) {
      callers.emplace_back([&, c] {
        const int64_t begin = c * kTokensEach;
        ExpectSame(*expected, begin,
                   clients[c]->Forward(layer.layer, Slice(rows, begin, kTokensEach)));
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  // What was padded is what the format asks for.
  const auto status = clients[0]->GetCluster();
  ASSERT_TRUE(status.ok()) << status.status();
  for (const v1::LayerRounds& layer : status->layers()) {
    const bool low = layer.format() != "native";
    EXPECT_EQ(
        low, precision != "native" && cluster.model().Find(layer.layer())->kind == LayerKind::kMoe);
    EXPECT_EQ(layer.padded_positions() > 0, low);
    const auto multiple = cluster.model().Find(layer.layer())->pad_multiple;
    EXPECT_EQ((layer.padded_positions() + layer.pairs()) % static_cast<uint64_t>(multiple), 0u);
    EXPECT_GT(layer.pairs(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DebugPresets,
                         testing::Combine(testing::Values("llama4_debugmodel",
                                                          "deepseek_v3_debugmodel",
                                                          "gpt_oss_debugmodel"),
                                          testing::Values("native", "fp8_rowwise", "fp8_block128",
                                                          "mxfp8", "mxfp8_rceil")),
                         [](const auto& test) {
                           return absl::StrCat(std::get<0>(test.param), "_",
                                               std::get<1>(test.param));
                         });

}  // namespace
}  // namespace expertmesh
