// The router over a small model, with servers that are calls into the engine: a whole forward
// against a restatement of the bit contract, whatever the cluster and the batching, and what goes
// wrong.
#include "router/dispatch/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/numerics/math.h"
#include "common/safetensors/safetensors.h"
#include "common/text.h"
#include "expert_server/engine/expert_store.h"
#include "nlohmann/json.hpp"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 20;       // D
constexpr int64_t kIntermediate = 6;  // F
constexpr int32_t kExperts = 12;      // E
constexpr int32_t kTopK = 3;          // K
constexpr int32_t kLayers = 2;
constexpr int32_t kLayer = 1;  // the one that is called
constexpr char kNumerics[] = "numerics-1";

// Writes a model folder with random weights, opens it, and removes it again.
std::shared_ptr<const Checkpoint> MakeModel(DType weights) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / absl::StrCat("router_test.", getpid());
  std::filesystem::create_directories(folder);
  const nlohmann::json config = {{"model_type", "olmoe"},   {"num_hidden_layers", kLayers},
                                 {"hidden_size", kHidden},  {"intermediate_size", kIntermediate},
                                 {"num_experts", kExperts}, {"num_experts_per_tok", kTopK},
                                 {"hidden_act", "silu"}};
  std::ofstream(folder / "config.json") << config;
  std::mt19937 rng(5);
  std::map<std::string, Tensor> tensors;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string block = absl::StrCat("model.layers.", layer, ".mlp.");
    tensors[block + "gate.weight"] = RandomTensor(weights, {kExperts, kHidden}, 0.5f, rng);
    tensors[block + "experts.gate_up_proj"] =
        RandomTensor(weights, {kExperts, 2 * kIntermediate, kHidden}, 0.5f, rng);
    tensors[block + "experts.down_proj"] =
        RandomTensor(weights, {kExperts, kHidden, kIntermediate}, 0.5f, rng);
  }
  const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
  EXPECT_TRUE(WriteSafetensors((folder / "model.safetensors").string(), views).ok());
  auto checkpoint = Checkpoint::Open(folder.string());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::filesystem::remove_all(folder);  // what is open stays readable
  return checkpoint.ok() ? *checkpoint : nullptr;
}

// The restatement.

// One chain of fused multiply-adds: pairs of neighbours, the odd one first, for 16-bit weights.
float Chain(const std::vector<float>& x, const Tensor& weights, int64_t n) {
  const int64_t columns = weights.dim(1);  // even here
  const int64_t swap = weights.dtype() == DType::kF32 ? 0 : 1;
  volatile float sum = 0.0f;
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t k = i ^ swap;
    sum = fmaf(x[k], LoadFloat(weights.dtype(), weights.data(), n * columns + k), sum);
  }
  return sum;
}

float RoundTo(DType dtype, float value) {
  if (dtype == DType::kBF16) return FloatFromBF16(BF16FromFloat(value));
  if (dtype == DType::kF16) return FloatFromF16(F16FromFloat(value));
  return value;
}

struct Expected {
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
  std::vector<float> logits;   // [T, E]
  std::vector<float> output;   // [T, D]
};

Expected Restate(const Checkpoint& checkpoint, int32_t layer, const Tensor& hidden_states) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // FTZ and DAZ
  const DType dtype = hidden_states.dtype();
  const DType rows_dtype = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;  // and h's
  const RouterWeights gate = *checkpoint.ReadRouter(layer);
  std::vector<ExpertWeights> experts;
  for (int32_t e = 0; e < kExperts; ++e) experts.push_back(*checkpoint.ReadExpert(layer, e));
  Expected expected;
  for (int64_t t = 0; t < hidden_states.dim(0); ++t) {
    std::vector<float> x(kHidden), logits(kExperts), weights(kTopK);
    std::vector<int32_t> ids(kTopK);
    for (int64_t d = 0; d < kHidden; ++d) {
      x[d] = LoadFloat(dtype, hidden_states.data(), t * kHidden + d);
    }
    for (int32_t e = 0; e < kExperts; ++e) logits[e] = Chain(x, gate.weight, e);
    EXPECT_TRUE(SelectExperts(checkpoint.model().Find(layer)->router, logits, {}, {},
                              absl::MakeSpan(ids), absl::MakeSpan(weights))
                    .ok());
    std::vector<float> sum(kHidden, 0.0f);
    for (int32_t k = 0; k < kTopK; ++k) {
      const ExpertWeights& expert = experts[ids[k]];
      std::vector<float> h(kIntermediate);
      for (int64_t f = 0; f < kIntermediate; ++f) {
        const float g = Chain(x, expert.gate_up, f);
        const float u = Chain(x, expert.gate_up, kIntermediate + f);
        const volatile float silu = g / (1.0f + Exp(-g));
        h[f] = RoundTo(rows_dtype, silu * u);
      }
      for (int64_t d = 0; d < kHidden; ++d) {
        sum[d] = fmaf(weights[k], RoundTo(rows_dtype, Chain(h, expert.down, d)), sum[d]);
      }
    }
    for (const float value : sum) expected.output.push_back(RoundTo(dtype, value));
    expected.ids.insert(expected.ids.end(), ids.begin(), ids.end());
    expected.weights.insert(expected.weights.end(), weights.begin(), weights.end());
    expected.logits.insert(expected.logits.end(), logits.begin(), logits.end());
  }
  _mm_setcsr(saved);
  return expected;
}

// Tokens [begin, end) of the result are those of `expected` from `begin` on, bit for bit.
void ExpectResult(const ForwardResult& result, const Expected& expected, DType dtype, int64_t begin,
                  int64_t tokens) {
  ASSERT_EQ(result.output.dtype(), dtype);
  ASSERT_THAT(result.output.shape(), ElementsAre(tokens, kHidden));
  ASSERT_THAT(result.routing.topk_ids.shape(), ElementsAre(tokens, kTopK));
  ASSERT_THAT(result.routing.topk_weights.shape(), ElementsAre(tokens, kTopK));
  const auto same = [tokens, begin](const Tensor& got, const auto& values, int64_t width) {
    return std::memcmp(got.data(), values.data() + begin * width,
                       static_cast<size_t>(tokens * width) * 4) == 0;
  };
  EXPECT_TRUE(same(result.routing.topk_ids, expected.ids, kTopK));
  EXPECT_TRUE(same(result.routing.topk_weights, expected.weights, kTopK));
  EXPECT_TRUE(same(result.routing.logits, expected.logits, kExperts));
  for (int64_t i = 0; i < tokens * kHidden; ++i) {
    const float got = LoadFloat(dtype, result.output.data(), i);
    const float value = expected.output[begin * kHidden + i];
    ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(value))
        << "token " << begin + i / kHidden << ", channel " << i % kHidden << ": expected " << value
        << ", got " << got;
  }
}

// The servers.

using Store = std::shared_ptr<const ExpertStore>;

class FakeServer : public ExpertBackend {
 public:
  // What happens to a slice; `index` is the server's.
  using Handler = std::function<void(size_t index, const Store&, ExpertSlice, Done)>;

  FakeServer(size_t index, Store store, Handler handler)
      : index_(index), store_(std::move(store)), handler_(std::move(handler)) {}
  void Dispatch(ExpertSlice slice, Done done) override {
    handler_(index_, store_, std::move(slice), std::move(done));
  }

 private:
  const size_t index_;
  const Store store_;
  const Handler handler_;
};

absl::StatusOr<Tensor> Compute(const ExpertStore& store, const ExpertSlice& slice) {
  return store.Forward(slice.layer, slice.expert_ids, slice.m_sizes, slice.gather, slice.rows);
}

// Answers before Dispatch returns.
const FakeServer::Handler kAtOnce = [](size_t, const Store& store, ExpertSlice slice,
                                       ExpertBackend::Done done) {
  std::move(done)(Compute(*store, slice));
};

// Keeps slices until somebody lets go of them; answers on its own threads, in random order.
class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this, i] { Work(i); });
  }
  ~Pool() {
    {
      absl::MutexLock lock(&mutex_);
      open_ = stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }
  FakeServer::Handler handler() {
    return [this](size_t, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
      absl::MutexLock lock(&mutex_);
      tasks_.push_back({store, std::move(slice), std::move(done)});
    };
  }
  void Open(bool open) {
    absl::MutexLock lock(&mutex_);
    open_ = open;
  }
  size_t waiting() {
    absl::MutexLock lock(&mutex_);
    return tasks_.size();
  }

 private:
  struct Task {
    Store store;
    ExpertSlice slice;
    ExpertBackend::Done done;
  };
  void Work(int seed) {
    std::mt19937 rng(seed);
    const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return open_ && (stopping_ || !tasks_.empty());
    };
    while (true) {
      Task task;
      {
        absl::MutexLock lock(&mutex_, absl::Condition(&ready));
        if (tasks_.empty()) return;
        std::swap(tasks_[rng() % tasks_.size()], tasks_.back());
        task = std::move(tasks_.back());
        tasks_.pop_back();
      }
      std::move(task.done)(Compute(*task.store, task.slice));
    }
  }

  absl::Mutex mutex_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

std::unique_ptr<Router> MakeRouter(const std::shared_ptr<const Checkpoint>& checkpoint,
                                   const RouterOptions& options = {}) {
  auto router = Router::Create(checkpoint, kNumerics, options);
  EXPECT_TRUE(router.ok()) << router.status();
  return router.ok() ? *std::move(router) : nullptr;
}

// Adds a server; returns its ticket.
uint64_t AddServer(Router& router, size_t index, const ExpertStore::Held& held,
                   const FakeServer::Handler& handler) {
  auto store =
      ExpertStore::Load(router.checkpoint(), held, MakeEngine({}), [](const LoadProgress&) {});
  EXPECT_TRUE(store.ok()) << store.status();
  const auto ticket =
      router.membership()->Register({.name = absl::StrCat("server-", index),
                                     .address = absl::StrCat("host:", index),
                                     .pid = 1,
                                     .model_fingerprint = router.checkpoint().fingerprint(),
                                     .numerics = kNumerics,
                                     .experts = held});
  EXPECT_TRUE(ticket.ok()) << ticket.status();
  router.membership()->SetServing(*ticket,
                                  std::make_shared<FakeServer>(index, *std::move(store), handler));
  return *ticket;
}

std::unique_ptr<Router> MakeCluster(const std::shared_ptr<const Checkpoint>& checkpoint,
                                    int num_servers, const FakeServer::Handler& handler,
                                    const RouterOptions& options = {}) {
  auto router = MakeRouter(checkpoint, options);
  for (int s = 0; s < num_servers; ++s) {
    AddServer(*router, s, *ExpertStore::ShardOf(checkpoint->model(), s, num_servers), handler);
  }
  return router;
}

// One forward of tokens [begin, begin + tokens).
absl::StatusOr<ForwardResult> Forward(const Router& router, const Tensor& hidden_states,
                                      int64_t begin, int64_t tokens) {
  const std::vector<int64_t> shape = {tokens, kHidden};
  ForwardCall call;
  call.layer = kLayer;
  call.hidden_states =
      TensorView(hidden_states.dtype(), shape,
                 hidden_states.data() + begin * kHidden * BytesOf(hidden_states.dtype()));
  return router.Forward(call);
}

void ExpectForward(const Router& router, const Tensor& hidden_states, const Expected& expected,
                   int64_t begin, int64_t tokens) {
  const auto result = Forward(router, hidden_states, begin, tokens);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectResult(*result, expected, hidden_states.dtype(), begin, tokens);
}

Tensor Tokens(DType dtype, int64_t tokens) {
  std::mt19937 rng(9);
  return RandomTensor(dtype, {tokens, kHidden}, 1.0f, rng);
}

class RouterBitsTest : public ::testing::TestWithParam<std::tuple<DType, DType>> {};

TEST_P(RouterBitsTest, AreThoseOfTheContractWhateverTheCluster) {
  const auto [weights, dtype] = GetParam();
  const auto checkpoint = MakeModel(weights);
  ASSERT_NE(checkpoint, nullptr);
  const Tensor hidden_states = Tokens(dtype, 257);
  const Expected expected = Restate(*checkpoint, kLayer, hidden_states);
  EXPECT_EQ(std::set<int32_t>(expected.ids.begin(), expected.ids.end()).size(), kExperts)
      << "every expert should be used";
  for (const int num_servers : {1, 2, 3, 5, 15}) {  // some of the 15 hold no expert
    SCOPED_TRACE(absl::StrCat(num_servers, " servers"));
    for (const int64_t subround_bytes : {int64_t{1}, int64_t{1000}, int64_t{8 << 20}}) {
      RouterOptions options;
      options.subround_bytes = subround_bytes;
      const auto router = MakeCluster(checkpoint, num_servers, kAtOnce, options);
      ExpectForward(*router, hidden_states, expected, 0, 257);
    }
    const auto router = MakeCluster(checkpoint, num_servers, kAtOnce);
    for (int64_t t = 0; t < 40; ++t) ExpectForward(*router, hidden_states, expected, t, 1);
    for (int64_t begin = 0, tokens = 1; begin + tokens <= 257; begin += tokens, tokens += 7) {
      ExpectForward(*router, hidden_states, expected, begin, tokens);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, RouterBitsTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)));

class RouterTest : public ::testing::Test {
 protected:
  // The refusal of a call that fails, as "CODE: message".
  static std::string Refusal(const Router& router, const ForwardCall& call) {
    const auto result = router.Forward(call);
    return result.ok() ? "accepted" : result.status().ToString();
  }
  ForwardCall Call(const Tensor& hidden_states) {
    ForwardCall call;
    call.layer = kLayer;
    call.hidden_states = hidden_states;
    return call;
  }

  const std::shared_ptr<const Checkpoint> checkpoint_ = MakeModel(DType::kBF16);
  const Tensor tokens_ = Tokens(DType::kF32, 257);
  const Expected expected_ = Restate(*checkpoint_, kLayer, tokens_);
};

TEST_F(RouterTest, RepliesMayComeInAnyOrderOnAnyThread) {
  Pool pool(3);
  RouterOptions options;
  options.subround_bytes = 3000;  // 12 tokens
  options.max_subrounds_in_flight = 4;
  const auto router = MakeCluster(checkpoint_, 5, pool.handler(), options);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int time = 0; time < 5; ++time) {
        ExpectForward(*router, tokens_, expected_, 10 * c, 257 - 10 * c);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(RouterTest, KeepsNoMoreSubRoundsUnderWayThanAllowed) {
  Pool pool(1);
  for (const int allowed : {1, 3}) {
    pool.Open(false);
    RouterOptions options;
    options.subround_bytes = 1;  // one token
    options.max_subrounds_in_flight = allowed;
    const auto router = MakeCluster(checkpoint_, 1, pool.handler(), options);
    std::thread caller([&] { ExpectForward(*router, tokens_, expected_, 0, 20); });
    const absl::Time give_up = absl::Now() + absl::Seconds(10);
    while (static_cast<int>(pool.waiting()) < allowed && absl::Now() < give_up) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_EQ(static_cast<int>(pool.waiting()), allowed);
    pool.Open(true);
    caller.join();
  }
}

TEST_F(RouterTest, SlicesAreWhatTheWireContractSays) {
  std::vector<ExpertSlice> slices;
  RouterOptions options;
  options.subround_bytes = 10 * kTopK * kHidden * 4 + 1;  // 10 tokens
  const auto router = MakeCluster(
      checkpoint_, 2,
      [&slices](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        slices.push_back(slice);
        kAtOnce(index, store, std::move(slice), std::move(done));
      },
      options);
  const Tensor tokens = Tokens(DType::kBF16, 35);
  ForwardCall call = Call(tokens);
  call.deadline = absl::Now() + absl::Seconds(60);
  ASSERT_TRUE(router->Forward(call).ok());
  EXPECT_GE(slices.size(), 4u);  // of 10, 10, 10 and 5 tokens
  EXPECT_LE(slices.size(), 8u);
  for (const ExpertSlice& slice : slices) {
    EXPECT_EQ(slice.layer, kLayer);
    EXPECT_EQ(slice.placement_epoch, router->membership()->epoch());
    EXPECT_EQ(slice.deadline, call.deadline);
    EXPECT_EQ(slice.rows.dtype(), DType::kBF16);
    EXPECT_LE(slice.rows.dim(0), 10);
    EXPECT_EQ(slice.expert_ids.size(), slice.m_sizes.size());
    for (const int32_t row : slice.gather) EXPECT_GE(row, 0);  // no padding
  }
}

TEST_F(RouterTest, NoTokensNeedNoServers) {
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  const auto router = MakeRouter(checkpoint_, options);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor none(dtype, {0, kHidden});
    const auto result = router->Forward(Call(none));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->output.dtype(), dtype);
    EXPECT_THAT(result->output.shape(), ElementsAre(0, kHidden));
    EXPECT_THAT(result->routing.topk_ids.shape(), ElementsAre(0, kTopK));
    EXPECT_THAT(result->routing.topk_weights.shape(), ElementsAre(0, kTopK));
    EXPECT_THAT(result->routing.logits.shape(), ElementsAre(0, kExperts));
  }
}

TEST_F(RouterTest, RefusesWhatDoesNotFitTheLayer) {
  const auto router = MakeCluster(checkpoint_, 1, kAtOnce);
  ForwardCall call = Call(tokens_);
  for (const int32_t layer : {-1, 2}) {
    call.layer = layer;
    EXPECT_EQ(
        Refusal(*router, call),
        absl::StrCat("INVALID_ARGUMENT: layer: expected one of the MoE layers 0-1, got ", layer));
  }
  for (const DType dtype : {DType::kI32, DType::kI64, DType::kF8_E4M3}) {
    const Tensor tokens(dtype, {2, kHidden});
    EXPECT_EQ(Refusal(*router, Call(tokens)),
              absl::StrCat("INVALID_ARGUMENT: hidden_states.dtype: expected F32, BF16 or F16, got ",
                           NameOf(dtype)));
  }
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, kHidden + 1}, {2, 0}, {kHidden}, {1, 2, kHidden}, {}}) {
    const Tensor tokens(DType::kF32, shape);
    EXPECT_EQ(Refusal(*router, Call(tokens)),
              absl::StrCat("INVALID_ARGUMENT: hidden_states.shape: expected [T, 20], got ",
                           ShapeToString(shape)));
  }
}

TEST_F(RouterTest, NamesTheRowThatIsNotFinite) {
  const auto router = MakeCluster(
      checkpoint_, 1, [](size_t, const Store&, ExpertSlice, ExpertBackend::Done) { FAIL(); });
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Tensor bad = Tokens(dtype, 30);
      StoreFloat(dtype, bad.data(), 17 * kHidden + 4, value);
      StoreFloat(dtype, bad.data(), 21 * kHidden, value);
      EXPECT_EQ(Refusal(*router, Call(bad)),
                "INVALID_ARGUMENT: hidden_states: row 17 is not finite at column 4");
    }
  }
}

TEST_F(RouterTest, RefusesOptionsThatCannotWork) {
  RouterOptions options;
  options.max_subrounds_in_flight = 0;
  EXPECT_EQ(Router::Create(checkpoint_, kNumerics, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Only the experts that the tokens need have to be there.
TEST_F(RouterTest, NamesTheExpertsThatNobodyHolds) {
  RouterOptions options;
  options.startup_grace = absl::ZeroDuration();
  const auto router = MakeRouter(checkpoint_, options);
  const std::set<int32_t> needed(expected_.ids.begin(), expected_.ids.begin() + kTopK);
  std::vector<int32_t> ids(needed.begin(), needed.end());
  EXPECT_THAT(Forward(*router, tokens_, 0, 1).status().ToString(),
              HasSubstr("UNAVAILABLE: layer 1: no live server holds experts " + IdRanges(ids)));
  const int32_t last = ids.back();
  ids.pop_back();
  AddServer(*router, 0, {{kLayer, ids}}, kAtOnce);
  EXPECT_THAT(Forward(*router, tokens_, 0, 1).status().ToString(),
              HasSubstr(absl::StrCat("layer 1: no live server holds expert ", last)));
  AddServer(*router, 1, {{kLayer, {last}}}, kAtOnce);
  ExpectForward(*router, tokens_, expected_, 0, 1);
}

TEST_F(RouterTest, WaitsForServersAtTheStart) {
  const auto router = MakeRouter(checkpoint_);
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(50));
    for (int s = 0; s < 2; ++s) {
      AddServer(*router, s, *ExpertStore::ShardOf(checkpoint_->model(), s, 2), kAtOnce);
    }
  });
  ExpectForward(*router, tokens_, expected_, 0, 257);
  late.join();
}

TEST_F(RouterTest, TheDeadlinePasses) {
  Pool pool(1);
  pool.Open(false);
  const auto router = MakeCluster(checkpoint_, 2, pool.handler());
  ForwardCall call = Call(tokens_);
  const absl::Time start = absl::Now();
  call.deadline = start + absl::Milliseconds(50);
  EXPECT_THAT(Refusal(*router, call), HasSubstr("DEADLINE_EXCEEDED: "));
  EXPECT_GE(absl::Now(), call.deadline);
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  // The replies come after the call has returned: nothing happens.
  EXPECT_GT(pool.waiting(), 0u);
  pool.Open(true);
  ExpectForward(*router, tokens_, expected_, 0, 257);
}

TEST_F(RouterTest, TheCallerGivesUp) {
  Pool pool(1);
  pool.Open(false);
  const auto router = MakeCluster(checkpoint_, 2, pool.handler());
  std::atomic<bool> cancelled = false;
  ForwardCall call = Call(tokens_);
  call.cancelled = [&cancelled] { return cancelled.load(); };
  std::thread caller([&] {
    absl::SleepFor(absl::Milliseconds(50));
    cancelled = true;
  });
  EXPECT_THAT(Refusal(*router, call), HasSubstr("CANCELLED: "));
  EXPECT_TRUE(cancelled);
  caller.join();
}

// Answers with a status on server 1 of 3, and never on server 2: the first failure ends the call.
class FailingServerTest : public RouterTest {
 protected:
  std::string RefusalOfServer1(const absl::Status& status) {
    std::vector<ExpertBackend::Done> unanswered;
    const auto router = MakeCluster(
        checkpoint_, 3,
        [&](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
          if (index == 0) return kAtOnce(index, store, std::move(slice), std::move(done));
          if (index == 1) return std::move(done)(status);
          unanswered.push_back(std::move(done));
        });
    const std::string refusal = Refusal(*router, Call(tokens_));
    EXPECT_FALSE(unanswered.empty());
    for (ExpertBackend::Done& done : unanswered) std::move(done)(absl::UnavailableError("late"));
    return refusal;
  }
};

TEST_F(FailingServerTest, LosingOneNamesLayerAndExperts) {
  EXPECT_EQ(RefusalOfServer1(absl::UnavailableError("its stream broke")),
            "UNAVAILABLE: layer 1: lost the server of experts 4-7: its stream broke");
}

TEST_F(FailingServerTest, OtherFailuresKeepTheirCode) {
  EXPECT_EQ(RefusalOfServer1(absl::ResourceExhaustedError("the queue is full")),
            "RESOURCE_EXHAUSTED: the queue is full");
  EXPECT_EQ(RefusalOfServer1(absl::NotFoundError("expert_ids: not here")),
            "NOT_FOUND: expert_ids: not here");
}

TEST_F(FailingServerTest, NamesASingleExpert) {
  const auto router = MakeCluster(
      checkpoint_, kExperts,
      [](size_t index, const Store& store, ExpertSlice slice, ExpertBackend::Done done) {
        if (index == 5) return std::move(done)(absl::UnavailableError("gone"));
        kAtOnce(index, store, std::move(slice), std::move(done));
      });
  EXPECT_EQ(Refusal(*router, Call(tokens_)),
            "UNAVAILABLE: layer 1: lost the server of expert 5: gone");
}

// What a server of another mind returns is refused before it is read.
TEST_F(RouterTest, RefusesRepliesThatDoNotFit) {
  const int64_t pairs = tokens_.dim(0) * kTopK;
  const auto refusal = [&](const Tensor& hidden_states, const Tensor& reply) {
    const auto router = MakeCluster(
        checkpoint_, 1, [&](size_t, const Store&, ExpertSlice, ExpertBackend::Done done) {
          std::move(done)(reply);
        });
    return Refusal(*router, Call(hidden_states));
  };
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{pairs - 1, kHidden}, {pairs, kHidden - 1}, {kHidden, pairs}, {0}}) {
    EXPECT_EQ(refusal(tokens_, Tensor(DType::kF32, shape)),
              absl::StrCat("INTERNAL: expected reply rows F32 ", ShapeToString({pairs, kHidden}),
                           ", got F32 ", ShapeToString(shape)));
  }
  for (const auto& [request, wrong] :
       std::vector<std::pair<DType, DType>>{{DType::kF32, DType::kBF16},
                                            {DType::kF32, DType::kF16},
                                            {DType::kF16, DType::kF16},
                                            {DType::kBF16, DType::kF32},
                                            {DType::kF32, DType::kI32}}) {
    EXPECT_THAT(refusal(Tokens(request, 257), Tensor(wrong, {pairs, kHidden})),
                AllOf(HasSubstr("INTERNAL: expected reply rows "),
                      HasSubstr(absl::StrCat("got ", NameOf(wrong)))));
  }
}

}  // namespace
}  // namespace expertmesh
