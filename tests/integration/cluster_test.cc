// Promise 1: the same bits whatever the cluster. A router and expert servers over real gRPC against
// one process that holds everything and one server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "client/cpp/local_cluster.h"
#include "common/rpc/channel.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"
#include "expert_server/engine/cpu/for_loop_experts.h"
#include "expert_server/service/expert_server.h"
#include "expertmesh/v1/moe.grpc.pb.h"
#include "router/service/router_server.h"
#include "tests/integration/grpc_cluster.h"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

std::string ModelDir(const std::string& name) {
  return std::string(EXPERTMESH_TEST_DATA) + "/checkpoints/" + name;
}

TEST(ExpertServer, RefusesANameThatCannotStandInMetadata) {
  const auto checkpoint = Checkpoint::Open(ModelDir("olmoe-bf16-e11k2-saved")).value();
  ExpertServerOptions options;
  options.listen = "no address";  // looked at after the name
  for (const char* name : {"two words", "caf\xc3\xa9", "line\n"}) {
    options.name = name;
    const auto server = ExpertServer::Start(
        *checkpoint, options, [](const LoadProgress&) {}, [](const absl::Status&) {});
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(server.status().message()),
                testing::StartsWith("name: expected 1 to 128 printable ASCII"));
  }
}

class SameBits : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(SameBits, AsOneProcess) {
  const auto& [name, servers] = GetParam();
  Cluster cluster(ModelDir(name));
  cluster.AddServers(servers);
  const auto one_process = LocalCluster::Start(ModelDir(name), ForLoops()).value();
  const auto local_many =
      LocalCluster::Start(ModelDir(name), {.servers = servers, .engine = {.threads = 2}}).value();
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
  const auto local = LocalCluster::Start(dir_, ForLoops());
  for (const BatchingOptions& batching :
       {BatchingOptions{}, BatchingOptions{.rounds_per_layer = 0},
        BatchingOptions{.wait = absl::Milliseconds(1), .max_tokens = 16}}) {
    Cluster cluster(dir_, absl::Seconds(30), {.max_message_bytes = 64 << 10}, batching);
    for (int i = 0; i < 3; ++i) cluster.AddServer(i, 3, /*threads=*/2);
    const int64_t hidden_size = cluster.model().layers[0].experts.hidden_size;
    const int32_t layer = cluster.model().layers[0].layer;
    std::vector<std::thread> threads;
    for (int c = 0; c < 8; ++c) {
      threads.emplace_back([&, c] {
        const auto client = cluster.NewClient({.max_message_bytes = 64 << 10});
        for (int i = 0; i < 10; ++i) {
          // Now and then one that the client splits.
          const int64_t tokens = (c + i) % 9 == 0 ? 900 : 1 + (c * 7 + i) % 23;
          const Tensor rows =
              RandomRows(c % 2 ? DType::kF32 : DType::kBF16, tokens, hidden_size, c * 100 + i);
          ExpectSame((*local)->Forward(layer, rows).value(), 0, client->Forward(layer, rows));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const v1::LayerRounds rounds = cluster.NewClient()->GetCluster()->layers(0);
    EXPECT_EQ(rounds.layer(), layer);
    EXPECT_GE(rounds.requests(), 80u);
    if (batching.rounds_per_layer == 0) {
      EXPECT_EQ(rounds.rounds(), rounds.requests());
    }
  }
}

// Experts that compute until they are stopped, unless `Pass` has been called.
class StuckEngine {
 public:
  ExpertsFactory factory() {
    return [this](const ExpertDescriptor& descriptor,
                  int64_t num_experts) -> absl::StatusOr<std::unique_ptr<Experts>> {
      ASSIGN_OR_RETURN(std::unique_ptr<Experts> experts,
                       MakeForLoopExperts(descriptor, num_experts));
      return std::make_unique<Layer>(this, std::move(experts));
    };
  }
  void Pass(bool pass) { pass_ = pass; }
  int started() const { return started_; }
  int stopped() const { return stopped_; }

 private:
  class Layer final : public Experts {
   public:
    Layer(StuckEngine* engine, std::unique_ptr<Experts> experts)
        : engine_(engine), experts_(std::move(experts)) {}
    void SetWeights(int64_t expert, ExpertWeights weights) override {
      experts_->SetWeights(expert, std::move(weights));
    }
    absl::Status Prepare() override { return experts_->Prepare(); }
    int64_t bytes() const override { return experts_->bytes(); }
    absl::Status Forward(const ExpertBatch& batch, void* output) const override {
      ++engine_->started_;
      while (!engine_->pass_) {
        if (batch.stop()) {
          ++engine_->stopped_;
          return absl::CancelledError("stopped");
        }
        absl::SleepFor(absl::Milliseconds(1));
      }
      return experts_->Forward(batch, output);
    }

   private:
    StuckEngine* const engine_;
    const std::unique_ptr<Experts> experts_;
  };

  std::atomic<bool> pass_ = false;
  std::atomic<int> started_ = 0;
  std::atomic<int> stopped_ = 0;
};

// A call that can be cancelled, with the generated stub.
class RawCall {
 public:
  RawCall(v1::MoeService::Stub* stub, int32_t layer, const Tensor& rows) {
    request_.set_layer(layer);
    ToProto(rows, request_.mutable_hidden_states());
    stub->async()->Forward(&context_, &request_, &response_, [this](grpc::Status status) {
      absl::MutexLock lock(&mutex_);
      status_ = std::move(status);
      done_ = true;
    });
  }
  ~RawCall() { Wait(); }
  void Cancel() { context_.TryCancel(); }
  const grpc::Status& status() {
    Wait();
    return status_;
  }
  const v1::ForwardResponse& response() const { return response_; }

 private:
  void Wait() { absl::MutexLock lock(&mutex_, absl::Condition(&done_)); }

  v1::ForwardRequest request_;
  v1::ForwardResponse response_;
  grpc::ClientContext context_;
  absl::Mutex mutex_;
  bool done_ = false;
  grpc::Status status_;
};

void WaitUntil(const char* what, const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return;
    absl::SleepFor(absl::Milliseconds(10));
  }
  FAIL() << "in vain for: " << what;
}

TEST_F(ClusterTest, ServersStopWhenNobodyIsLeftInARound) {
  StuckEngine engine;
  Cluster cluster(dir_, absl::Seconds(30), {}, {.patience = absl::Minutes(10)});
  cluster.AddServer(0, 1, 1, engine.factory());
  cluster.WaitUntilServing(true);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 4, layer.experts.hidden_size, 2);
  const MoeOutput expected = LocalCluster::Start(dir_).value()->Forward(layer.layer, rows).value();
  const auto stub = v1::MoeService::NewStub(MakeChannel(cluster.address()).value());
  RawCall first(stub.get(), layer.layer, rows);
  WaitUntil("the first round", [&] { return engine.started() == 1; });
  RawCall leaves(stub.get(), layer.layer, rows);
  RawCall stays(stub.get(), layer.layer, rows);
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(engine.stopped(), 0);

  first.Cancel();
  EXPECT_EQ(first.status().error_code(), grpc::StatusCode::CANCELLED);
  WaitUntil("the server to stop", [&] { return engine.stopped() == 1; });
  WaitUntil("the merged round", [&] { return engine.started() == 2; });
  leaves.Cancel();
  EXPECT_EQ(leaves.status().error_code(), grpc::StatusCode::CANCELLED);
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(engine.stopped(), 1);  // somebody is left
  engine.Pass(true);
  ASSERT_TRUE(stays.status().ok()) << stays.status().error_message();
  ExpectRows(expected.output, 0, FromProto(stays.response().output(), "output").value());
}

TEST_F(ClusterTest, QueuedSlicesThatNobodyWaitsForAreDropped) {
  StuckEngine engine;
  Cluster cluster(dir_, absl::Seconds(30), {}, {.rounds_per_layer = 0});
  cluster.AddServer(0, 1, 1, engine.factory());
  cluster.WaitUntilServing(true);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 4, layer.experts.hidden_size, 2);
  const auto stub = v1::MoeService::NewStub(MakeChannel(cluster.address()).value());
  RawCall first(stub.get(), layer.layer, rows);
  WaitUntil("the first slice", [&] { return engine.started() == 1; });
  {
    std::vector<std::unique_ptr<RawCall>> queued;
    for (int i = 0; i < 10; ++i) {
      queued.push_back(std::make_unique<RawCall>(stub.get(), layer.layer, rows));
    }
    absl::SleepFor(absl::Milliseconds(300));  // they are at the server
    for (const auto& call : queued) call->Cancel();
  }
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(engine.stopped(), 0);
  engine.Pass(true);
  EXPECT_TRUE(first.status().ok()) << first.status().error_message();
  RawCall last(stub.get(), layer.layer, rows);
  EXPECT_TRUE(last.status().ok()) << last.status().error_message();
  EXPECT_EQ(engine.started(), 2);  // the first and the last
}

TEST_F(ClusterTest, TheCallersDeadlineReachesTheServer) {
  StuckEngine engine;
  Cluster cluster(dir_);
  cluster.AddServer(0, 1, 1, engine.factory());
  cluster.WaitUntilServing(true);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 4, layer.experts.hidden_size, 2);
  const auto client = cluster.NewClient({.timeout = absl::Milliseconds(300)});
  const absl::Time start = absl::Now();
  EXPECT_EQ(client->Forward(layer.layer, rows).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  WaitUntil("the server to stop", [&] { return engine.stopped() == 1; });
  engine.Pass(true);
  EXPECT_TRUE(cluster.NewClient()->Forward(layer.layer, rows).ok());
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

// By the client itself: there is no router.
TEST_F(ClusterTest, DtypesThatDoNotTravelAreNamed) {
  const auto client = Client::Create("127.0.0.1:1", {.timeout = absl::Seconds(1)}).value();
  for (const DType dtype : {DType::kF64, DType::kI8, DType::kU8, DType::kI64}) {
    const absl::Status status = client->Forward(0, Tensor(dtype, {2, 4})).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(status.message()),
              absl::StrCat("hidden_states.dtype: expected F32, BF16 or F16, got ", NameOf(dtype)));
  }
}

// Requests over the message limit are split by the client; that changes no bit.
TEST_F(ClusterTest, LargeRequestsAreSplit) {
  Cluster cluster(dir_);
  cluster.AddServers(3);
  const LayerDescription& layer = cluster.model().layers[0];
  ClientOptions small;
  small.max_message_bytes = 64 << 10;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor rows = RandomRows(dtype, 3000, layer.experts.hidden_size, 9);
    const MoeOutput whole = cluster.NewClient()->Forward(layer.layer, rows).value();
    ExpectSame(whole, 0, cluster.NewClient(small)->Forward(layer.layer, rows));
  }
  // Rows are numbered as the caller does.
  Tensor nan = RandomRows(DType::kF32, 3000, layer.experts.hidden_size, 9);
  nan.as<float>()[2500 * layer.experts.hidden_size + 3] = std::nanf("");
  const absl::Status status = cluster.NewClient(small)->Forward(layer.layer, nan).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("hidden_states: row 2500 "));
}

// The reply of one server has top_k rows a token: with the smallest message limit, rounds are cut
// to fit.
TEST(Cluster, ASmallMessageLimitHoldsBetweenRouterAndServersToo) {
  const std::string dir = std::string(EXPERTMESH_TEST_DATA) + "/tiny-olmoe";
  const ChannelOptions small = {.max_message_bytes = 64 << 10};
  Cluster cluster(dir, absl::Seconds(30), small);
  cluster.AddServers(1);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 200, layer.experts.hidden_size, 4);
  const MoeOutput expected =
      LocalCluster::Start(dir, ForLoops()).value()->Forward(layer.layer, rows).value();
  ClientOptions options;
  options.max_message_bytes = small.max_message_bytes;
  ExpectSame(expected, 0, cluster.NewClient(options)->Forward(layer.layer, rows));
}

TEST_F(ClusterTest, CallsWaitForServersThatComeLate) {
  Cluster cluster(dir_);
  const LayerDescription& layer = cluster.model().layers[0];
  const Tensor rows = RandomRows(DType::kF32, 5, layer.experts.hidden_size, 2);
  const MoeOutput expected =
      LocalCluster::Start(dir_, ForLoops()).value()->Forward(layer.layer, rows).value();
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

// A router that answers whatever a test wants.
class FakeRouter final
    : public v1::MoeService::WithRawCallbackMethod_Forward<v1::MoeService::Service> {
 public:
  // `hidden_states`: of the request; `call`: 0, 1, ...
  using Answer = std::function<grpc::ByteBuffer(const Tensor& hidden_states, int call)>;

  explicit FakeRouter(Answer answer)
      : answer_(std::move(answer)), listening_(StartServer("127.0.0.1:0", {this}).value()) {}
  ~FakeRouter() { listening_.server->Shutdown(); }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    v1::ForwardRequest header;
    Tensor hidden_states;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (!request->Valid()) {  // cancelled before the message was there
      reactor->Finish(grpc::Status::CANCELLED);
      return reactor;
    }
    EXPECT_TRUE(DecodeWithTensor(*request, "hidden_states", &header, &hidden_states).ok());
    *response = answer_(hidden_states, calls_++);
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  const std::string& address() const { return listening_.address; }

 private:
  const Answer answer_;
  std::atomic<int> calls_ = 0;
  const ListeningServer listening_;
};

grpc::ByteBuffer Reply(const Tensor& output, const Tensor& ids, const Tensor& weights) {
  v1::ForwardResponse response;
  ToProto(ids, response.mutable_topk_ids());
  ToProto(weights, response.mutable_topk_weights());
  return EncodeWithTensor(response, output);
}

// As it should be, with zeros.
grpc::ByteBuffer GoodReply(const Tensor& hidden_states, int64_t top_k = 2) {
  const int64_t tokens = hidden_states.dim(0);
  return Reply(Tensor(hidden_states.dtype(), hidden_states.shape()),
               Tensor(DType::kI32, {tokens, top_k}), Tensor(DType::kF32, {tokens, top_k}));
}

grpc::ByteBuffer RawReply(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer Truncated(const grpc::ByteBuffer& reply, size_t bytes_less) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(reply.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return RawReply(bytes.substr(0, bytes.size() - bytes_less));
}

TEST(Client, NonsenseOfTheRouterIsAnError) {
  const Tensor rows(DType::kF32, {4, 8});
  const Tensor ids(DType::kI32, {4, 2}), weights(DType::kF32, {4, 2});
  v1::ForwardResponse short_ids;
  ToProto(ids, short_ids.mutable_topk_ids());
  ToProto(weights, short_ids.mutable_topk_weights());
  short_ids.mutable_topk_ids()->mutable_data()->pop_back();
  v1::ForwardResponse huge;
  huge.mutable_topk_ids()->set_dtype(v1::DATA_TYPE_I32);
  huge.mutable_topk_ids()->add_shape(int64_t{1} << 62);
  huge.mutable_topk_ids()->add_shape(int64_t{1} << 62);
  const auto output = [&](DType dtype, const std::vector<int64_t>& shape) {
    return Reply(Tensor(dtype, shape), ids, weights);
  };
  const std::vector<std::pair<grpc::ByteBuffer, std::string>> replies = {
      {RawReply(""), "topk_ids.dtype"},
      {RawReply(std::string(40, '\xff')),
       "the bytes received are no expertmesh.v1.ForwardResponse"},
      {Truncated(GoodReply(rows), 1), "the bytes received are no expertmesh.v1.ForwardResponse"},
      {RawReply(std::string("\x7a\xff\xff\xff\xff\x07")), "the bytes received are no"},
      {output(DType::kBF16, {4, 8}), "output: expected F32 [4, 8], got BF16 [4, 8]"},
      {output(DType::kI64, {4, 8}), "output: expected F32 [4, 8], got I64 [4, 8]"},
      {output(DType::kF32, {3, 8}), "output: expected F32 [4, 8], got F32 [3, 8]"},
      {output(DType::kF32, {5, 8}), "output: expected F32 [4, 8], got F32 [5, 8]"},
      {output(DType::kF32, {0, 8}), "output: expected F32 [4, 8], got F32 [0, 8]"},
      {output(DType::kF32, {4, 9}), "output: expected F32 [4, 8], got F32 [4, 9]"},
      {output(DType::kF32, {8, 4}), "output: expected F32 [4, 8], got F32 [8, 4]"},
      {output(DType::kF32, {32}), "output: expected F32 [4, 8], got F32 [32]"},
      {output(DType::kF32, {}), "output: expected F32 [4, 8], got F32 []"},
      {Encode(huge), "topk_ids.shape"},
      {EncodeWithTensor(short_ids, rows), "topk_ids.data: expected 32 bytes"},
      {Reply(rows, weights, weights), "topk_ids: expected I32 [4, 2], got F32 [4, 2]"},
      {Reply(rows, ids, ids), "topk_weights: expected F32 [4, 2], got I32 [4, 2]"},
      {Reply(rows, Tensor(DType::kI32, {5, 2}), weights),
       "topk_ids: expected I32 [4, 2], got I32 [5"},
      {Reply(rows, Tensor(DType::kI32, {8}), weights),
       "topk_ids: expected I32 [4, 0], got I32 [8]"},
      {Reply(rows, ids, Tensor(DType::kF32, {4, 3})),
       "topk_weights: expected F32 [4, 2], got F32 [4"},
      {Reply(rows, ids, Tensor(DType::kF32, {0, 2})),
       "topk_weights: expected F32 [4, 2], got F32 [0"},
  };
  FakeRouter router([&](const Tensor& hidden_states, int call) {
    return call < static_cast<int>(replies.size()) ? replies[call].first : GoodReply(hidden_states);
  });
  const auto client = Client::Create(router.address()).value();
  for (const auto& [reply, text] : replies) {
    const absl::Status status = client->Forward(0, rows).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << text << "; " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("malformed reply of the router: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  const absl::StatusOr<MoeOutput> good = client->Forward(0, rows);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->topk_ids.shape(), (std::vector<int64_t>{4, 2}));
}

TEST(Client, NonsenseInOnePartOfACallIsAnError) {
  const auto less = [](const Tensor& x) { return Slice(x, 0, x.dim(0) - 1); };
  const std::vector<std::function<grpc::ByteBuffer(const Tensor&)>> nonsense = {
      [](const Tensor& x) { return GoodReply(x, /*top_k=*/3); },
      [](const Tensor& x) { return GoodReply(x, /*top_k=*/1); },
      [](const Tensor& x) { return GoodReply(x, /*top_k=*/0); },
      [&](const Tensor& x) { return GoodReply(less(x)); },
      [](const Tensor& x) {
        return GoodReply(Tensor(DType::kF32, {x.dim(0) + 1, x.dim(1)}));
      },
      [](const Tensor& x) { return GoodReply(Tensor(DType::kBF16, x.shape())); },
      [](const Tensor& x) { return Truncated(GoodReply(x), 5); },
      [](const Tensor&) { return RawReply(""); },
  };
  const Tensor rows(DType::kF32, {2000, 8});
  ClientOptions options;
  options.max_message_bytes = 64 << 10;
  for (const int bad_call : {0, 1, 2}) {
    for (size_t i = 0; i < nonsense.size(); ++i) {
      FakeRouter router([&](const Tensor& hidden_states, int call) {
        return call == bad_call ? nonsense[i](hidden_states) : GoodReply(hidden_states);
      });
      const auto client = Client::Create(router.address(), options).value();
      const absl::Status status = client->Forward(0, rows).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal)
          << "part " << bad_call << ", case " << i;
      EXPECT_THAT(std::string(status.message()), HasSubstr("malformed reply of the router: "));
    }
  }
  FakeRouter router([](const Tensor& hidden_states, int) { return GoodReply(hidden_states); });
  EXPECT_TRUE(Client::Create(router.address(), options).value()->Forward(0, rows).ok());
}

// A router whose answers a test gives when it likes, in any order.
class HeldRouter final
    : public v1::MoeService::WithRawCallbackMethod_Forward<v1::MoeService::Service> {
 public:
  class Call final : public grpc::ServerUnaryReactor {
   public:
    explicit Call(HeldRouter* router) : router_(router) {}
    void OnCancel() override {
      absl::MutexLock lock(&router_->mutex_);
      ++router_->cancelled_;
    }
    void OnDone() override { delete this; }

   private:
    HeldRouter* const router_;
  };
  // One that arrived and was not answered yet.
  struct Held {
    Call* call;
    Tensor hidden_states;
    grpc::ByteBuffer* response;
  };

  HeldRouter() : listening_(StartServer("127.0.0.1:0", {this}).value()) {}
  ~HeldRouter() { listening_.server->Shutdown(); }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext*, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    v1::ForwardRequest header;
    Held held;
    EXPECT_TRUE(DecodeWithTensor(*request, "hidden_states", &header, &held.hidden_states).ok());
    held.call = new Call(this);
    held.response = response;
    absl::MutexLock lock(&mutex_);
    ++arrived_;
    held_.emplace(header.first_row(), held);
    return held.call;
  }

  // Waits until the part that begins with this row is there.
  Held Take(int64_t first_row) {
    const auto there = [this, first_row]()
                           ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return held_.contains(first_row); };
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(10))) << first_row;
    const Held held = held_.at(first_row);
    held_.erase(first_row);
    return held;
  }

  int arrived() {
    absl::MutexLock lock(&mutex_);
    return arrived_;
  }

  void AwaitCancelled(int calls) {
    const auto cancelled = [this, calls]()
                               ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return cancelled_ == calls; };
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&cancelled), absl::Seconds(10)));
  }

  const std::string& address() const { return listening_.address; }

 private:
  absl::Mutex mutex_;
  std::map<int64_t, Held> held_ ABSL_GUARDED_BY(mutex_);
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  int cancelled_ ABSL_GUARDED_BY(mutex_) = 0;
  const ListeningServer listening_;
};

void Answer(const HeldRouter::Held& held) {
  *held.response = GoodReply(held.hidden_states);
  held.call->Finish(grpc::Status::OK);
}

void Refuse(const HeldRouter::Held& held, const std::string& why) {
  held.call->Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, why));
}

// 1000 rows a part.
ClientOptions SmallParts() {
  ClientOptions options;
  options.max_message_bytes = 4096 + 2 * 1000 * 32;
  return options;
}

TEST(ClientParts, TwoAreUnderWayAtATime) {
  HeldRouter router;
  const auto client = Client::Create(router.address(), SmallParts()).value();
  absl::StatusOr<MoeOutput> output;
  std::thread call([&] { output = client->Forward(0, Tensor(DType::kF32, {3500, 8})); });
  const HeldRouter::Held first = router.Take(0), second = router.Take(1000);
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(router.arrived(), 2);
  Answer(second);  // the replies may come in any order
  absl::SleepFor(absl::Milliseconds(100));
  Answer(first);
  const HeldRouter::Held last = router.Take(3000);
  EXPECT_EQ(last.hidden_states.dim(0), 500);
  Answer(last);
  Answer(router.Take(2000));
  call.join();
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->output.shape(), (std::vector<int64_t>{3500, 8}));
}

TEST(ClientParts, OneThatFailsEndsTheOthers) {
  HeldRouter router;
  const auto client = Client::Create(router.address(), SmallParts()).value();
  absl::StatusOr<MoeOutput> output;
  std::thread call([&] { output = client->Forward(0, Tensor(DType::kF32, {9000, 8})); });
  const HeldRouter::Held first = router.Take(0), second = router.Take(1000);
  Refuse(first, "no");
  router.AwaitCancelled(1);
  Refuse(second, "too late");
  call.join();
  EXPECT_EQ(output.status(), absl::InvalidArgumentError("no"));
  EXPECT_EQ(router.arrived(), 2);
}

TEST(ClientParts, TheFirstBadOneIsNamed) {
  HeldRouter router;
  const auto client = Client::Create(router.address(), SmallParts()).value();
  absl::StatusOr<MoeOutput> output;
  std::thread call([&] { output = client->Forward(0, Tensor(DType::kF32, {9000, 8})); });
  const HeldRouter::Held first = router.Take(0);
  Refuse(router.Take(1000), "the second");
  absl::SleepFor(absl::Milliseconds(100));
  Refuse(first, "the first");
  call.join();
  EXPECT_EQ(output.status(), absl::InvalidArgumentError("the first"));
}

TEST(ClientParts, OneRowOverTheLimitIsNamed) {
  const auto client = Client::Create("127.0.0.1:1", SmallParts()).value();
  const absl::Status status = client->Forward(0, Tensor(DType::kF32, {2, 16001})).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("one row needs 68100 bytes in a message, max_message_bytes is 68096"));
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
