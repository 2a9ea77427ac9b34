#include "expert_server/engine/expert_store.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/model/contiguous_shard.h"
#include "common/status.h"
#include "common/text.h"
#include "expert_server/engine/cpu/grouped_experts.h"
#include "expert_server/engine/memory.h"

namespace expertmesh {
namespace {

// RESOURCE_EXHAUSTED when what is still to be loaded does not fit.
absl::Status CheckMemory(const LoadProgress& load) {
  const int64_t needed = load.bytes_total - load.bytes_done;
  const int64_t available = AvailableMemoryBytes();
  if (needed <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the experts of this server need ", load.bytes_total, " bytes (",
                   HumanBytes(load.bytes_total), "), of which ", HumanBytes(load.bytes_done),
                   " are loaded, but only ", available, " bytes (", HumanBytes(available),
                   ") of memory are available; use more servers or machines"));
}

// INVALID_ARGUMENT for codes and scales that quantisers do not make: no bits are promised for them.
absl::Status CheckCodes(const ExpertRows& rows) {
  const auto find = KernelsOf(BestIsa()).find_not_finite;
  if (const int64_t at = find(DType::kF8_E4M3, rows.values.data(), rows.values.num_elements());
      at >= 0) {
    return absl::InvalidArgumentError(absl::StrCat("rows: row ", at / rows.values.dim(1),
                                                   " is not finite at column ",
                                                   at % rows.values.dim(1)));
  }
  const int64_t num_scales = rows.scales.num_elements();
  int64_t at = -1;
  if (rows.scales.dtype() == DType::kF32) {
    at = find(DType::kF32, rows.scales.data(), num_scales);
  } else {
    const auto* const exponents = rows.scales.as<uint8_t>();
    const auto* const above = std::find_if(exponents, exponents + num_scales,
                                           [](uint8_t e) { return e > kMaxMxfp8Scale; });
    if (above != exponents + num_scales) at = above - exponents;
  }
  if (at < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("row_scales: expected finite ones, and exponents of at most ", kMaxMxfp8Scale,
                   ", got another for row ", at / rows.scales.dim(1)));
}

// Of one expert in memory.
int64_t BytesHeld(const LayerDescription& layer, int32_t expert) {
  return BytesOfGroupedExpert(expert < layer.router.num_experts ? layer.experts
                                                                : layer.shared.experts);
}

}  // namespace

absl::StatusOr<ExpertStore::Held> ExpertStore::ShardOf(const ModelDescription& model, int32_t shard,
                                                       int32_t num_shards) {
  Held held;
  for (const LayerDescription& layer : model.layers) {
    ASSIGN_OR_RETURN(const ExpertRange range,
                     ContiguousShard(layer.router.num_experts, shard, num_shards));
    std::vector<int32_t>& experts = held[layer.layer];
    for (int32_t e = range.begin; e < range.end; ++e) experts.push_back(e);
    for (int32_t e = layer.router.num_experts; e < layer.num_held(); ++e) experts.push_back(e);
  }
  return held;
}

int64_t ExpertStore::BytesOf(const Checkpoint& checkpoint, const Held& held) {
  int64_t bytes = 0;
  for (const auto& [layer, experts] : held) {
    const LayerDescription& description = *checkpoint.model().Find(layer);
    for (const int32_t expert : experts) bytes += BytesHeld(description, expert);
  }
  return bytes;
}

absl::StatusOr<ExpertStore::Layer> ExpertStore::LoadLayer(
    const Checkpoint& checkpoint, const LayerDescription& description,
    absl::Span<const int32_t> expert_ids, const ExpertsFactory& factory,
    const std::function<void(int64_t bytes)>& loaded) {
  const int32_t num_experts = description.router.num_experts;
  Layer layer;
  layer.hidden_size = description.experts.hidden_size;
  layer.row_format = description.row_format();
  layer.weigh_input = description.router.weigh_input && !layer.row_format;
  layer.local_of_expert.assign(description.num_held(), -1);
  layer.num_routed = static_cast<int32_t>(
      std::count_if(expert_ids.begin(), expert_ids.end(),
                    [num_experts](int32_t expert) { return expert < num_experts; }));
  const int64_t num_shared = static_cast<int64_t>(expert_ids.size()) - layer.num_routed;
  if (layer.num_routed > 0) {
    ASSIGN_OR_RETURN(layer.routed, factory(description.experts, layer.num_routed));
  }
  if (num_shared > 0) {
    ASSIGN_OR_RETURN(layer.shared, factory(description.shared.experts, num_shared));
  }
  int32_t local = 0;
  for (const int32_t expert : expert_ids) {
    ASSIGN_OR_RETURN(ExpertWeights weights, checkpoint.ReadExpert(description.layer, expert));
    const bool shared = expert >= num_experts;
    RETURN_IF_ERROR(
        CheckWeights(shared ? description.shared.experts : description.experts, weights));
    layer.local_of_expert[expert] = local;
    if (shared) {
      layer.shared->SetWeights(local - layer.num_routed, std::move(weights));
    } else {
      layer.routed->SetWeights(local, std::move(weights));
    }
    ++local;
    loaded(BytesHeld(description, expert));
  }
  if (layer.routed != nullptr) RETURN_IF_ERROR(layer.routed->Prepare());
  if (layer.shared != nullptr) RETURN_IF_ERROR(layer.shared->Prepare());
  return layer;
}

absl::StatusOr<std::unique_ptr<ExpertStore>> ExpertStore::Load(
    const Checkpoint& checkpoint, const Held& held, const ExpertsFactory& factory,
    const std::function<void(const LoadProgress&)>& progress) {
  for (const auto& [layer_index, expert_ids] : held) {
    if (checkpoint.model().Find(layer_index) == nullptr) {
      return absl::NotFoundError(absl::StrCat("layer: the model has no layer ", layer_index));
    }
  }
  LoadProgress load = {0, BytesOf(checkpoint, held)};
  std::unique_ptr<ExpertStore> store(new ExpertStore());
  store->held_ = held;
  for (const auto& [layer_index, expert_ids] : held) {
    // Again for every layer: other servers of this machine may load at the same time.
    RETURN_IF_ERROR(CheckMemory(load));
    ASSIGN_OR_RETURN(Layer layer, LoadLayer(checkpoint, *checkpoint.model().Find(layer_index),
                                            expert_ids, factory, [&](int64_t bytes) {
                                              load.bytes_done += bytes;
                                              progress(load);
                                            }));
    store->layers_.emplace(layer_index, std::move(layer));
  }
  malloc_trim(0);  // what the weights were read into is free, but would stay ours
  return store;
}

int64_t ExpertStore::bytes() const {
  int64_t bytes = 0;
  for (const auto& [index, layer] : layers_) {
    for (const auto* experts : {&layer.routed, &layer.shared}) {
      if (*experts != nullptr) bytes += (*experts)->bytes();
    }
  }
  return bytes;
}

absl::StatusOr<Tensor> ExpertStore::Forward(
    int32_t layer_index, absl::Span<const int32_t> expert_ids, absl::Span<const int64_t> m_sizes,
    absl::Span<const int32_t> gather, absl::Span<const float> input_weights,
    const ExpertRows& given, std::function<bool()> stop) const {
  const auto found = layers_.find(layer_index);
  if (found == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer: this server has no layer ", layer_index));
  }
  const Layer& layer = found->second;
  std::vector<int32_t> local;
  local.reserve(expert_ids.size());
  for (const int32_t expert : expert_ids) {
    const bool known = expert >= 0 && expert < static_cast<int32_t>(layer.local_of_expert.size());
    if (!known || layer.local_of_expert[expert] < 0) {
      return absl::NotFoundError(absl::StrCat("expert_ids: this server does not hold expert ",
                                              expert, " of layer ", layer_index));
    }
    local.push_back(layer.local_of_expert[expert]);
  }
  if (const size_t expected = layer.weigh_input ? gather.size() : 0;
      input_weights.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("input_weights: expected ", expected,
                                                   " entries for layer ", layer_index, ", got ",
                                                   input_weights.size()));
  }
  const bool quantized_to_travel = given.format == QuantizedFormat::kFp8Block128;
  if (given.format != layer.row_format && (layer.row_format || !quantized_to_travel)) {
    const auto name = [](const std::optional<QuantizedFormat>& format) {
      return format ? NameOf(*format) : "native";
    };
    return absl::InvalidArgumentError(absl::StrCat("row_format: expected ", name(layer.row_format),
                                                   " for layer ", layer_index, ", got ",
                                                   name(given.format)));
  }
  ExpertBatch whole = {given.values, local, m_sizes, gather};
  whole.row_format = given.format;
  RETURN_IF_ERROR(
      ValidateBatch(whole, layer.hidden_size, static_cast<int64_t>(held_.at(layer_index).size())));
  RETURN_IF_ERROR(ValidateRows(given));
  if (given.format) RETURN_IF_ERROR(CheckCodes(given));
  const auto start = std::chrono::steady_clock::now();
  const ExpertRows rows = given.format == layer.row_format ? given : DequantizeRows(given);
  const auto num_pairs = [](absl::Span<const int32_t> positions) {
    return std::count_if(positions.begin(), positions.end(), [](int32_t row) { return row >= 0; });
  };
  const DType reply = ReplyDType(rows.dtype);
  Tensor output(reply, {num_pairs(gather), layer.hidden_size});
  std::byte* to = output.data();
  int64_t gather_ns = 0;
  // Groups of routed experts are computed together, and those of shared ones.
  size_t position = 0;
  for (size_t begin = 0, end = 0; begin < local.size(); begin = end) {
    const bool shared = local[begin] >= layer.num_routed;
    size_t positions = 0;
    for (; end < local.size() && (local[end] >= layer.num_routed) == shared; ++end) {
      positions += static_cast<size_t>(m_sizes[end]);
      if (shared) local[end] -= layer.num_routed;
    }
    const ExpertBatch batch = {
        rows.values,
        absl::MakeConstSpan(local).subspan(begin, end - begin),
        m_sizes.subspan(begin, end - begin),
        gather.subspan(position, positions),
        layer.weigh_input ? input_weights.subspan(position, positions) : absl::Span<const float>(),
        stop,
        &gather_ns,
        rows.format,
        rows.scales,
        rows.dtype};
    RETURN_IF_ERROR((shared ? layer.shared : layer.routed)->Forward(batch, to));
    to += num_pairs(batch.gather) * layer.hidden_size * expertmesh::BytesOf(reply);
    position += positions;
  }
  const std::chrono::nanoseconds all = std::chrono::steady_clock::now() - start;
  gather_ns_ += static_cast<uint64_t>(gather_ns);
  gemm_ns_ += static_cast<uint64_t>(all.count() - gather_ns);
  rows_computed_ += static_cast<uint64_t>(output.dim(0));
  return output;
}

}  // namespace expertmesh
