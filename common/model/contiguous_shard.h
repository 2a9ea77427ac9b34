// Which server holds which expert.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace expertmesh {

// Ids [begin, end).
struct ExpertRange {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t size() const { return end - begin; }
};

// The experts of shard `shard` of `num_shards` under the contiguous split: sizes differ by at most
// one, the first shards have the larger one, and a shard may be empty when there are more shards
// than experts. INVALID_ARGUMENT unless 0 <= shard < num_shards and num_experts >= 0. Thread-safe.
absl::StatusOr<ExpertRange> ContiguousShard(int32_t num_experts, int32_t shard, int32_t num_shards);

}  // namespace expertmesh
