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
#include "tests/restated_experts.h"

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

// A checkpoint with random weights for whatever descriptions say, in memory.
class MadeUpCheckpoint final : public Checkpoint {
 public:
  explicit MadeUpCheckpoint(std::vector<LayerDescription> layers) {
    model_.model_type = "made-up";
    model_.num_hidden_layers = layers.back().layer + 1;
    model_.layers = std::move(layers);
  }
  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return model_.model_type; }
  int64_t ExpertBytes(int32_t layer) const override {
    return BytesOfExpert(model_.Find(layer)->experts);
  }
  const std::vector<std::string>& skipped_tensors() const override { return skipped_; }
  const std::string& layout() const override { return model_.model_type; }
  absl::StatusOr<RouterWeights> ReadRouter(int32_t index) const override {
    const LayerDescription& layer = *model_.Find(index);
    const int32_t num_ids = layer.router.num_experts + layer.router.identity_experts;
    const int64_t hidden_size = layer.experts.hidden_size;
    std::mt19937 rng(index);
    RouterWeights weights;
    if (num_ids > 0) {
      weights.weight = RandomTensor(DType::kBF16, {num_ids, hidden_size}, 0.5f, rng);
    }
    if (layer.shared.gated_by_sigmoid) {
      weights.shared_gate =
          RandomTensor(DType::kBF16, {layer.shared.count, hidden_size}, 0.5f, rng);
    }
    if (layer.router.input_norm.present) {
      weights.input_norm = RandomTensor(DType::kF32, {hidden_size}, 2.0f, rng);
    }
    if (layer.expert_input_norm.present) {
      weights.expert_input_norm = RandomTensor(DType::kF32, {hidden_size}, 2.0f, rng);
    }
    return weights;
  }
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t index, int32_t expert) const override {
    const LayerDescription& layer = *model_.Find(index);
    if (expert < 0 || expert >= layer.num_held()) {
      return absl::NotFoundError(absl::StrCat("no expert ", expert));
    }
    std::mt19937 rng(1000 * index + expert);
    return RandomExpert(expert < layer.router.num_experts ? layer.experts : layer.shared.experts,
                        0.5f, rng);
  }

 private:
  ModelDescription model_;
  std::vector<std::string> skipped_;
};

// The restatement.

inline float RoundTo(DType dtype, float value) {
  if (dtype == DType::kBF16) return FloatFromBF16(BF16FromFloat(value));
  if (dtype == DType::kF16) return FloatFromF16(F16FromFloat(value));
  return value;
}

inline std::vector<float> WeighedInput(DType dtype, float weight, const std::vector<float>& x) {
  std::vector<float> weighed(x.size());
  for (size_t d = 0; d < x.size(); ++d) {
    const volatile float product = weight * x[d];
    weighed[d] = RoundRow(dtype, product);
  }
  return weighed;
}

struct Expected {
  int64_t hidden_size = 0;
  int64_t top_k = 0;
  int64_t num_ids = 0;
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
  std::vector<float> logits;   // [T, N]
  std::vector<float> output;   // [T, D]
};

inline Expected Restate(const Checkpoint& checkpoint, int32_t layer_index,
                        const Tensor& hidden_states) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // FTZ and DAZ
  const LayerDescription& layer = *checkpoint.model().Find(layer_index);
  const RouterDescriptor& router = layer.router;
  const DType dtype = hidden_states.dtype();
  const int64_t hidden_size = layer.experts.hidden_size;
  const RouterWeights gate = *checkpoint.ReadRouter(layer_index);
  std::vector<ExpertWeights> experts;
  for (int32_t e = 0; e < layer.num_held(); ++e) {
    experts.push_back(*checkpoint.ReadExpert(layer_index, e));
  }
  Expected expected;
  expected.hidden_size = hidden_size;
  expected.top_k = router.top_k;
  expected.num_ids = router.num_experts + router.identity_experts;
  for (int64_t t = 0; t < hidden_states.dim(0); ++t) {
    std::vector<float> x(hidden_size), logits(expected.num_ids), weights(router.top_k);
    std::vector<int32_t> ids(router.top_k);
    for (int64_t d = 0; d < hidden_size; ++d) {
      x[d] = LoadFloat(dtype, hidden_states.data(), t * hidden_size + d);
    }
    for (int64_t e = 0; e < expected.num_ids; ++e) logits[e] = RestatedChain(x, gate.weight, e);
    if (router.num_experts > 0) {
      EXPECT_TRUE(
          SelectExperts(router, logits, {}, {}, absl::MakeSpan(ids), absl::MakeSpan(weights)).ok());
    }
    std::vector<float> sum(hidden_size, 0.0f);
    const auto add = [&sum](float weight, const std::vector<float>& row) {
      for (size_t d = 0; d < sum.size(); ++d) sum[d] = fmaf(weight, row[d], sum[d]);
    };
    const auto multiply = [&sum](float factor) {
      for (float& value : sum) {
        const volatile float product = value * factor;
        value = product;
      }
    };
    for (int32_t k = 0; k < router.top_k; ++k) {
      if (ids[k] >= router.num_experts) {
        add(weights[k], x);
      } else {
        const std::vector<float> weighed = WeighedInput(dtype, weights[k], x);
        add(router.weigh_input ? 1.0f : weights[k],
            RestatedExpert(layer.experts, experts[ids[k]], dtype,
                           router.weigh_input ? weighed : x));
      }
    }
    if (router.routed_scale != 1.0f) multiply(router.routed_scale);
    for (int32_t j = 0; j < layer.shared.count; ++j) {
      volatile float weight = 1.0f;
      if (layer.shared.gated_by_sigmoid) {
        weight = weight + Exp(-RestatedChain(x, gate.shared_gate, j));
        weight = 1.0f / weight;
      }
      add(weight, RestatedExpert(layer.shared.experts, experts[router.num_experts + j], dtype, x));
    }
    if (layer.shared.averaged) multiply(0.5f);
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
  ASSERT_THAT(result.output.shape(), ::testing::ElementsAre(tokens, expected.hidden_size));
  ASSERT_THAT(result.routing.topk_ids.shape(), ::testing::ElementsAre(tokens, expected.top_k));
  ASSERT_THAT(result.routing.topk_weights.shape(), ::testing::ElementsAre(tokens, expected.top_k));
  ASSERT_THAT(result.routing.logits.shape(), ::testing::ElementsAre(tokens, expected.num_ids));
  const auto same = [tokens, begin](const Tensor& got, const auto& values, int64_t width) {
    return std::memcmp(got.data(), values.data() + begin * width,
                       static_cast<size_t>(tokens * width) * 4) == 0;
  };
  EXPECT_TRUE(same(result.routing.topk_ids, expected.ids, expected.top_k));
  EXPECT_TRUE(same(result.routing.topk_weights, expected.weights, expected.top_k));
  EXPECT_TRUE(same(result.routing.logits, expected.logits, expected.num_ids));
  for (int64_t i = 0; i < tokens * expected.hidden_size; ++i) {
    const float got = LoadFloat(dtype, result.output.data(), i);
    const float value = expected.output[begin * expected.hidden_size + i];
    ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(value))
        << "token " << begin + i / expected.hidden_size << ", channel " << i % expected.hidden_size
        << ": expected " << value << ", got " << got;
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
  return store.Forward(slice.layer, slice.expert_ids, slice.m_sizes, slice.gather,
                       slice.input_weights, slice.rows);
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
    const FakeServer::OnCancel& on_cancel = [](size_t, uint64_t) {},
    const EngineOptions& engine = {}) {
  auto store =
      ExpertStore::Load(router.checkpoint(), held, MakeEngine(engine), [](const LoadProgress&) {});
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

inline Tensor Tokens(DType dtype, int64_t tokens, int64_t hidden_size = kHidden) {
  std::mt19937 rng(9);
  return RandomTensor(dtype, {tokens, hidden_size}, 1.0f, rng);
}

}  // namespace expertmesh
