#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/model/checkpoint.h"
#include "common/rpc/status.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"
#include "expert_server/engine/engine.h"
#include "expert_server/engine/expert_store.h"
#include "expert_server/service/slice.h"
#include "router/service/grpc_expert_backend.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/cluster.h"
#include "tests/fuzz/decode.h"
#include "tests/fuzz/models.h"
#include "tests/fuzz/targets.h"
#include "tests/random_tensor.h"

namespace expertmesh::fuzz {
namespace {

constexpr int64_t kMaxMessageBytes = 64 << 10;

// Layers of 4 experts: 0 (F32, D = 4), 2 (BF16, D = 9, no multiple of anything), 3 (fp8 of blocks,
// whose input is weighed, and two shared experts with biases that are not gated), 5 (MXFP4), and in
// low precision 6 (mxfp8, two blocks in a row) and 7 (fp8_block128).
const std::shared_ptr<const Checkpoint>& Model() {
  static const auto* checkpoint = [] {
    std::vector<LayerDescription> layers(6);
    const auto set = [&layers](size_t i, int32_t index, int64_t hidden, int64_t intermediate,
                               WeightFormat format, DType dtype) {
      layers[i].layer = index;
      layers[i].router.num_experts = 4;
      layers[i].router.top_k = 2;
      ExpertDescriptor& experts = layers[i].experts;
      experts.hidden_size = hidden;
      experts.intermediate_size = intermediate;
      experts.weight_format = format;
      experts.weight_dtype = dtype;
    };
    set(0, 0, 4, 2, WeightFormat::kPlain, DType::kF32);
    set(1, 2, 9, 3, WeightFormat::kPlain, DType::kBF16);
    set(2, 3, 6, 2, WeightFormat::kFp8Block128, DType::kF8_E4M3);
    set(3, 5, 2, 4, WeightFormat::kMxfp4, DType::kF4);
    set(4, 6, 33, 3, WeightFormat::kMxfp8, DType::kF8_E4M3);
    set(5, 7, 5, 2, WeightFormat::kFp8Block128, DType::kF8_E4M3);
    layers[4].experts.row_format = QuantizedFormat::kMxfp8;
    layers[5].experts.row_format = QuantizedFormat::kFp8Block128;
    layers[2].router.weigh_input = true;
    layers[2].shared.count = 2;
    ExpertDescriptor& shared = layers[2].shared.experts;
    shared.hidden_size = 6;
    shared.intermediate_size = 3;
    shared.activation = Activation::kRelu2;
    shared.gated = false;
    shared.has_bias = true;
    shared.weight_dtype = DType::kF16;
    return new std::shared_ptr<const Checkpoint>(MakeCheckpoint(std::move(layers)));
  }();
  return *checkpoint;
}

// Routed experts 0, 2 and 3 of all layers, and all shared ones.
std::unique_ptr<ExpertStore> MakeStore(EngineKind engine) {
  ExpertStore::Held held;
  for (const LayerDescription& layer : Model()->model().layers) {
    held[layer.layer] = {0, 2, 3};
    for (int32_t e = 4; e < layer.num_held(); ++e) held[layer.layer].push_back(e);
  }
  auto store =
      ExpertStore::Load(*Model(), held, MakeEngine({.kind = engine}), [](const LoadProgress&) {});
  FUZZ_CHECK(store.ok());
  return *std::move(store);
}

struct Stores {
  std::unique_ptr<ExpertStore> plain = MakeStore(EngineKind::kForLoop);  // the reference
  std::unique_ptr<ExpertStore> grouped = MakeStore(EngineKind::kGrouped);
};

bool Never() { return false; }

// Routers let no other rows and send no other weights, and no bits are promised for them.
bool AllFinite(const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    if (tensor.dtype() == DType::kF8_E4M3) {
      if (IsNaNE4M3(tensor.as<uint8_t>()[i])) return false;
    } else if (tensor.dtype() == DType::kF8_E8M0) {
      if (tensor.as<uint8_t>()[i] >= kMaxMxfp8Scale) return false;
    } else if (!std::isfinite(LoadFloat(tensor.dtype(), tensor.data(), i))) {
      return false;
    }
  }
  return true;
}

// The scales of the rows.
Tensor ScalesOf(const Slice& slice) {
  if (!slice.header.has_row_scales()) return Tensor();
  const auto scales = FromProto(slice.header.row_scales(), "row_scales");
  FUZZ_CHECK(scales.ok());
  return *scales;
}

bool AllFinite(const Slice& slice) {
  if (!AllFinite(slice.rows) || !AllFinite(ScalesOf(slice))) return false;
  const auto& weights = slice.header.input_weights();
  return std::all_of(weights.begin(), weights.end(), [](float w) { return std::isfinite(w); });
}

// What the row of one position gives alone, in a slice of its own.
void CheckAlone(const ExpertStore& store, const Slice& slice, int32_t expert, int position,
                const std::byte* expected) {
  const int32_t row = slice.header.gather(position);
  const int64_t width = slice.rows.dim(1);
  const int64_t row_bytes = width * BytesOf(slice.rows.dtype());
  Slice alone;
  alone.header.set_layer(slice.header.layer());
  alone.header.set_phase(v1::PHASE_FORWARD);
  alone.header.add_expert_ids(expert);
  alone.header.add_m_sizes(1);
  alone.header.add_gather(0);
  if (slice.header.input_weights_size() > 0) {
    alone.header.add_input_weights(slice.header.input_weights(position));
  }
  if (slice.header.has_row_scales()) {
    alone.header.set_row_format(slice.header.row_format());
    alone.header.set_activation_dtype(slice.header.activation_dtype());
    const Tensor scales = ScalesOf(slice);
    const int64_t bytes = scales.dim(1) * BytesOf(scales.dtype());
    Tensor of_row(scales.dtype(), {1, scales.dim(1)});
    std::memcpy(of_row.data(), scales.data() + row * bytes, static_cast<size_t>(bytes));
    ToProto(of_row, alone.header.mutable_row_scales());
  }
  alone.rows = Tensor(slice.rows.dtype(), {1, width});
  std::memcpy(alone.rows.data(), slice.rows.data() + row * row_bytes,
              static_cast<size_t>(row_bytes));
  const auto answer = ComputeSlice(store, alone, kMaxMessageBytes, Never);
  FUZZ_CHECK(answer.ok());
  FUZZ_CHECK(std::memcmp(answer->data(), expected, answer->num_bytes()) == 0);
}

// A slice: what comes back has the promised form, and the same bits from both engines and for a row
// alone.
absl::Status Compute(const Stores& stores, Bytes message) {
  Slice slice;
  RETURN_IF_ERROR(CheckedDecode(message, "rows", &slice.header, &slice.rows));
  const auto grouped = ComputeSlice(*stores.grouped, slice, kMaxMessageBytes, Never);
  const auto plain = ComputeSlice(*stores.plain, slice, kMaxMessageBytes, Never);
  FUZZ_CHECK(grouped.status() == plain.status());
  if (!plain.ok()) return plain.status();
  const Tensor& answer = *plain;

  const auto& gather = slice.header.gather();
  const auto pairs = std::count_if(gather.begin(), gather.end(), [](int32_t r) { return r >= 0; });
  FUZZ_CHECK(answer.dtype() == ReplyDTypeOf(slice));
  FUZZ_CHECK(answer.shape() == (std::vector<int64_t>{pairs, slice.rows.dim(1)}));
  if (!AllFinite(slice)) return absl::OkStatus();
  FUZZ_CHECK(SameTensor(answer, *grouped));
  // Alone: looked at for the last row.
  const int64_t row_bytes = slice.rows.dim(1) * BytesOf(answer.dtype());
  int position = gather.size();
  for (int group = slice.header.expert_ids_size() - 1; group >= 0; --group) {
    for (int64_t i = 0; i < slice.header.m_sizes(group); ++i) {
      if (gather[--position] < 0) continue;
      CheckAlone(*stores.plain, slice, slice.header.expert_ids(group), position,
                 answer.data() + (pairs - 1) * row_bytes);
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

// A router of which one server answers what it is told to, and the other one as it should.
class Caller {
 public:
  Caller() {
    auto cluster = Cluster::Serve(Model(), {.servers = 2},
                                  [this](int server, absl::StatusOr<Tensor> computed) {
                                    if (server == 1 || !reply_) return computed;
                                    return *reply_;
                                  });
    FUZZ_CHECK(cluster.ok());
    cluster_ = *std::move(cluster);
    std::mt19937 rng(7);
    call_.hidden_states = RandomTensor(DType::kF32, {2, 4}, 1.0f, rng);
    auto right = cluster_->Forward(call_);
    FUZZ_CHECK(right.ok());
    right_ = *std::move(right);
    const auto* ids = right_.routing.topk_ids.as<int32_t>();
    const auto held = [](int32_t expert) { return expert < 2; };
    FUZZ_CHECK(std::count_if(ids, ids + 4, held) == kRows);
  }

  // The reply to what the first server got of a call.
  void Reply(const absl::StatusOr<Tensor>& reply) {
    reply_ = reply;
    const auto result = cluster_->Forward(call_);
    const bool fits = reply.ok() && reply->dtype() == DType::kF32 &&
                      reply->shape() == std::vector<int64_t>{kRows, 4};
    FUZZ_CHECK(result.ok() == fits);
    if (fits) FUZZ_CHECK(result->output.shape() == call_.hidden_states.shape());
    // The caller gets the status over gRPC.
    const absl::Status sent = result.status();
    const absl::Status received = FromGrpcStatus(ToGrpcStatus(sent));
    FUZZ_CHECK(received.code() == sent.code());
    FUZZ_CHECK(RetryAfter(received) == RetryAfter(sent));
    // The next call is not disturbed.
    reply_.reset();
    FUZZ_CHECK(SameAnswer(cluster_->Forward(call_), right_));
  }

 private:
  static constexpr int64_t kRows = 2;  // that the first server gets of the call

  std::unique_ptr<Cluster> cluster_;
  ForwardCall call_;
  ForwardResult right_;
  std::optional<absl::StatusOr<Tensor>> reply_;
};

}  // namespace

void Dispatch(Bytes message) {
  static const Stores stores;
  static Caller caller;
  if (Compute(stores, message).ok()) return;
  v1::DispatchResponse answer;
  Tensor rows;
  const absl::Status decoded = CheckedDecode(message, "rows", &answer, &rows);
  caller.Reply(ReplyRows(decoded, answer, rows));
}

}  // namespace expertmesh::fuzz
