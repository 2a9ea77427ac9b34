// Promise 1: the same bits whatever the cluster. A router and expert servers over real gRPC against
// one process that holds everything and one server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/local_cluster.h"
#include "common/status.h"
#include "expert_server/service/expert_server.h"
#include "router/service/router_server.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

std::string ModelDir(const std::string& name) {
  return std::string(EXPERTMESH_TEST_DATA) + "/checkpoints/" + name;
}

// Router and servers with a gRPC port each.
class Cluster {
 public:
  explicit Cluster(const std::string& model_dir, absl::Duration startup_grace = absl::Seconds(30))
      : checkpoint_(Checkpoint::Open(model_dir).value()) {
    RouterServerOptions options;
    options.listen = "127.0.0.1:0";
    options.router.startup_grace = startup_grace;
    router_ = RouterServer::Start(checkpoint_, options).value();
  }

  ~Cluster() {
    for (auto& server : servers_) server->Shutdown(absl::Seconds(5));
    router_->Shutdown(absl::Seconds(5));
  }

  void AddServer(int32_t shard, int32_t num_shards, int threads = 1) {
    ExpertServerOptions options;
    options.listen = "127.0.0.1:0";
    options.router = router_->address();
    options.shard = shard;
    options.num_shards = num_shards;
    options.threads = threads;
    servers_.push_back(ExpertServer::Start(
                           *checkpoint_, options, [](const LoadProgress&) {},
                           [](const absl::Status& status) { FAIL() << status; })
                           .value());
  }

  void AddServers(int32_t num_shards) {
    for (int32_t i = 0; i < num_shards; ++i) AddServer(i, num_shards);
  }

  void StopServer(size_t i) {
    servers_[i]->Shutdown(absl::Seconds(5));
    servers_.erase(servers_.begin() + i);
  }

  std::unique_ptr<Client> NewClient(const ClientOptions& options = {}) {
    return Client::Create(router_->address(), options).value();
  }

  void WaitUntilServing(bool serving) {
    const auto client = NewClient();
    for (int i = 0; i < 500; ++i) {
      if (client->IsServing().value_or(!serving) == serving) return;
      absl::SleepFor(absl::Milliseconds(20));
    }
    FAIL() << "not " << (serving ? "serving" : "down") << " after 10 s";
  }

  const std::string& address() const { return router_->address(); }
  const ModelDescription& model() const { return checkpoint_->model(); }

 private:
  const std::shared_ptr<const Checkpoint> checkpoint_;
  std::unique_ptr<RouterServer> router_;
  std::vector<std::unique_ptr<ExpertServer>> servers_;
};

Tensor RandomRows(DType dtype, int64_t tokens, int64_t hidden_size, uint32_t seed) {
  std::mt19937 rng(seed);
  return RandomTensor(dtype, {tokens, hidden_size}, 1.0f, rng);
}

Tensor Slice(const Tensor& rows, int64_t begin, int64_t count) {
  Tensor part(rows.dtype(), {count, rows.dim(1)});
  const size_t row_bytes = rows.num_bytes() / rows.dim(0);
  std::memcpy(part.data(), rows.data() + begin * row_bytes, part.num_bytes());
  return part;
}

// Rows [begin, begin + part) of `whole` have the bits of `part`.
void ExpectRows(const Tensor& whole, int64_t begin, const Tensor& part) {
  ASSERT_EQ(whole.dtype(), part.dtype());
  ASSERT_EQ(whole.dim(1), part.dim(1));
  const size_t row_bytes = whole.num_bytes() / whole.dim(0);
  EXPECT_EQ(std::memcmp(whole.data() + begin * row_bytes, part.data(), part.num_bytes()), 0)
      << "rows " << begin << " to " << begin + part.dim(0);
}

void ExpectSame(const MoeOutput& whole, int64_t begin, const absl::StatusOr<MoeOutput>& part) {
  ASSERT_TRUE(part.ok()) << part.status();
  ExpectRows(whole.output, begin, part->output);
  ExpectRows(whole.topk_ids, begin, part->topk_ids);
  ExpectRows(whole.topk_weights, begin, part->topk_weights);
}

class SameBits : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(SameBits, AsOneProcess) {
  const auto& [name, servers] = GetParam();
  Cluster cluster(ModelDir(name));
  cluster.AddServers(servers);
  const auto one_process = LocalCluster::Start(ModelDir(name)).value();
  const auto local_many = LocalCluster::Start(ModelDir(name), {servers, 2}).value();
  const auto client = cluster.NewClient();
  for (const LayerDescription& layer : cluster.model().layers) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Tensor rows = RandomRows(dtype, 67, layer.experts.hidden_size, 5);
      const MoeOutput expected = one_process->Forward(layer.layer, rows).value();
      double norm = 0;
      for (int64_t i = 0; i < expected.output.num_elements(); ++i) {
        norm += std::abs(LoadFloat(dtype, expected.output.data(), i));
      }
      ASSERT_GT(norm, 0);
      ExpectSame(expected, 0, local_many->Forward(layer.layer, rows));
      ExpectSame(expected, 0, client->Forward(layer.layer, rows));  // at once
      for (int64_t t = 0; t < 67; t += 13) {                        // one by one
        ExpectSame(expected, t, client->Forward(layer.layer, Slice(rows, t, 1)));
      }
      for (int64_t t = 0, n = 1; t < 67;
           t += n, n = std::min<int64_t>(2 * n + 1, 67 - t)) {  // ragged
        ExpectSame(expected, t, client->Forward(layer.layer, Slice(rows, t, n)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, SameBits,
    testing::Combine(testing::Values("olmoe-bf16-e11k2-saved", "mixtral-bf16-e11k2-fused",
                                     "qwen3_moe-bf16-e11k2-saved"),
                     testing::Values(1, 2, 3, 5, 13)),  // 13: more servers than experts
    [](const auto& test) {
      return std::get<0>(test.param).substr(0, std::get<0>(test.param).find('-')) + "On" +
             std::to_string(std::get<1>(test.param));
    });

class ClusterTest : public testing::Test {
 protected:
  const std::string dir_ = ModelDir("olmoe-bf16-e11k2-saved");
};

TEST_F(ClusterTest, ConcurrentClientsGetTheBitsOfALoneOne) {
  Cluster cluster(dir_);
  for (int i = 0; i < 3; ++i) cluster.AddServer(i, 3, /*threads=*/2);
  const int64_t hidden_size = cluster.model().layers[0].experts.hidden_size;
  const int32_t layer = cluster.model().layers[0].layer;
  const auto local = LocalCluster::Start(dir_).value();
  const auto client = cluster.NewClient();
  std::vector<std::thread> threads;
  for (int c = 0; c < 8; ++c) {
    threads.emplace_back([&, c] {
      for (int i = 0; i < 20; ++i) {
        const Tensor rows = RandomRows(c % 2 ? DType::kF32 : DType::kBF16, 1 + (c * 7 + i) % 23,
                                       hidden_size, c * 100 + i);
        ExpectSame(local->Forward(layer, rows).value(), 0, client->Forward(layer, rows));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ClusterTest, NoTokens) {
  Cluster cluster(dir_);
  cluster.AddServers(2);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor none(DType::kBF16, {0, layer.experts.hidden_size});
  const absl::StatusOr<MoeOutput> result = cluster.NewClient()->Forward(layer.layer, none);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->output.dtype(), DType::kBF16);
  EXPECT_EQ(result->output.shape(), (std::vector<int64_t>{0, layer.experts.hidden_size}));
  EXPECT_EQ(result->topk_ids.shape(), (std::vector<int64_t>{0, layer.router.top_k}));
  EXPECT_EQ(result->topk_weights.shape(), (std::vector<int64_t>{0, layer.router.top_k}));
}

TEST_F(ClusterTest, WrongInputIsNamedAndDisturbsNobody) {
  Cluster cluster(dir_);
  cluster.AddServers(2);
  const LayerDescription& layer = cluster.model().layers[0];
  const int64_t d = layer.experts.hidden_size;
  const auto client = cluster.NewClient();
  const Tensor good = RandomRows(DType::kF32, 9, d, 1);
  const MoeOutput expected = client->Forward(layer.layer, good).value();
  std::atomic<bool> stop = false;
  std::thread neighbour([&] {
    while (!stop) ExpectSame(expected, 0, client->Forward(layer.layer, good));
  });
  const auto message = [&](int32_t l, const Tensor& rows) {
    const absl::Status status = client->Forward(l, rows).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(77, good), HasSubstr("layer: expected one of the MoE layers 0, got 77"));
  EXPECT_THAT(
      message(layer.layer, RandomRows(DType::kF32, 2, d + 1, 1)),
      HasSubstr(absl::StrCat("hidden_states.shape: expected [T, ", d, "], got [2, ", d + 1, "]")));
  EXPECT_THAT(message(layer.layer, Tensor(DType::kI32, {2, d})),
              HasSubstr("hidden_states.dtype: expected F32, BF16 or F16, got I32"));
  Tensor nan = RandomRows(DType::kF32, 9, d, 1);
  nan.as<float>()[4 * d + 3] = std::nanf("");
  nan.as<float>()[7 * d] = INFINITY;
  EXPECT_THAT(message(layer.layer, nan), HasSubstr("row 4"));
  stop = true;
  neighbour.join();
}

// Requests over the message limit are split by the client; that changes no bit.
TEST_F(ClusterTest, LargeRequestsAreSplit) {
  Cluster cluster(dir_);
  cluster.AddServers(3);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 3000, layer.experts.hidden_size, 9);
  const MoeOutput whole = cluster.NewClient()->Forward(layer.layer, rows).value();
  ClientOptions small;
  small.max_message_bytes = 64 << 10;
  ExpectSame(whole, 0, cluster.NewClient(small)->Forward(layer.layer, rows));
}

TEST_F(ClusterTest, CallsWaitForServersThatComeLate) {
  Cluster cluster(dir_);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 5, layer.experts.hidden_size, 2);
  const MoeOutput expected = LocalCluster::Start(dir_).value()->Forward(layer.layer, rows).value();
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(300));
    cluster.AddServers(2);
  });
  ExpectSame(expected, 0, cluster.NewClient()->Forward(layer.layer, rows));
  late.join();
}

TEST_F(ClusterTest, WithoutServersTheCallFailsAfterTheGracePeriod) {
  Cluster cluster(dir_, /*startup_grace=*/absl::Milliseconds(200));
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 64, layer.experts.hidden_size, 2);
  const absl::Status status = cluster.NewClient()->Forward(layer.layer, rows).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 0: no live server holds experts 0-10"));
}

TEST_F(ClusterTest, AServerThatLeavesIsNamedAndCanComeBack) {
  Cluster cluster(dir_);
  cluster.AddServers(3);  // experts 0-3, 4-7, 8-10
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 64, layer.experts.hidden_size, 2);
  const auto client = cluster.NewClient();
  const MoeOutput expected = client->Forward(layer.layer, rows).value();
  cluster.StopServer(1);
  cluster.WaitUntilServing(false);
  const absl::Time start = absl::Now();
  const absl::Status status = client->Forward(layer.layer, rows).status();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5))
      << "must fail at once, not after the grace period";
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("experts 4-7"));
  // Tokens that need none of the lost experts are served.
  int served = 0;
  for (int64_t t = 0; t < 64; ++t) {
    const int32_t* ids = expected.topk_ids.as<int32_t>() + t * layer.router.top_k;
    const bool lost =
        std::any_of(ids, ids + layer.router.top_k, [](int32_t id) { return id >= 4 && id <= 7; });
    if (lost) continue;
    ExpectSame(expected, t, client->Forward(layer.layer, Slice(rows, t, 1)));
    ++served;
  }
  EXPECT_GT(served, 0);
  cluster.AddServer(1, 3);
  cluster.WaitUntilServing(true);
  ExpectSame(expected, 0, client->Forward(layer.layer, rows));
}

TEST_F(ClusterTest, ModelAndClusterAreDescribed) {
  Cluster cluster(dir_);
  cluster.AddServers(2);
  cluster.WaitUntilServing(true);
  const auto client = cluster.NewClient();
  const v1::GetModelResponse model = client->GetModel().value();
  EXPECT_EQ(model.model_type(), "olmoe");
  ASSERT_EQ(model.layers_size(), static_cast<int>(cluster.model().layers.size()));
  EXPECT_EQ(model.layers(0).num_experts(), 11);
  EXPECT_EQ(model.layers(0).top_k(), 2);
  EXPECT_EQ(model.layers(0).weight_dtype(), "BF16");
  const v1::GetClusterResponse state = client->GetCluster().value();
  EXPECT_TRUE(state.serving());
  ASSERT_EQ(state.servers_size(), 2);
  EXPECT_EQ(state.servers(0).name(), "server-0");
  EXPECT_EQ(state.servers(0).layers(0).expert_ids_size(), 6);
  EXPECT_EQ(state.servers(1).layers(0).expert_ids_size(), 5);
}

TEST_F(ClusterTest, APortInUseIsNamed) {
  Cluster cluster(dir_);
  RouterServerOptions options;
  options.listen = cluster.address();
  const auto second = RouterServer::Start(Checkpoint::Open(dir_).value(), options);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(cluster.address()));
}

TEST(Client, SaysThatNoRouterIsThere) {
  const auto client = Client::Create("127.0.0.1:1", {.timeout = absl::Milliseconds(300)}).value();
  const absl::Status status = client->Forward(0, Tensor(DType::kF32, {1, 4})).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no router could be reached at 127.0.0.1:1"));
  EXPECT_EQ(client->IsServing().status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace expertmesh
