#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "expertmesh/v1/moe.pb.h"
#include "router/gating/gate.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/decode.h"
#include "tests/fuzz/targets.h"
#include "tests/random_tensor.h"

namespace expertmesh::fuzz {
namespace {

constexpr int kExperts = 6, kTopK = 3, kHiddenSize = 5;

// A gate with groups and a bias for layer 0, a plain softmax for all others.
const Gate& GateOf(int32_t layer) {
  const auto make = [](bool groups) {
    RouterDescriptor router;
    router.num_experts = kExperts;
    router.top_k = kTopK;
    router.norm = WeightNorm::kSum;
    std::mt19937 rng(groups);
    RouterWeights weights;
    weights.weight =
        RandomTensor(groups ? DType::kBF16 : DType::kF32, {kExperts, kHiddenSize}, 1.0f, rng);
    if (groups) {
      router.score = ScoreFunction::kSigmoid;
      router.group_score = GroupScore::kTop2Sum;
      router.num_groups = 3;
      router.topk_groups = 2;
      router.has_selection_bias = true;
      weights.selection_bias = RandomTensor(DType::kF32, {kExperts}, 0.1f, rng);
    }
    auto gate = Gate::Create(router, std::move(weights));
    FUZZ_CHECK(gate.ok());
    return *std::move(gate);
  };
  static const Gate* grouped = new Gate(make(true));
  static const Gate* plain = new Gate(make(false));
  return layer == 0 ? *grouped : *plain;
}

}  // namespace

void Forward(Bytes message) {
  v1::ForwardRequest request;
  Tensor hidden_states;
  if (!CheckedDecode(message, "hidden_states", &request, &hidden_states).ok()) return;
  const Gate& gate = GateOf(request.layer());
  const auto routing = gate.Route(hidden_states, request.first_row());
  if (!routing.ok()) return;

  const int64_t tokens = hidden_states.dim(0);
  FUZZ_CHECK(routing->topk_ids.shape() == (std::vector<int64_t>{tokens, kTopK}));
  FUZZ_CHECK(routing->topk_weights.shape() == (std::vector<int64_t>{tokens, kTopK}));
  for (int64_t token = 0; token < tokens; ++token) {
    std::set<int32_t> ids;
    for (int64_t i = token * kTopK; i < (token + 1) * kTopK; ++i) {
      const int32_t id = routing->topk_ids.as<int32_t>()[i];
      FUZZ_CHECK(id >= 0 && id < kExperts && ids.insert(id).second);
      FUZZ_CHECK(std::isfinite(routing->topk_weights.as<float>()[i]));
    }
  }
  // A token's routing does not depend on the other tokens: looked at for the last one.
  if (tokens == 0) return;
  const std::vector<int64_t> one = {1, kHiddenSize};
  const TensorView last(
      hidden_states.dtype(), one,
      hidden_states.data() + (tokens - 1) * kHiddenSize * BytesOf(hidden_states.dtype()));
  const auto alone = gate.Route(last);
  FUZZ_CHECK(alone.ok());
  const int64_t first = (tokens - 1) * kTopK;
  FUZZ_CHECK(std::memcmp(alone->topk_ids.data(), routing->topk_ids.as<int32_t>() + first,
                         kTopK * sizeof(int32_t)) == 0);
  FUZZ_CHECK(std::memcmp(alone->topk_weights.data(), routing->topk_weights.as<float>() + first,
                         kTopK * sizeof(float)) == 0);
}

}  // namespace expertmesh::fuzz
