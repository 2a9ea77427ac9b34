// Every kind of layer that a description can name, through whole clusters in one process, against
// the restatement of the bit contract: bit for bit, whatever the cluster, the engine and the
// batching.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "expert_server/engine/cpu/grouped_experts.h"
#include "tests/tested.h"
#include "tests/unit/router_cluster.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 61;

struct NamedLayer {
  std::string name;
  LayerDescription layer;
};

// 7 experts, top-3; nothing shared.
LayerDescription Routed() {
  LayerDescription layer;
  layer.layer = kLayer;
  layer.router.num_experts = 7;
  layer.router.top_k = 3;
  layer.experts = Expert(Activation::kSiluGlu, false, DType::kBF16, kHidden, 6);
  return layer;
}

// With `count` shared experts of another width, activation, dtype and with biases.
LayerDescription WithShared(LayerDescription layer, int32_t count) {
  layer.shared.count = count;
  layer.shared.experts = Expert(Activation::kClampedSwishGlu, true, DType::kF32, kHidden, 9);
  return layer;
}

LayerDescription Dense(int32_t count) {
  LayerDescription layer;
  layer.layer = kLayer;
  layer.kind = LayerKind::kDense;
  layer.experts.hidden_size = kHidden;
  layer.shared.count = count;
  layer.shared.experts = Expert(Activation::kSiluGlu, false, DType::kBF16, kHidden, 11);
  return layer;
}

std::vector<NamedLayer> Layers() {
  std::vector<NamedLayer> layers;
  const auto add = [&layers](const std::string& name, const LayerDescription& layer) {
    layers.push_back({name, layer});
    return &layers.back().layer;
  };
  for (const Activation activation : AllActivations()) {
    add(absl::StrCat("Activation", static_cast<int>(activation)), Routed())->experts =
        Expert(activation, true, DType::kBF16, kHidden, 5);
  }
  add("Shared", WithShared(Routed(), 1));
  add("SharedAlike", WithShared(Routed(), 1))->shared.experts = Routed().experts;
  add("SharedGated", WithShared(Routed(), 1))->shared.gated_by_sigmoid = true;
  add("SharedAveraged", WithShared(Routed(), 1))->shared.averaged = true;
  add("SharedTwo", WithShared(Routed(), 2));
  LayerDescription* layer = add("SharedThreeOfEverything", WithShared(Routed(), 3));
  layer->shared.gated_by_sigmoid = layer->shared.averaged = true;
  layer->router.routed_scale = 2.5f;
  add("RoutedScale", Routed())->router.routed_scale = 2.5f;
  add("RoutedScaleShared", WithShared(Routed(), 1))->router.routed_scale = 0.3f;
  add("Dense", Dense(1));
  layer = add("DenseTwoGated", Dense(2));
  layer->shared.gated_by_sigmoid = true;
  add("Identity", Routed())->router.identity_experts = 4;
  layer = add("IdentityMostly", Routed());
  layer->router.num_experts = 2;
  layer->router.identity_experts = 9;
  layer = add("IdentityShared", WithShared(Routed(), 2));
  layer->router.identity_experts = 12;
  layer->router.routed_scale = 6.0f;
  add("WeighInput", Routed())->router.weigh_input = true;
  layer = add("WeighInputShared", WithShared(Routed(), 2));
  layer->router.weigh_input = true;
  layer->router.identity_experts = 2;
  layer->experts.weight_dtype = DType::kF32;
  layer = add("OneExpert", WithShared(Routed(), 1));
  layer->router.num_experts = layer->router.top_k = 1;
  // Quantised: two blocks in a row of each matrix, the second not whole; biases and other formats
  // beside them.
  for (const WeightType& type : AllWeightTypes()) {
    if (type.format == WeightFormat::kPlain) continue;
    const bool blocks = type.format == WeightFormat::kFp8Block128;
    const int64_t hidden = blocks ? 144 : 46, width = blocks ? 130 : 38;
    const auto expert = [&](Activation activation, bool has_bias, int64_t f) {
      return Expert(activation, has_bias, type, hidden, f);
    };
    const std::string name = NameOf(type.format);
    layer = add(name, Routed());
    layer->experts = expert(Activation::kSiluGlu, false, width);
    layer = add(name + "_Biases", Routed());
    layer->experts = expert(Activation::kClampedSwishGlu, true, width);
    layer = add(name + "_SharedAlike", Routed());
    layer->experts = expert(Activation::kGeluTanhGlu, false, 6);
    layer->shared = {.count = 1, .experts = expert(Activation::kSiluGlu, true, width)};
    layer = add(name + "_SharedPlain", WithShared(Routed(), 2));
    layer->experts = expert(Activation::kRelu2, false, width);
    layer->shared.experts.hidden_size = hidden;
    layer->router.weigh_input = true;
    layer = add(name + "_Dense", Dense(1));
    layer->experts.hidden_size = hidden;
    layer->shared.experts = expert(Activation::kSiluGlu, false, width);
  }
  // Low precision: more than one block in a row, the last not whole; padded.
  for (const QuantizedFormat format : {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                       QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil}) {
    const bool blocks = format == QuantizedFormat::kFp8Block128;
    const int64_t hidden = blocks ? 144 : 46, width = blocks ? 130 : 38;
    const auto expert = [&](Activation activation, bool has_bias, int64_t f) {
      ExpertDescriptor descriptor =
          Expert(activation, has_bias, {WeightFormatOf(format), DType::kF8_E4M3}, hidden, f);
      descriptor.row_format = format;
      return descriptor;
    };
    const std::string name = absl::StrCat("low_", NameOf(format));
    layer = add(name, Routed());
    layer->experts = expert(Activation::kSiluGlu, false, width);
    layer->pad_multiple = PadMultipleOf(format);
    layer = add(name + "_Shared", Routed());
    layer->experts = expert(Activation::kClampedSwishGlu, true, width);
    layer->shared = {.count = 2, .experts = expert(Activation::kSiluGlu, false, 9)};
    layer->pad_multiple = 3 * PadMultipleOf(format);
    layer = add(name + "_WeighInput", Routed());
    layer->experts = expert(Activation::kSiluGlu, false, width);
    layer->shared = {.count = 1, .experts = expert(Activation::kGeluErfGlu, true, width)};
    layer->router.weigh_input = true;
    layer->router.identity_experts = 2;
    layer->pad_multiple = PadMultipleOf(format);
  }
  return layers;
}

std::shared_ptr<const Checkpoint> Made(const LayerDescription& layer) {
  return std::make_shared<MadeUpCheckpoint>(std::vector<LayerDescription>{layer});
}

std::unique_ptr<Router> Cluster(const std::shared_ptr<const Checkpoint>& checkpoint,
                                int num_servers, const FakeServer::Handler& handler,
                                EngineKind engine, const BatchingOptions& batching = {}) {
  RouterOptions options;
  options.engine = engine;
  options.batching = batching;
  auto router = MakeRouter(checkpoint, options);
  for (int s = 0; s < num_servers; ++s) {
    AddServer(*router, s, *ExpertStore::ShardOf(checkpoint->model(), s, num_servers), handler,
              [](size_t, uint64_t) {}, {.kind = engine});
  }
  return router;
}

class LayersTest : public ::testing::TestWithParam<std::tuple<NamedLayer, DType>> {
 protected:
  const NamedLayer& named() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }

  const std::shared_ptr<const Checkpoint> checkpoint_ = Made(named().layer);
  // Fewer of the wide ones, so that restating them does not take long.
  const int64_t num_tokens_ = named().layer.experts.hidden_size == kHidden ? kTokens : 29;
  const Tensor tokens_ = Tokens(dtype(), num_tokens_, named().layer.experts.hidden_size);
  const Expected expected_ = Restate(*checkpoint_, kLayer, tokens_);
};

TEST_P(LayersTest, HasTheBitsOfTheContractWhateverTheCluster) {
  for (const int num_servers : {1, 2, 4, 7, 9}) {
    for (const EngineKind engine : {EngineKind::kGrouped, EngineKind::kForLoop}) {
      SCOPED_TRACE(absl::StrCat(num_servers, " servers, ", NameOf(engine)));
      auto router = Cluster(checkpoint_, num_servers, kAtOnce, engine);
      ExpectForward(*router, tokens_, expected_, 0, num_tokens_);
      for (int64_t t = 0; t < 12; ++t) ExpectForward(*router, tokens_, expected_, t, 1);
      router = Cluster(checkpoint_, num_servers, kAtOnce, engine, {.max_tokens = 7});
      ExpectForward(*router, tokens_, expected_, 0, num_tokens_);
    }
  }
}

// Calls of several sizes, merged and cut, the servers' answers in any order.
TEST_P(LayersTest, HasTheBitsOfTheContractHoweverCallsAreMerged) {
  Pool pool(2);
  const auto router = Cluster(checkpoint_, 4, pool.handler(), EngineKind::kGrouped,
                              {.overlapping_rounds = 2, .max_tokens = 20});
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&, c] {
      for (int64_t begin = c; begin < num_tokens_; begin += 9) {
        ExpectForward(*router, tokens_, expected_, begin,
                      std::min<int64_t>(1 + c * 5, num_tokens_ - begin));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

INSTANTIATE_TEST_SUITE_P(All, LayersTest,
                         ::testing::Combine(::testing::ValuesIn(Layers()),
                                            ::testing::ValuesIn(TestedDTypes())),
                         [](const ::testing::TestParamInfo<LayersTest::ParamType>& test) {
                           return std::get<0>(test.param).name + "_" +
                                  NameOf(std::get<1>(test.param));
                         });

// The cases above have what they are about.
TEST(Layers, IdentityExpertsAreChosen) {
  for (const NamedLayer& named : Layers()) {
    if (named.layer.router.identity_experts == 0) continue;
    const Expected expected = Restate(
        *Made(named.layer), kLayer, Tokens(DType::kF32, kTokens, named.layer.experts.hidden_size));
    int64_t none = 0, all = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto first = expected.ids.begin() + t * expected.top_k;
      const auto identities = std::count_if(first, first + expected.top_k, [&](int32_t id) {
        return id >= named.layer.router.num_experts;
      });
      none += identities == 0;
      all += identities == expected.top_k;
    }
    EXPECT_LT(none, kTokens) << named.name;
    if (named.name == "IdentityMostly") {
      EXPECT_GT(all, 0);
    }
  }
}

TEST(Layers, ShardsHaveAllSharedExperts) {
  ModelDescription model;
  model.layers = {WithShared(Routed(), 2), Dense(1)};
  model.layers[1].layer = kLayer + 1;
  const auto shard = [&model](int32_t s, int32_t n) { return *ExpertStore::ShardOf(model, s, n); };
  EXPECT_THAT(shard(0, 2).at(kLayer), ElementsAre(0, 1, 2, 3, 7, 8));
  EXPECT_THAT(shard(1, 2).at(kLayer), ElementsAre(4, 5, 6, 7, 8));
  EXPECT_THAT(shard(8, 9).at(kLayer), ElementsAre(7, 8));
  EXPECT_THAT(shard(1, 2).at(kLayer + 1), ElementsAre(0));
  // Bytes: of 4 routed experts, and of shared ones of another kind.
  const MadeUpCheckpoint checkpoint(model.layers);
  const int64_t routed = BytesOfGroupedExpert(model.layers[0].experts);
  const int64_t shared = BytesOfGroupedExpert(model.layers[0].shared.experts);
  const int64_t dense = BytesOfGroupedExpert(model.layers[1].shared.experts);
  EXPECT_EQ(ExpertStore::BytesOf(checkpoint, shard(0, 2)), 4 * routed + 2 * shared + dense);
}

// A row travels once to its server, however many shared experts read it, and to no other.
TEST(Layers, SharedRowsGoWhereTheFirstSlotIs) {
  const LayerDescription layer = WithShared(Routed(), 2);
  const auto checkpoint = Made(layer);
  const Tensor tokens = Tokens(DType::kF32, kTokens);
  const Expected expected = Restate(*checkpoint, kLayer, tokens);
  std::vector<ExpertSlice> slices;
  std::vector<size_t> servers;
  const auto router = Cluster(
      checkpoint, 3,
      [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        slices.push_back(slice);
        servers.push_back(index);
        kAtOnce(index, store, std::move(slice), std::move(done));
      },
      EngineKind::kGrouped);
  for (int64_t t = 0; t < kTokens; ++t) {
    slices.clear();
    servers.clear();
    ExpectForward(*router, tokens, expected, t, 1);
    const auto server_of = [](int32_t expert) { return expert < 3 ? 0u : expert < 5 ? 1u : 2u; };
    std::set<size_t> needed;
    for (int k = 0; k < 3; ++k) needed.insert(server_of(expected.ids[t * 3 + k]));
    EXPECT_EQ(slices.size(), needed.size());
    for (size_t s = 0; s < slices.size(); ++s) {
      EXPECT_EQ(slices[s].rows.values.dim(0), 1);
      const bool first = servers[s] == server_of(expected.ids[t * 3]);
      EXPECT_EQ(std::count(slices[s].expert_ids.begin(), slices[s].expert_ids.end(), 7), first);
      EXPECT_EQ(std::count(slices[s].expert_ids.begin(), slices[s].expert_ids.end(), 8), first);
    }
  }
}

// Weights travel with the indices, and only where they are needed.
TEST(Layers, InputWeightsAreChecked) {
  for (const bool weigh_input : {false, true}) {
    LayerDescription layer = Routed();
    layer.router.weigh_input = weigh_input;
    const auto checkpoint = Made(layer);
    const auto store = *ExpertStore::Load(*checkpoint, {{kLayer, {0}}}, MakeEngine({}),
                                          [](const LoadProgress&) {});
    const Tensor rows = Tokens(DType::kF32, 2);
    for (const size_t weights : {0, 1, 2, 3}) {
      const auto result =
          store->Forward(kLayer, std::vector<int32_t>{0}, std::vector<int64_t>{2},
                         std::vector<int32_t>{0, 1}, std::vector<float>(weights, 0.5f), rows);
      EXPECT_EQ(result.ok(), weights == (weigh_input ? 2u : 0u));
      if (result.ok()) continue;
      EXPECT_EQ(std::string(result.status().message()),
                absl::StrCat("input_weights: expected ", weigh_input ? 2 : 0,
                             " entries for layer 1, got ", weights));
    }
  }
}

TEST(Layers, DenseTokensAreSplitOverTheServers) {
  const auto checkpoint = Made(Dense(1));
  std::vector<int64_t> rows;
  const auto router = Cluster(
      checkpoint, 4,
      [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        rows.push_back(slice.rows.values.dim(0));
        kAtOnce(index, store, std::move(slice), std::move(done));
      },
      EngineKind::kGrouped);
  const Tensor tokens = Tokens(DType::kBF16, 10);
  ExpectForward(*router, tokens, Restate(*checkpoint, kLayer, tokens), 0, 10);
  EXPECT_THAT(rows, ElementsAre(3, 2, 3, 2));
}

// Servers without shared experts leave them to those that have all.
TEST(Layers, SharedExpertsMayBeElsewhere) {
  const auto checkpoint = Made(WithShared(Routed(), 2));
  const Tensor tokens = Tokens(DType::kBF16, kTokens);
  const Expected expected = Restate(*checkpoint, kLayer, tokens);
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  const auto router = MakeRouter(checkpoint, options);
  AddServer(*router, 0, {{kLayer, {0, 1, 2, 3, 4, 5, 6}}}, kAtOnce);
  AddServer(*router, 1, {{kLayer, {8}}}, kAtOnce);  // not all of them
  EXPECT_THAT(std::string(Forward(*router, tokens, 0, 1).status().message()),
              HasSubstr("layer 1: no live server holds experts 7-8"));
  EXPECT_EQ(router->membership()->Missing(), "layer 1: no live server holds experts 7-8");
  AddServer(*router, 2, {{kLayer, {7, 8}}}, kAtOnce);
  EXPECT_EQ(router->membership()->Missing(), "");
  ExpectForward(*router, tokens, expected, 0, kTokens);
  AddServer(*router, 3, {{kLayer, {2, 7, 8}}}, kAtOnce);
  ExpectForward(*router, tokens, expected, 0, kTokens);
}

// Rows that a server that goes was asked for are asked of others, as long as there are any: of
// shared experts and dense layers all have them, of routed ones replicas.
TEST(Layers, OthersTakeOverFromServersThatGo) {
  for (const LayerDescription& layer : {Dense(2), WithShared(Routed(), 2), Routed()}) {
    const auto checkpoint = Made(layer);
    const Tensor tokens = Tokens(DType::kBF16, kTokens);
    const Expected expected = Restate(*checkpoint, kLayer, tokens);
    int refused = 0;
    const FakeServer::Handler handler = [&refused](size_t index, const Store& store,
                                                   ExpertSlice slice, ExpertBackend::Done done) {
      if (index == 0 || index == 3) return kAtOnce(index, store, std::move(slice), std::move(done));
      ++refused;
      std::move(done)(absl::UnavailableError("gone"));
    };
    const auto router =
        Cluster(checkpoint, 2, handler, EngineKind::kGrouped, {.max_tokens = kTokens / 2});
    for (const size_t replica : {2, 3}) {
      AddServer(*router, replica, *ExpertStore::ShardOf(checkpoint->model(), 1, 2), handler);
    }
    ExpectForward(*router, tokens, expected, 0, kTokens);
    EXPECT_GT(refused, 1);
    for (int64_t t = 0; t < kTokens; ++t) ExpectForward(*router, tokens, expected, t, 1);
  }
}

TEST(Layers, LosingSharedExpertsIsSaid) {
  const auto router = Cluster(
      Made(Dense(2)), 2,
      [](size_t, const Store&, ExpertSlice, ExpertBackend::Done done) {
        std::move(done)(absl::UnavailableError("gone"));
      },
      EngineKind::kGrouped);
  const Tensor tokens = Tokens(DType::kF32, 4);
  EXPECT_EQ(Forward(*router, tokens, 0, 4).status().ToString(),
            "UNAVAILABLE: layer 1: lost the server of experts 0-1: gone");
}

// The gate sees the rows through one norm, and the experts through another.
TEST(Layers, InputsAreNormalised) {
  for (const int32_t num_experts : {7, 1}) {  // one alone has weight 1: the output is the expert's
    LayerDescription plain = Routed();
    plain.router.num_experts = num_experts;
    plain.router.top_k = std::min(num_experts, plain.router.top_k);
    LayerDescription normed = plain;
    normed.router.input_norm = {true, 1e-3f, 0.5f};
    normed.expert_input_norm = {true, 1e-2f, 1.0f};
    const auto checkpoint = Made(normed);
    const RouterWeights weights = *checkpoint->ReadRouter(kLayer);
    const auto norm = [](const InputNorm& what, const Tensor& weight, const Tensor& rows) {
      return RowNorm::Create(what, weight, kHidden)->Apply(rows, rows.dtype());
    };
    const auto router = Cluster(checkpoint, 2, kAtOnce, EngineKind::kGrouped);
    const auto without = Cluster(Made(plain), 2, kAtOnce, EngineKind::kGrouped);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor rows = Tokens(dtype, kTokens);
      const auto got = Forward(*router, Call(rows));
      ASSERT_TRUE(got.ok()) << got.status();
      const auto same = [](const Tensor& a, const Tensor& b) {
        return a.dtype() == b.dtype() && a.shape() == b.shape() &&
               std::memcmp(a.data(), b.data(), a.num_bytes()) == 0;
      };
      if (dtype == DType::kF32) {  // the gate's rows are not rounded to less
        const auto routed =
            Forward(*without, Call(norm(normed.router.input_norm, weights.input_norm, rows)));
        ASSERT_TRUE(routed.ok()) << routed.status();
        EXPECT_TRUE(same(got->routing.logits, routed->routing.logits));
        EXPECT_TRUE(same(got->routing.topk_ids, routed->routing.topk_ids));
        EXPECT_TRUE(same(got->routing.topk_weights, routed->routing.topk_weights));
        const auto unnormed = Forward(*without, Call(rows));
        ASSERT_TRUE(unnormed.ok()) << unnormed.status();
        EXPECT_FALSE(same(got->routing.logits, unnormed->routing.logits));
      }
      if (num_experts > 1) continue;
      const auto computed =
          Forward(*without, Call(norm(normed.expert_input_norm, weights.expert_input_norm, rows)));
      ASSERT_TRUE(computed.ok()) << computed.status();
      EXPECT_TRUE(same(got->output, computed->output));
    }
  }
}

// Of servers that all have the shared experts, one that does not answer holds back only the calls
// that it has got already.
TEST(Layers, AStuckServerGetsNoMoreSharedRows) {
  const auto checkpoint = Made(Dense(1));
  const Tensor tokens = Tokens(DType::kF32, 20);
  const Expected expected = Restate(*checkpoint, kLayer, tokens);
  absl::Mutex mutex;
  std::vector<std::pair<Store, ExpertSlice>> stuck;
  std::vector<ExpertBackend::Done> unanswered;
  const auto router =
      Cluster(checkpoint, 3,
              [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
                if (index != 1) return kAtOnce(index, store, std::move(slice), std::move(done));
                absl::MutexLock lock(&mutex);
                stuck.emplace_back(store, std::move(slice));
                unanswered.push_back(std::move(done));
              },
              EngineKind::kGrouped, {.patience = absl::Milliseconds(20)});
  std::thread first([&] { ExpectForward(*router, tokens, expected, 0, 20); });
  const auto got_one = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex) { return !stuck.empty(); };
  mutex.LockWhen(absl::Condition(&got_one));
  mutex.Unlock();
  absl::SleepFor(absl::Milliseconds(30));
  for (int i = 0; i < 5; ++i) ExpectForward(*router, tokens, expected, i, 15);
  mutex.Lock();
  EXPECT_EQ(stuck.size(), 1u);
  ExpertBackend::Done done = std::move(unanswered[0]);
  mutex.Unlock();
  std::move(done)(Compute(*stuck[0].first, stuck[0].second));
  first.join();
}

TEST(Layers, NamesTheRowThatIsNotFinite) {
  for (const LayerDescription& layer : {Dense(1), WithShared(Routed(), 1)}) {
    const auto router = Cluster(Made(layer), 1, kAtOnce, EngineKind::kGrouped);
    Tensor bad = Tokens(DType::kBF16, 30);
    StoreFloat(DType::kBF16, bad.data(), 17 * kHidden + 4, INFINITY);
    EXPECT_EQ(Forward(*router, Call(bad)).status().ToString(),
              "INVALID_ARGUMENT: hidden_states: row 17 is not finite at column 4");
  }
}

TEST(Layers, NoTokensNeedNothing) {
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  for (const NamedLayer& named : Layers()) {
    const auto router = MakeRouter(Made(named.layer), options);
    const auto result =
        Forward(*router, Call(Tensor(DType::kF16, {0, named.layer.experts.hidden_size})));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->output.shape(), ElementsAre(0, named.layer.experts.hidden_size));
    EXPECT_THAT(result->routing.topk_ids.shape(), ElementsAre(0, named.layer.router.top_k));
  }
}

// Records what goes to the servers.
struct Recorder {
  std::vector<ExpertSlice> slices;
  FakeServer::Handler handler() {
    return [this](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
      slices.push_back(slice);
      kAtOnce(index, store, std::move(slice), std::move(done));
    };
  }
  int64_t Positions() const {
    int64_t positions = 0;
    for (const ExpertSlice& slice : slices) positions += static_cast<int64_t>(slice.gather.size());
    return positions;
  }
  int64_t Pairs() const {
    int64_t pairs = 0;
    for (const ExpertSlice& slice : slices) {
      for (const int32_t row : slice.gather) pairs += row >= 0;
    }
    return pairs;
  }
  int64_t Rows() const {
    int64_t rows = 0;
    for (const ExpertSlice& slice : slices) rows += slice.rows.values.dim(0);
    return rows;
  }
  int64_t RowBytes() const {
    int64_t bytes = 0;
    for (const ExpertSlice& slice : slices) {
      bytes += static_cast<int64_t>(slice.rows.values.num_bytes() + slice.rows.scales.num_bytes());
    }
    return bytes;
  }
};

// In low precision every group is a multiple, the counters say what was added, and no result
// depends on it; natively nothing is added.
TEST(Layers, PaddingIsWhereTheFormatWantsItAndChangesNothing) {
  for (const NamedLayer& named : Layers()) {
    const int64_t hidden_size = named.layer.experts.hidden_size;
    const Tensor tokens = Tokens(DType::kBF16, 21, hidden_size);
    const Expected expected = Restate(*Made(named.layer), kLayer, tokens);
    const std::optional<QuantizedFormat> format = named.layer.row_format();
    for (const int factor : {1, 2, 5}) {
      for (const EmptyExperts empty : {EmptyExperts::kZeroRows, EmptyExperts::kOneBlock}) {
        SCOPED_TRACE(absl::StrCat(named.name, ", factor ", factor));
        LayerDescription layer = named.layer;
        if (format) layer.pad_multiple *= factor;
        Recorder recorder;
        RouterOptions options;
        options.empty_experts = empty;
        const auto router = MakeCluster(Made(layer), 3, recorder.handler(), options);
        ExpectForward(*router, tokens, expected, 0, 21);
        const RoundCounters& counters = router->counters(kLayer);
        EXPECT_EQ(counters.pairs, recorder.Pairs());
        EXPECT_EQ(counters.unique_rows, recorder.Rows());
        EXPECT_EQ(counters.row_bytes, recorder.RowBytes());
        EXPECT_EQ(counters.padded_positions, recorder.Positions() - recorder.Pairs());
        if (!format) {
          EXPECT_EQ(counters.padded_positions, 0);
          EXPECT_EQ(counters.zero_rows + counters.saturated_rows, 0);
          continue;
        }
        EXPECT_GT(counters.padded_positions, 0);
        std::set<int32_t> sent;
        for (const ExpertSlice& slice : recorder.slices) {
          for (const int64_t size : slice.m_sizes) EXPECT_EQ(size % layer.pad_multiple, 0);
          EXPECT_EQ(slice.gather.size() % layer.pad_multiple, 0u);
          EXPECT_EQ(slice.rows.format, format);
          EXPECT_EQ(slice.rows.values.num_bytes(),
                    static_cast<size_t>(slice.rows.values.dim(0) * hidden_size));
          sent.insert(slice.expert_ids.begin(), slice.expert_ids.end());
        }
        if (empty == EmptyExperts::kOneBlock) {
          EXPECT_EQ(sent.size(), static_cast<size_t>(layer.num_held()));
        }
        // One token: most experts have none.
        for (int64_t t = 0; t < 5; ++t) ExpectForward(*router, tokens, expected, t, 1);
      }
    }
  }
}

// Rows that are all zeros or too large for their scale are counted, each once.
TEST(Layers, QuantisedRowsAreCounted) {
  LayerDescription layer = Routed();
  layer.experts =
      Expert(Activation::kSiluGlu, false, {WeightFormat::kMxfp8, DType::kF8_E4M3}, 64, 32);
  layer.experts.row_format = QuantizedFormat::kMxfp8;
  layer.pad_multiple = 32;
  const auto router = Cluster(Made(layer), 3, kAtOnce, EngineKind::kGrouped);
  Tensor tokens = Tokens(DType::kF32, 9, 64);
  for (int64_t i = 0; i < tokens.num_elements(); ++i) tokens.as<float>()[i] = 1.0f;
  std::fill_n(tokens.as<float>() + 2 * 64, 3 * 64, 0.0f);
  tokens.as<float>()[7 * 64 + 1] = 1.99f;  // 1.8125 * 2^0 and more saturate (OCP's floor)
  tokens.as<float>()[7 * 64 + 40] = -1.9f;
  tokens.as<float>()[8 * 64] = 1.875f;
  ASSERT_TRUE(Forward(*router, Call(tokens)).ok());
  const RoundCounters& counters = router->counters(kLayer);
  EXPECT_EQ(counters.zero_rows, 3);
  EXPECT_EQ(counters.saturated_rows, 2);
  EXPECT_EQ(counters.saturated_values, 3);
}

// --dispatch-dtype fp8: the servers compute natively on what the rows stand for.
TEST(Layers, RowsMayTravelAsFp8) {
  for (const NamedLayer& named : Layers()) {
    if (named.layer.row_format()) continue;
    const auto checkpoint = Made(named.layer);
    const int64_t hidden_size = named.layer.experts.hidden_size;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(absl::StrCat(named.name, " ", NameOf(dtype)));
      const Tensor tokens = Tokens(dtype, 17, hidden_size);
      // What a native cluster gives whose servers get these rows.
      const auto reference = MakeCluster(
          checkpoint, 3,
          [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
            Tensor rows(dtype, slice.rows.values.shape());
            const int64_t blocks = (hidden_size + 127) / 128;
            std::vector<uint8_t> codes(hidden_size);
            std::vector<float> scales(blocks);
            for (int64_t r = 0; r < rows.dim(0); ++r) {
              const auto* row = slice.rows.values.data() + r * hidden_size * BytesOf(dtype);
              ForLoopQuantizeRows({QuantizedFormat::kFp8Block128, dtype, row, 1, hidden_size,
                                   codes.data(), scales.data()});
              for (int64_t d = 0; d < hidden_size; ++d) {
                const volatile float value = FloatFromE4M3(codes[d]) * scales[d / 128];
                StoreFloat(dtype, rows.data(), r * hidden_size + d, value);
              }
            }
            slice.rows = rows;
            kAtOnce(index, store, std::move(slice), std::move(done));
          });
      const auto expected = Forward(*reference, Call(tokens));
      ASSERT_TRUE(expected.ok()) << expected.status();
      Recorder recorder;
      RouterOptions options;
      options.wire_format = QuantizedFormat::kFp8Block128;
      const auto router = MakeCluster(checkpoint, 3, recorder.handler(), options);
      const auto result = Forward(*router, Call(tokens));
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(
          std::memcmp(result->output.data(), expected->output.data(), expected->output.num_bytes()),
          0);
      for (const ExpertSlice& slice : recorder.slices) {
        EXPECT_EQ(slice.rows.values.num_bytes(),
                  static_cast<size_t>(slice.rows.values.dim(0) * hidden_size));
      }
      EXPECT_EQ(router->counters(kLayer).padded_positions, 0);
    }
  }
  LayerDescription low = Routed();
  low.experts.row_format = QuantizedFormat::kMxfp8;
  RouterOptions options;
  options.wire_format = QuantizedFormat::kFp8Block128;
  EXPECT_EQ(Router::Create(Made(low), kNumerics, options).status().ToString(),
            "INVALID_ARGUMENT: dispatch_dtype: expected none, as the experts of layer 1 compute in "
            "mxfp8, got fp8");
}

// Rows in another format than the layer's are refused by name.
TEST(Layers, RowsHaveTheFormatOfTheLayer) {
  LayerDescription low = Routed();
  low.experts =
      Expert(Activation::kSiluGlu, false, {WeightFormat::kFp8Row, DType::kF8_E4M3}, 32, 8);
  low.experts.row_format = QuantizedFormat::kFp8Rowwise;
  LayerDescription native = Routed();
  native.experts.hidden_size = 32;
  const auto refusal = [](const LayerDescription& layer, const ExpertRows& rows) {
    const auto store = *ExpertStore::Load(*Made(layer), {{kLayer, {0}}}, MakeEngine({}),
                                          [](const LoadProgress&) {});
    return store
        ->Forward(kLayer, std::vector<int32_t>{0}, std::vector<int64_t>{1}, std::vector<int32_t>{0},
                  {}, rows)
        .status()
        .ToString();
  };
  ExpertRows rows;
  rows.dtype = DType::kBF16;
  rows.format = QuantizedFormat::kMxfp8;
  rows.values = Tensor(DType::kF8_E4M3, {1, 32});
  rows.scales = Tensor(DType::kF8_E8M0, {1, 1});
  std::memset(rows.values.data(), 0x38, 32);
  std::memset(rows.scales.data(), 127, 1);
  EXPECT_EQ(refusal(low, rows),
            "INVALID_ARGUMENT: row_format: expected fp8_rowwise for layer 1, got mxfp8");
  EXPECT_EQ(refusal(native, rows),
            "INVALID_ARGUMENT: row_format: expected native for layer 1, got mxfp8");
  EXPECT_EQ(refusal(low, Tokens(DType::kBF16, 1, 32)),
            "INVALID_ARGUMENT: row_format: expected fp8_rowwise for layer 1, got native");
  rows.format = QuantizedFormat::kFp8Rowwise;
  EXPECT_EQ(refusal(low, rows),
            "INVALID_ARGUMENT: row_scales: expected F32 [1, 1], got F8_E8M0 [1, 1]");
  rows.scales = Tensor(DType::kF32, {1, 1});
  rows.scales.as<float>()[0] = 1.0f;
  EXPECT_EQ(refusal(low, rows), "OK");
  rows.scales.as<float>()[0] = INFINITY;
  EXPECT_THAT(refusal(low, rows), HasSubstr("row_scales: expected finite ones"));
  rows.scales.as<float>()[0] = 1.0f;
  rows.values.as<uint8_t>()[5] = 0xff;
  EXPECT_EQ(refusal(low, rows), "INVALID_ARGUMENT: rows: row 0 is not finite at column 5");
  rows.values.as<uint8_t>()[5] = 0x7e;
  rows.dtype = DType::kI32;
  EXPECT_EQ(refusal(low, rows), "INVALID_ARGUMENT: rows.dtype: expected F32, BF16 or F16, got I32");
}

TEST(Layers, RefusesWhatIsNoLayer) {
  const auto refusal = [](const LayerDescription& layer) {
    return Router::Create(Made(layer), kNumerics, {}).status().ToString();
  };
  EXPECT_EQ(refusal(Dense(0)), "INVALID_ARGUMENT: layer 1: there are no experts");
  LayerDescription layer = WithShared(Routed(), 1);
  layer.shared.experts.hidden_size = kHidden + 1;
  EXPECT_THAT(refusal(layer), HasSubstr("shared experts have another hidden_size"));
  layer = Dense(1);
  layer.router.top_k = 1;
  EXPECT_THAT(refusal(layer), HasSubstr("top_k and identity_experts must be 0"));
}

}  // namespace
}  // namespace expertmesh
