#include "expert_server/engine/expert_store.h"

#include <malloc.h>

#include <chrono>
#include <utility>

#include "common/model/contiguous_shard.h"
#include "common/status.h"
#include "common/text.h"
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

}  // namespace

absl::StatusOr<ExpertStore::Held> ExpertStore::ShardOf(const ModelDescription& model, int32_t shard,
                                                       int32_t num_shards) {
  Held held;
  for (const LayerDescription& layer : model.layers) {
    ASSIGN_OR_RETURN(const ExpertRange range,
                     ContiguousShard(layer.router.num_experts, shard, num_shards));
    std::vector<int32_t>& experts = held[layer.layer];
    for (int32_t e = range.begin; e < range.end; ++e) experts.push_back(e);
  }
  return held;
}

int64_t ExpertStore::BytesOf(const Checkpoint& checkpoint, const Held& held) {
  int64_t bytes = 0;
  for (const auto& [layer, experts] : held) {
    bytes += checkpoint.ExpertBytes(layer) * static_cast<int64_t>(experts.size());
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<ExpertStore>> ExpertStore::Load(
    const Checkpoint& checkpoint, const Held& held, const ExpertsFactory& factory,
    const std::function<void(const LoadProgress&)>& progress) {
  for (const auto& [layer_index, expert_ids] : held) {
    if (checkpoint.model().Find(layer_index) == nullptr) {
      return absl::NotFoundError(absl::StrCat("layer: the model has no MoE layer ", layer_index));
    }
  }
  LoadProgress load = {0, BytesOf(checkpoint, held)};
  std::unique_ptr<ExpertStore> store(new ExpertStore());
  store->held_ = held;
  for (const auto& [layer_index, expert_ids] : held) {
    // Again for every layer: other servers of this machine may load at the same time.
    RETURN_IF_ERROR(CheckMemory(load));
    const LayerDescription* description = checkpoint.model().Find(layer_index);
    Layer layer;
    layer.hidden_size = description->experts.hidden_size;
    layer.local_of_expert.assign(description->router.num_experts, -1);
    ASSIGN_OR_RETURN(layer.experts,
                     factory(description->experts, static_cast<int64_t>(expert_ids.size())));
    int32_t local = 0;
    for (const int32_t expert : expert_ids) {
      ASSIGN_OR_RETURN(ExpertWeights weights, checkpoint.ReadExpert(layer_index, expert));
      layer.local_of_expert[expert] = local;
      layer.experts->SetWeights(local++, std::move(weights));
      load.bytes_done += checkpoint.ExpertBytes(layer_index);
      progress(load);
    }
    RETURN_IF_ERROR(layer.experts->Prepare());
    store->layers_.emplace(layer_index, std::move(layer));
  }
  malloc_trim(0);  // what the weights were read into is free, but would stay ours
  return store;
}

absl::StatusOr<Tensor> ExpertStore::Forward(int32_t layer_index,
                                            absl::Span<const int32_t> expert_ids,
                                            absl::Span<const int64_t> m_sizes,
                                            absl::Span<const int32_t> gather, const Tensor& rows,
                                            std::function<bool()> stop) const {
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
  int64_t gather_ns = 0;
  const ExpertBatch batch = {rows, local, m_sizes, gather, std::move(stop), &gather_ns};
  RETURN_IF_ERROR(
      ValidateBatch(batch, layer.hidden_size, static_cast<int64_t>(held_.at(layer_index).size())));
  int64_t pairs = 0;
  for (const int32_t row : gather) pairs += row >= 0;
  Tensor output(ReplyDType(rows.dtype()), {pairs, layer.hidden_size});
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(layer.experts->Forward(batch, output.data()));
  const std::chrono::nanoseconds all = std::chrono::steady_clock::now() - start;
  gather_ns_ += static_cast<uint64_t>(gather_ns);
  gemm_ns_ += static_cast<uint64_t>(all.count() - gather_ns);
  rows_computed_ += static_cast<uint64_t>(pairs);
  return output;
}

}  // namespace expertmesh
