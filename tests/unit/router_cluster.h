// A small model, its forward restated from the bit contract, and routers whose servers are calls
// into the engine: what the tests of the router share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/numerics/math.h"
#include "common/safetensors/safetensors.h"
#include "expert_server/engine/expert_store.h"
#include "nlohmann/json.hpp"
#include "router/dispatch/router.h"
#include "tests/random_tensor.h"

namespace expertmesh {

constexpr int64_t kHidden = 20;       // D
constexpr int64_t kIntermediate = 6;  // F
constexpr int32_t kExperts = 12;      // E
constexpr int32_t kTopK = 3;          // K
constexpr int32_t kLayers = 2;
constexpr int32_t kLayer = 1;  // the one that is called
constexpr char kNumerics[] = "numerics-1";

// Writes a model folder with random weights, opens it, and removes it again.
inline std::shared_ptr<const Checkpoint> MakeModel(DType weights) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / absl::StrCat("router_model.", getpid());
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
inline float Chain(const std::vector<float>& x, const Tensor& weights, int64_t n) {
  const int64_t columns = weights.dim(1);  // even here
  const int64_t swap = weights.dtype() == DType::kF32 ? 0 : 1;
  volatile float sum = 0.0f;
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t k = i ^ swap;
    sum = fmaf(x[k], LoadFloat(weights.dtype(), weights.data(), n * columns + k), sum);
  }
  return sum;
}

inline float RoundTo(DType dtype, float value) {
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

inline Expected Restate(const Checkpoint& checkpoint, int32_t layer, const Tensor& hidden_states) {
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
inline void ExpectResult(const ForwardResult& result, const Expected& expected, DType dtype,
                         int64_t begin, int64_t tokens) {
  ASSERT_EQ(result.output.dtype(), dtype);
  ASSERT_THAT(result.output.shape(), ::testing::ElementsAre(tokens, kHidden));
  ASSERT_THAT(result.routing.topk_ids.shape(), ::testing::ElementsAre(tokens, kTopK));
  ASSERT_THAT(result.routing.topk_weights.shape(), ::testing::ElementsAre(tokens, kTopK));
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

  // What happens when nobody waits for the id-th slice of the server any more.
  using OnCancel = std::function<void(size_t index, uint64_t id)>;

  FakeServer(size_t index, Store store, Handler handler, OnCancel on_cancel)
      : index_(index),
        store_(std::move(store)),
        handler_(std::move(handler)),
        on_cancel_(std::move(on_cancel)) {}
  uint64_t Dispatch(ExpertSlice slice, Done done) override {
    handler_(index_, store_, std::move(slice), std::move(done));
    return ++dispatched_;
  }
  void Cancel(uint64_t id) override { on_cancel_(index_, id); }

 private:
  const size_t index_;
  const Store store_;
  const Handler handler_;
  const OnCancel on_cancel_;
  std::atomic<uint64_t> dispatched_ = 0;
};

inline absl::StatusOr<Tensor> Compute(const ExpertStore& store, const ExpertSlice& slice) {
  return store.Forward(slice.layer, slice.expert_ids, slice.m_sizes, slice.gather, slice.rows);
}

// Answers before Dispatch returns.
inline const FakeServer::Handler kAtOnce = [](size_t, const Store& store, ExpertSlice slice,
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

inline std::unique_ptr<Router> MakeRouter(const std::shared_ptr<const Checkpoint>& checkpoint,
                                          const RouterOptions& options = {}) {
  auto router = Router::Create(checkpoint, kNumerics, options);
  EXPECT_TRUE(router.ok()) << router.status();
  return router.ok() ? *std::move(router) : nullptr;
}

// Adds a server; returns its ticket.
inline uint64_t AddServer(
    Router& router, size_t index, const ExpertStore::Held& held, const FakeServer::Handler& handler,
    const FakeServer::OnCancel& on_cancel = [](size_t, uint64_t) {}) {
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
  router.membership()->SetServing(
      *ticket, std::make_shared<FakeServer>(index, *std::move(store), handler, on_cancel));
  return *ticket;
}

inline std::unique_ptr<Router> MakeCluster(
    const std::shared_ptr<const Checkpoint>& checkpoint, int num_servers,
    const FakeServer::Handler& handler, const RouterOptions& options = {},
    const FakeServer::OnCancel& on_cancel = [](size_t, uint64_t) {}) {
  auto router = MakeRouter(checkpoint, options);
  for (int s = 0; s < num_servers; ++s) {
    AddServer(*router, s, *ExpertStore::ShardOf(checkpoint->model(), s, num_servers), handler,
              on_cancel);
  }
  return router;
}

// Blocks until the call is answered.
inline absl::StatusOr<ForwardResult> Forward(Router& router, const ForwardCall& call) {
  absl::StatusOr<ForwardResult> result = absl::InternalError("not answered");
  absl::Mutex mutex;
  bool answered = false;
  router.Forward(call, [&](absl::StatusOr<ForwardResult> answer) {
    absl::MutexLock lock(&mutex);
    result = std::move(answer);
    answered = true;
  });
  absl::MutexLock lock(&mutex, absl::Condition(&answered));
  return result;
}

inline Tensor Slice(const Tensor& rows, int64_t begin, int64_t count) {
  Tensor part(rows.dtype(), {count, rows.dim(1)});
  const int64_t row_bytes = rows.dim(1) * BytesOf(rows.dtype());
  std::memcpy(part.data(), rows.data() + begin * row_bytes, part.num_bytes());
  return part;
}

inline ForwardCall Call(const Tensor& hidden_states) {
  ForwardCall call;
  call.layer = kLayer;
  call.hidden_states = hidden_states;
  return call;
}

// One forward of tokens [begin, begin + tokens).
inline absl::StatusOr<ForwardResult> Forward(Router& router, const Tensor& hidden_states,
                                             int64_t begin, int64_t tokens) {
  return Forward(router, Call(Slice(hidden_states, begin, tokens)));
}

inline void ExpectForward(Router& router, const Tensor& hidden_states, const Expected& expected,
                          int64_t begin, int64_t tokens) {
  const auto result = Forward(router, hidden_states, begin, tokens);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectResult(*result, expected, hidden_states.dtype(), begin, tokens);
}

inline Tensor Tokens(DType dtype, int64_t tokens) {
  std::mt19937 rng(9);
  return RandomTensor(dtype, {tokens, kHidden}, 1.0f, rng);
}

}  // namespace expertmesh
