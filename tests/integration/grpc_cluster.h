// A router and expert servers over real gRPC in this process, and what their results are compared
// with.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/local_cluster.h"
#include "common/rpc/channel.h"
#include "expert_server/service/expert_server.h"
#include "router/service/router_server.h"
#include "tests/random_tensor.h"

namespace expertmesh {

// A cluster in one process that is all plain loops: what everything else is compared with.
inline LocalClusterOptions ForLoops() {
  LocalClusterOptions options;
  options.engine.kind = EngineKind::kForLoop;
  options.router.engine = EngineKind::kForLoop;
  return options;
}

// Router and servers with a gRPC port each.
class Cluster {
 public:
  explicit Cluster(const std::string& model_dir, absl::Duration startup_grace = absl::Seconds(30),
                   const ChannelOptions& channel = {}, const BatchingOptions& batching = {})
      : Cluster(Checkpoint::Open(model_dir).value(),
                RouterOptions{.startup_grace = startup_grace, .batching = batching}, channel) {}

  Cluster(std::shared_ptr<const Checkpoint> checkpoint, const RouterOptions& router,
          const ChannelOptions& channel = {})
      : checkpoint_(std::move(checkpoint)), channel_(channel) {
    RouterServerOptions options;
    options.channel = channel_;
    options.listen = "127.0.0.1:0";
    options.router = router;
    router_ = RouterServer::Start(checkpoint_, options).value();
  }

  ~Cluster() {
    for (auto& server : servers_) server->Shutdown(absl::Seconds(5));
    router_->Shutdown(absl::Seconds(5));
  }

  void AddServer(int32_t shard, int32_t num_shards, int threads = 1,
                 const ExpertsFactory& experts = nullptr) {
    ExpertServerOptions options;
    options.experts = experts;
    options.channel = channel_;
    options.listen = "127.0.0.1:0";
    options.router = router_->address();
    options.shard = shard;
    options.num_shards = num_shards;
    options.engine.threads = threads;
    servers_.push_back(ExpertServer::Start(
                           *checkpoint_, options, [](const LoadProgress&) {},
                           [](const absl::Status& status) { FAIL() << status; })
                           .value());
  }

  void AddServers(int32_t num_shards, int threads = 1) {
    for (int32_t i = 0; i < num_shards; ++i) AddServer(i, num_shards, threads);
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
  const ChannelOptions channel_;
  std::unique_ptr<RouterServer> router_;
  std::vector<std::unique_ptr<ExpertServer>> servers_;
};

inline Tensor RandomRows(DType dtype, int64_t tokens, int64_t hidden_size, uint32_t seed) {
  std::mt19937 rng(seed);
  return RandomTensor(dtype, {tokens, hidden_size}, 1.0f, rng);
}

inline Tensor Slice(const Tensor& rows, int64_t begin, int64_t count) {
  Tensor part(rows.dtype(), {count, rows.dim(1)});
  const size_t row_bytes = rows.num_bytes() / rows.dim(0);
  std::memcpy(part.data(), rows.data() + begin * row_bytes, part.num_bytes());
  return part;
}

// Rows [begin, begin + part) of `whole` have the bits of `part`.
inline void ExpectRows(const Tensor& whole, int64_t begin, const Tensor& part) {
  ASSERT_EQ(whole.dtype(), part.dtype());
  ASSERT_EQ(whole.dim(1), part.dim(1));
  const size_t row_bytes = whole.num_bytes() / whole.dim(0);
  EXPECT_EQ(std::memcmp(whole.data() + begin * row_bytes, part.data(), part.num_bytes()), 0)
      << "rows " << begin << " to " << begin + part.dim(0);
}

inline void ExpectSame(const MoeOutput& whole, int64_t begin,
                       const absl::StatusOr<MoeOutput>& part) {
  ASSERT_TRUE(part.ok()) << part.status();
  ExpectRows(whole.output, begin, part->output);
  ExpectRows(whole.topk_ids, begin, part->topk_ids);
  ExpectRows(whole.topk_weights, begin, part->topk_weights);
}

}  // namespace expertmesh
