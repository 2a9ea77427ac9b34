// What takes long: channels that are idle, and one call of more than 2^31 elements.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_cluster.h"
#include "common/rpc/channel.h"
#include "common/safetensors/safetensors.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

// gRPC's servers take pings more often than every five minutes for an attack, unless they are told,
// and end the connection at the third or so: after 40 s of a channel that asks every 10 s.
TEST(Keepalive, AnIdleChannelStaysConnected) {
  const ListeningServer listening = StartServer("127.0.0.1:0", {}).value();
  const std::shared_ptr<grpc::Channel> channel = MakeChannel(listening.address).value();
  const auto in = [](int seconds) {
    return std::chrono::system_clock::now() + std::chrono::seconds(seconds);
  };
  ASSERT_TRUE(channel->WaitForConnected(in(20)));
  EXPECT_FALSE(channel->WaitForStateChange(GRPC_CHANNEL_READY, in(70)));
  EXPECT_EQ(channel->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_READY);
  listening.server->Shutdown();
}

class ModelFolder {
 public:
  ModelFolder(int64_t experts, int64_t hidden, int64_t intermediate) {
    char folder[] = "/tmp/endurance_test.XXXXXX";
    path_ = mkdtemp(folder);
    std::ofstream(path_ + "/config.json")
        << R"({"model_type": "olmoe", "hidden_act": "silu", "num_hidden_layers": 1, )"
        << R"("num_attention_heads": 1, "norm_topk_prob": true, "torch_dtype": "bfloat16", )"
        << absl::StrCat(R"("hidden_size": )", hidden, R"(, "intermediate_size": )", intermediate,
                        R"(, "num_experts": )", experts, R"(, "num_experts_per_tok": )", experts,
                        R"(, "vocab_size": 8})");
    std::mt19937 rng(1);
    std::map<std::string, Tensor> tensors;
    const std::string block = "model.layers.0.mlp.";
    const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
      tensors[block + name + ".weight"] = RandomTensor(DType::kBF16, {rows, columns}, 0.02f, rng);
    };
    add("gate", experts, hidden);
    for (int64_t e = 0; e < experts; ++e) {
      add(absl::StrCat("experts.", e, ".gate_proj"), intermediate, hidden);
      add(absl::StrCat("experts.", e, ".up_proj"), intermediate, hidden);
      add(absl::StrCat("experts.", e, ".down_proj"), hidden, intermediate);
    }
    EXPECT_TRUE(
        WriteSafetensors(path_ + "/model.safetensors", {tensors.begin(), tensors.end()}).ok());
  }
  ~ModelFolder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// In one round: one server gets all rows and returns T * K * D = 2.6 billion elements.
TEST(Large, OneRoundOfMoreThanTwoToThe31Elements) {
  constexpr int64_t kTokens = 40'000, kHidden = 8192, kExperts = 8;
  static_assert(kTokens * kHidden * kExperts > int64_t{1} << 31);
  const ModelFolder model(kExperts, kHidden, /*intermediate=*/4);
  LocalClusterOptions options;
  options.engine.threads = 2;
  options.router.batching.max_tokens = kTokens;
  options.router.batching.max_reply_bytes = std::numeric_limits<int64_t>::max();
  const auto cluster = LocalCluster::Start(model.path(), options).value();
  std::mt19937 rng(2);
  const Tensor some = RandomTensor(DType::kBF16, {1000, kHidden}, 1.0f, rng);
  Tensor hidden_states(DType::kBF16, {kTokens, kHidden});
  for (int64_t t = 0; t < kTokens; t += some.dim(0)) {
    std::memcpy(hidden_states.as<uint16_t>() + t * kHidden, some.data(), some.num_bytes());
  }
  // The last one is like no other.
  const Tensor last = RandomTensor(DType::kBF16, {1, kHidden}, 1.0f, rng);
  std::memcpy(hidden_states.as<uint16_t>() + (kTokens - 1) * kHidden, last.data(),
              last.num_bytes());

  const absl::StatusOr<MoeOutput> whole = cluster->Forward(0, hidden_states);
  ASSERT_TRUE(whole.ok()) << whole.status();
  // The reply is sorted by expert: 32,768 tokens are where its elements, and those of the pairs in
  // token order, pass 2^31.
  for (const int64_t t : {int64_t{0}, int64_t{999}, int64_t{32'767}, int64_t{32'768},
                          int64_t{36'000}, kTokens - 2, kTokens - 1}) {
    Tensor one(DType::kBF16, {1, kHidden});
    std::memcpy(one.data(), hidden_states.as<uint16_t>() + t * kHidden, one.num_bytes());
    const MoeOutput alone = cluster->Forward(0, one).value();
    EXPECT_EQ(std::memcmp(alone.output.data(), whole->output.as<uint16_t>() + t * kHidden,
                          alone.output.num_bytes()),
              0)
        << "token " << t;
    EXPECT_EQ(std::memcmp(alone.topk_weights.data(), whole->topk_weights.as<float>() + t * kExperts,
                          alone.topk_weights.num_bytes()),
              0)
        << "token " << t;
  }
}

}  // namespace
}  // namespace expertmesh
