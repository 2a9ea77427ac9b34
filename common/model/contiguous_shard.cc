#include "common/model/contiguous_shard.h"

#include <algorithm>

#include "common/status.h"

namespace expertmesh {

absl::StatusOr<ExpertRange> ContiguousShard(int32_t num_experts, int32_t shard,
                                            int32_t num_shards) {
  if (num_experts < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_experts must not be negative, got ", num_experts));
  }
  if (shard < 0 || shard >= num_shards) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard must be in [0, num_shards) = [0, ", num_shards, "), got ", shard));
  }
  const int32_t base = num_experts / num_shards;
  const int32_t larger = num_experts % num_shards;  // the first shards have one more
  const int32_t begin = shard * base + std::min(shard, larger);
  return ExpertRange{begin, begin + base + (shard < larger ? 1 : 0)};
}

}  // namespace expertmesh
