// The experts as two grouped GEMMs over the vector kernels.
#pragma once

#include <memory>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/kernels/compute_pool.h"
#include "common/kernels/grouped_gemm.h"
#include "common/kernels/memory.h"
#include "expert_server/engine/experts.h"

namespace expertmesh {

// What the layers of a server share: threads, and memory that is reused from call to call, since
// touching fresh pages would cost more than the rows' own traffic.
struct GroupedContext {
  GroupedContext(Isa i, int threads) : isa(i), pool(threads), scratch(threads) {}

  const Isa isa;
  // Positions are computed in portions whose rows take about this much memory, so that it is
  // bounded whatever the size of the batch. Much more than any cache, so that a portion has enough
  // rows of each expert.
  int64_t portion_bytes = int64_t{512} << 20;
  ComputePool pool;
  absl::Mutex mutex;                                      // held by the call that computes
  std::vector<Workspace> scratch ABSL_GUARDED_BY(mutex);  // by thread
  Workspace x ABSL_GUARDED_BY(mutex);
  Workspace h ABSL_GUARDED_BY(mutex);
  Workspace quantized ABSL_GUARDED_BY(mutex);          // what low precision needs beside them
  std::vector<int32_t> source ABSL_GUARDED_BY(mutex);  // row of each position that is not padding
  std::vector<float> weights ABSL_GUARDED_BY(mutex);   // input weight of each, or empty
  std::vector<GemmGroup> groups ABSL_GUARDED_BY(mutex);
};

// Bytes of memory that the weights of one expert take there, padding included. The descriptor is
// one that CheckComputed lets through.
int64_t BytesOfGroupedExpert(const ExpertDescriptor& descriptor);

// Errors of CheckComputed. Forward takes turns with all experts of the same context.
absl::StatusOr<std::unique_ptr<Experts>> MakeGroupedExperts(
    const ExpertDescriptor& descriptor, int64_t num_experts,
    std::shared_ptr<GroupedContext> context);

}  // namespace expertmesh
