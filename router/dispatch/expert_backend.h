// How a router reaches the experts of one server: over a gRPC stream, or by a direct call in one
// process.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/tensor.h"

namespace expertmesh {

// One slice of a round; fields as in DispatchRequest of the wire contract.
struct ExpertSlice {
  int32_t layer = 0;
  uint64_t placement_epoch = 0;
  std::vector<int32_t> expert_ids;
  std::vector<int64_t> m_sizes;
  std::vector<int32_t> gather;
  Tensor rows;  // [R, D]
  absl::Time deadline = absl::InfiniteFuture();
};

// Thread-safe.
class ExpertBackend {
 public:
  // Gets the rows [P without padding, D], or why there are none. Called exactly once, on any
  // thread; must not block.
  using Done = absl::AnyInvocable<void(absl::StatusOr<Tensor>) &&>;

  virtual ~ExpertBackend() = default;

  // Starts the computation of a slice. UNAVAILABLE when the server is gone, also while the slice is
  // under way.
  virtual void Dispatch(ExpertSlice slice, Done done) = 0;
};

}  // namespace expertmesh
