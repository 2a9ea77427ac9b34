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

// Two layers of 4 experts: 0 (F32, D = 4) and 2 (BF16, D = 9, no multiple of anything).
const std::shared_ptr<const Checkpoint>& Model() {
  static const auto* checkpoint = [] {
    std::vector<LayerDescription> layers;
    for (const int32_t index : {0, 2}) {
      LayerDescription& layer = layers.emplace_back();
      layer.layer = index;
      layer.router.num_experts = 4;
      layer.router.top_k = 2;
      layer.experts.hidden_size = index == 0 ? 4 : 9;
      layer.experts.intermediate_size = index == 0 ? 2 : 3;
      layer.experts.weight_dtype = index == 0 ? DType::kF32 : DType::kBF16;
    }
    return new std::shared_ptr<const Checkpoint>(MakeCheckpoint(std::move(layers)));
  }();
  return *checkpoint;
}

// Experts 0, 2 and 3 of both layers.
std::unique_ptr<ExpertStore> MakeStore(EngineKind engine) {
  const std::vector<int32_t> experts = {0, 2, 3};
  auto store = ExpertStore::Load(*Model(), {{0, experts}, {2, experts}},
                                 MakeEngine({.kind = engine}), [](const LoadProgress&) {});
  FUZZ_CHECK(store.ok());
  return *std::move(store);
}

struct Stores {
  std::unique_ptr<ExpertStore> plain = MakeStore(EngineKind::kForLoop);  // the reference
  std::unique_ptr<ExpertStore> grouped = MakeStore(EngineKind::kGrouped);
};

bool Never() { return false; }

// Routers let no other rows through, and no bits are promised for them.
bool AllFinite(const Tensor& rows) {
  for (int64_t i = 0; i < rows.num_elements(); ++i) {
    if (!std::isfinite(LoadFloat(rows.dtype(), rows.data(), i))) return false;
  }
  return true;
}

// What one row gives alone, in a slice of its own.
void CheckAlone(const ExpertStore& store, const Slice& slice, int32_t expert, int32_t row,
                const std::byte* expected) {
  const int64_t width = slice.rows.dim(1);
  const int64_t row_bytes = width * BytesOf(slice.rows.dtype());
  Slice alone;
  alone.header.set_layer(slice.header.layer());
  alone.header.set_phase(v1::PHASE_FORWARD);
  alone.header.add_expert_ids(expert);
  alone.header.add_m_sizes(1);
  alone.header.add_gather(0);
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
  FUZZ_CHECK(answer.dtype() == ReplyDType(slice.rows.dtype()));
  FUZZ_CHECK(answer.shape() == (std::vector<int64_t>{pairs, slice.rows.dim(1)}));
  if (!AllFinite(slice.rows)) return absl::OkStatus();
  FUZZ_CHECK(SameTensor(answer, *grouped));
  // Alone: looked at for the last row.
  const int64_t row_bytes = slice.rows.dim(1) * BytesOf(answer.dtype());
  int position = gather.size();
  for (int group = slice.header.expert_ids_size() - 1; group >= 0; --group) {
    for (int64_t i = 0; i < slice.header.m_sizes(group); ++i) {
      if (gather[--position] < 0) continue;
      CheckAlone(*stores.plain, slice, slice.header.expert_ids(group), gather[position],
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
