#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/model/checkpoint.h"
#include "common/status.h"
#include "expert_server/engine/engine.h"
#include "expert_server/engine/expert_store.h"
#include "expert_server/service/slice.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/decode.h"
#include "tests/fuzz/targets.h"
#include "tests/restated_experts.h"

namespace expertmesh::fuzz {
namespace {

constexpr int64_t kMaxMessageBytes = 64 << 10;

// Layers of 4 experts: 0 (F32, D = 4) and 2 (BF16, D = 9, no multiple of anything); and 4 (F16, D =
// 5), with biases, whose experts' input is weighed, and with a shared expert of another kind.
class TinyCheckpoint final : public Checkpoint {
 public:
  TinyCheckpoint() {
    model_.model_type = "tiny";
    model_.num_hidden_layers = 5;
    for (const int32_t index : {0, 2, 4}) {
      LayerDescription& layer = model_.layers.emplace_back();
      layer.layer = index;
      layer.router.num_experts = 4;
      layer.router.top_k = 2;
      if (index == 4) {
        layer.router.weigh_input = true;
        layer.experts = Expert(Activation::kGptOssGlu, true, DType::kF16, 5, 3);
        layer.shared.count = 1;
        layer.shared.experts = Expert(Activation::kRelu2, false, DType::kF32, 5, 2);
        continue;
      }
      layer.experts.hidden_size = index == 0 ? 4 : 9;
      layer.experts.intermediate_size = index == 0 ? 2 : 3;
      layer.experts.weight_dtype = index == 0 ? DType::kF32 : DType::kBF16;
    }
  }
  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return model_.model_type; }
  int64_t ExpertBytes(int32_t) const override { return 1; }
  const std::vector<std::string>& skipped_tensors() const override { return skipped_; }
  const std::string& layout() const override { return model_.model_type; }
  absl::StatusOr<RouterWeights> ReadRouter(int32_t) const override {
    return absl::UnimplementedError("the gate is not fuzzed here");
  }
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override {
    const LayerDescription& description = *model_.Find(layer);
    std::mt19937 rng(static_cast<unsigned>(layer * 5 + expert));
    return RandomExpert(expert < 4 ? description.experts : description.shared.experts, 0.5f, rng);
  }

 private:
  ModelDescription model_;
  std::vector<std::string> skipped_;
};

// Experts 0, 2 and 3 of all layers, and the shared one.
std::unique_ptr<ExpertStore> MakeStore(EngineKind engine) {
  const std::vector<int32_t> experts = {0, 2, 3};
  auto store = ExpertStore::Load(TinyCheckpoint(), {{0, experts}, {2, experts}, {4, {0, 2, 3, 4}}},
                                 MakeEngine({.kind = engine}), [](const LoadProgress&) {});
  FUZZ_CHECK(store.ok());
  return *std::move(store);
}

// The plain reference.
const ExpertStore& Store() {
  static const ExpertStore* store = MakeStore(EngineKind::kForLoop).release();
  return *store;
}

const ExpertStore& GroupedStore() {
  static const ExpertStore* store = MakeStore(EngineKind::kGrouped).release();
  return *store;
}

bool Never() { return false; }

// Routers let no other rows through, and no bits are promised for them.
bool AllFinite(const Slice& slice) {
  const Tensor& rows = slice.rows;
  for (int64_t i = 0; i < rows.num_elements(); ++i) {
    if (!std::isfinite(LoadFloat(rows.dtype(), rows.data(), i))) return false;
  }
  const auto& weights = slice.header.input_weights();
  return std::all_of(weights.begin(), weights.end(), [](float w) { return std::isfinite(w); });
}

// What one row gives alone, in a slice of its own.
void CheckAlone(const Slice& slice, int32_t expert, int position, const std::byte* expected) {
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
  alone.rows = Tensor(slice.rows.dtype(), {1, width});
  std::memcpy(alone.rows.data(), slice.rows.data() + row * row_bytes,
              static_cast<size_t>(row_bytes));
  const auto answer = ComputeSlice(Store(), alone, kMaxMessageBytes, Never);
  FUZZ_CHECK(answer.ok());
  FUZZ_CHECK(std::memcmp(answer->data(), expected, answer->num_bytes()) == 0);
}

// A slice: what comes back has the promised form, and the same bits from both engines and for a row
// alone.
absl::Status Compute(Bytes message) {
  Slice slice;
  RETURN_IF_ERROR(CheckedDecode(message, "rows", &slice.header, &slice.rows));
  const auto grouped = ComputeSlice(GroupedStore(), slice, kMaxMessageBytes, Never);
  const auto plain = ComputeSlice(Store(), slice, kMaxMessageBytes, Never);
  FUZZ_CHECK(grouped.status() == plain.status());
  if (!plain.ok()) return plain.status();
  const Tensor& answer = *plain;

  const auto& gather = slice.header.gather();
  const auto pairs = std::count_if(gather.begin(), gather.end(), [](int32_t r) { return r >= 0; });
  FUZZ_CHECK(answer.dtype() == ReplyDType(slice.rows.dtype()));
  FUZZ_CHECK(answer.shape() == (std::vector<int64_t>{pairs, slice.rows.dim(1)}));
  if (!AllFinite(slice)) return absl::OkStatus();
  FUZZ_CHECK(SameTensor(answer, *grouped));
  // Alone: looked at for the last row.
  const int64_t row_bytes = slice.rows.dim(1) * BytesOf(answer.dtype());
  int position = gather.size();
  for (int group = slice.header.expert_ids_size() - 1; group >= 0; --group) {
    for (int64_t i = 0; i < slice.header.m_sizes(group); ++i) {
      if (gather[--position] < 0) continue;
      CheckAlone(slice, slice.header.expert_ids(group), position,
                 answer.data() + (pairs - 1) * row_bytes);
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

}  // namespace

void Dispatch(Bytes message) {
  if (Compute(message).ok()) return;
  v1::DispatchResponse answer;
  Tensor rows;
  CheckedDecode(message, "rows", &answer, &rows).IgnoreError();
}

}  // namespace expertmesh::fuzz
