// All experts that one server holds, over all layers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/expert_rows.h"
#include "common/model/checkpoint.h"
#include "common/tensor.h"
#include "expert_server/engine/engine.h"

namespace expertmesh {

// How much of a load is done.
struct LoadProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};

// What a server has done since it started.
struct ExpertWork {
  uint64_t rows = 0;       // pairs of token and expert computed
  uint64_t gather_us = 0;  // spent on bringing rows to where they are computed
  uint64_t gemm_us = 0;    // on everything else of the experts' forward passes
};

// Immutable after Load but for counters; Forward may be called concurrently.
class ExpertStore {
 public:
  // layer -> global expert ids, ascending; the shared ones come after the routed ones.
  using Held = std::map<int32_t, std::vector<int32_t>>;

  // The experts of shard `shard` of `num_shards` of every layer: the routed ones under the
  // contiguous split, and all shared ones.
  static absl::StatusOr<Held> ShardOf(const ModelDescription& model, int32_t shard,
                                      int32_t num_shards);

  // Bytes of memory that the weights of `held` take in the grouped engine.
  static int64_t BytesOf(const Checkpoint& checkpoint, const Held& held);

  // Reads those experts and nothing else, and prepares every layer, made by `factory`. `progress`
  // is called on this thread after each expert. RESOURCE_EXHAUSTED with both numbers when they need
  // more memory than the machine (or its control group) has left; nothing has been read then.
  static absl::StatusOr<std::unique_ptr<ExpertStore>> Load(
      const Checkpoint& checkpoint, const Held& held, const ExpertsFactory& factory,
      const std::function<void(const LoadProgress&)>& progress);

  // Computes the rows [P without padding, D] of one slice; expert_ids are global; input_weights:
  // [P] for layers that weigh the experts' input and compute natively, else empty; rows: in the
  // format that the layer's experts compute in, or as kFp8Block128 for those that compute natively,
  // which read what they stand for. NOT_FOUND for an expert that is not
  // here; CANCELLED once `stop` (asked every few positions) says so; INVALID_ARGUMENT naming the
  // field when the slice does not fit together.
  absl::StatusOr<Tensor> Forward(
      int32_t layer, absl::Span<const int32_t> expert_ids, absl::Span<const int64_t> m_sizes,
      absl::Span<const int32_t> gather, absl::Span<const float> input_weights,
      const ExpertRows& rows, std::function<bool()> stop = [] { return false; }) const;

  const Held& held() const { return held_; }
  // Of memory that the weights take.
  int64_t bytes() const;
  // So far; failed passes do not count.
  ExpertWork work() const { return {rows_computed_, gather_ns_ / 1000, gemm_ns_ / 1000}; }

 private:
  struct Layer {
    int64_t hidden_size = 0;
    bool weigh_input = false;                   // here: natively
    std::optional<QuantizedFormat> row_format;  // of all experts
    std::vector<int32_t> local_of_expert;       // by id: place among those held, or -1
    int32_t num_routed = 0;                     // of those held
    std::unique_ptr<Experts> routed;            // null if none is held
    std::unique_ptr<Experts> shared;            // the same
  };

  static absl::StatusOr<Layer> LoadLayer(const Checkpoint& checkpoint,
                                         const LayerDescription& description,
                                         absl::Span<const int32_t> expert_ids,
                                         const ExpertsFactory& factory,
                                         const std::function<void(int64_t bytes)>& loaded);

  ExpertStore() = default;

  Held held_;
  std::map<int32_t, Layer> layers_;
  mutable std::atomic<uint64_t> rows_computed_ = 0;
  mutable std::atomic<uint64_t> gather_ns_ = 0;
  mutable std::atomic<uint64_t> gemm_ns_ = 0;
};

}  // namespace expertmesh
