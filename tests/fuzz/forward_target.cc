#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "common/rpc/status.h"
#include "expertmesh/v1/moe.pb.h"
#include "router/service/forward_message.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/cluster.h"
#include "tests/fuzz/decode.h"
#include "tests/fuzz/models.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

constexpr int kExperts = 6, kHiddenSize = 5;

// Layers whose gates have nothing in common.
std::shared_ptr<const Checkpoint> MakeModel() {
  std::vector<LayerDescription> layers(10);
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].layer = static_cast<int32_t>(i);
    layers[i].router.num_experts = kExperts;
    layers[i].router.top_k = 3;
    layers[i].experts.hidden_size = kHiddenSize;
    layers[i].experts.intermediate_size = 3;
  }
  RouterDescriptor& grouped = layers[0].router;
  grouped.score = ScoreFunction::kSigmoid;
  grouped.group_score = GroupScore::kTop2Sum;
  grouped.num_groups = 3;
  grouped.topk_groups = 2;
  grouped.has_selection_bias = true;
  grouped.norm = WeightNorm::kSum;
  layers[1].router.norm = WeightNorm::kSum;
  layers[1].experts.weight_dtype = DType::kF32;
  RouterDescriptor& late = layers[2].router;
  late.order = ScoreOrder::kTopKThenScore;
  late.has_logits_bias = true;
  late.has_per_expert_scale = true;
  layers[2].experts.weight_dtype = DType::kF16;
  RouterDescriptor& capped = layers[3].router;
  capped.score = ScoreFunction::kSqrtSoftplus;
  capped.softcap = 2.0f;
  capped.norm = WeightNorm::kSumClamped;
  capped.norm_epsilon = 1e-3f;
  capped.routed_scale = 1.5f;
  RouterDescriptor& masked = layers[4].router;
  masked.score = ScoreFunction::kSigmoid;
  masked.group_score = GroupScore::kMax;
  masked.num_groups = 2;
  masked.topk_groups = 1;
  masked.mask_fill = MaskFill::kZero;
  masked.norm = WeightNorm::kPNorm;
  masked.norm_p = 2.0f;
  // Shared experts, gated and averaged, beside routed ones of fp8.
  layers[5].experts.weight_format = WeightFormat::kFp8Block128;
  layers[5].experts.weight_dtype = DType::kF8_E4M3;
  layers[5].shared = {2, layers[0].experts, /*gated_by_sigmoid=*/true, /*averaged=*/true};
  // Weighed inputs, and experts that return them.
  layers[6].router.weigh_input = true;
  layers[6].router.identity_experts = 2;
  layers[6].experts.weight_format = WeightFormat::kFp8Row;
  layers[6].experts.weight_dtype = DType::kF8_E4M3;
  layers[6].shared = {1, layers[1].experts};
  // Norms before the gate and before the experts.
  layers[7].router.input_norm = {true, 1e-6f, 0.5f};
  layers[7].expert_input_norm = {true, 1e-6f};
  layers[7].experts.activation = Activation::kClampedSwishGlu;
  layers[7].experts.activation_alpha = 1.702f;
  layers[7].experts.activation_limit = 1.0f;
  layers[7].experts.has_bias = true;
  // A dense layer, and one whose gate is two softmaxes.
  layers[8].kind = LayerKind::kDense;
  layers[8].router = {};
  layers[8].shared = {1, layers[2].experts};
  layers[9].router.score = ScoreFunction::kSparsemixer;
  layers[9].router.top_k = 2;
  layers[9].router.jitter = 0.1f;
  layers[9].experts.activation = Activation::kRelu2;
  layers[9].experts.gated = false;
  return MakeCheckpoint(std::move(layers));
}

const std::shared_ptr<const Checkpoint>& Model() {
  static const auto* model = new std::shared_ptr<const Checkpoint>(MakeModel());
  return *model;
}

// One server of plain loops, or two of the grouped engine that get rounds of two tokens.
std::unique_ptr<Cluster> Serve(bool one) {
  auto cluster = Cluster::Serve(
      Model(), one ? Cluster::Options{}
                   : Cluster::Options{EngineKind::kGrouped, /*servers=*/2, /*max_tokens=*/2});
  FUZZ_CHECK(cluster.ok());
  return *std::move(cluster);
}

void CheckRouting(const RouterDescriptor& router, const Routing& routing, int64_t tokens) {
  const int64_t num_ids = router.num_experts + router.identity_experts;
  FUZZ_CHECK(routing.topk_ids.shape() == (std::vector<int64_t>{tokens, router.top_k}));
  FUZZ_CHECK(routing.topk_weights.shape() == (std::vector<int64_t>{tokens, router.top_k}));
  FUZZ_CHECK(routing.logits.shape() == (std::vector<int64_t>{tokens, num_ids}));
  for (int64_t token = 0; token < tokens; ++token) {
    std::set<int32_t> ids;
    for (int64_t i = token * router.top_k; i < (token + 1) * router.top_k; ++i) {
      const int32_t id = routing.topk_ids.as<int32_t>()[i];
      FUZZ_CHECK(id >= 0 && id < num_ids && ids.insert(id).second);
      FUZZ_CHECK(std::isfinite(routing.topk_weights.as<float>()[i]));
    }
  }
}

// What the caller reads is what the router has computed.
void CheckMessage(const ForwardResult& result, bool with_logits) {
  const grpc::ByteBuffer bytes = EncodeForward(result, with_logits);
  v1::ForwardResponse response;
  Tensor output;
  FUZZ_CHECK(DecodeWithTensor(bytes, "output", &response, &output).ok());
  FUZZ_CHECK(SameTensor(output, result.output));
  FUZZ_CHECK(SameTensor(*FromProto(response.topk_ids(), "topk_ids"), result.routing.topk_ids));
  FUZZ_CHECK(
      SameTensor(*FromProto(response.topk_weights(), "topk_weights"), result.routing.topk_weights));
  FUZZ_CHECK(response.has_router_logits() == with_logits);
}

// The last token alone gets the same as in its batch.
void CheckAlone(const Cluster& cluster, const ForwardCall& call, const ForwardResult& result) {
  const int64_t last = call.hidden_states.dim(0) - 1;
  const int64_t top_k = result.routing.topk_ids.dim(1);
  const size_t row_bytes = call.hidden_states.num_bytes() / static_cast<size_t>(last + 1);
  ForwardCall alone = call;
  alone.hidden_states = Tensor(call.hidden_states.dtype(), {1, kHiddenSize});
  std::memcpy(alone.hidden_states.data(), call.hidden_states.data() + last * row_bytes, row_bytes);
  const auto same = cluster.Forward(alone);
  FUZZ_CHECK(same.ok());
  const auto same_row = [&](const Tensor& one, const Tensor& all) {
    const size_t bytes = static_cast<size_t>(top_k) * sizeof(float);
    return top_k == 0 ||
           std::memcmp(one.data(), all.data() + static_cast<size_t>(last) * bytes, bytes) == 0;
  };
  FUZZ_CHECK(same_row(same->routing.topk_ids, result.routing.topk_ids));
  FUZZ_CHECK(same_row(same->routing.topk_weights, result.routing.topk_weights));
  Tensor output(result.output.dtype(), {1, kHiddenSize});
  std::memcpy(output.data(), result.output.data() + last * row_bytes, row_bytes);
  FUZZ_CHECK(SameNumbers(same->output, output));
}

}  // namespace

void Forward(Bytes message) {
  static const Cluster* const plain = Serve(true).release();
  static const Cluster* const other = Serve(false).release();
  v1::ForwardRequest request;
  Tensor hidden_states;
  if (!CheckedDecode(message, "hidden_states", &request, &hidden_states).ok()) return;
  v1::ForwardRequest decoded;
  auto call = DecodeForward(plain->router(), BufferOf(message, message.size() + 1), &decoded);
  if (!call.ok()) {
    FUZZ_CHECK(absl::IsUnimplemented(call.status()) || absl::IsFailedPrecondition(call.status()));
    return;
  }
  FUZZ_CHECK(decoded.SerializeAsString() == request.SerializeAsString());
  const auto result = plain->Forward(*call);
  FUZZ_CHECK(SameAnswer(result, other->Forward(*call)));
  if (!result.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(result.status()));
    FUZZ_CHECK(FromGrpcStatus(ToGrpcStatus(result.status())).code() == result.status().code());
    return;
  }
  const int64_t tokens = call->hidden_states.dim(0);
  CheckRouting(Model()->model().Find(call->layer)->router, result->routing, tokens);
  FUZZ_CHECK(result->output.dtype() == call->hidden_states.dtype());
  FUZZ_CHECK(result->output.shape() == call->hidden_states.shape());
  CheckMessage(*result, request.return_router_logits());
  if (tokens > 0) CheckAlone(*plain, *call, *result);
}

}  // namespace expertmesh::fuzz
