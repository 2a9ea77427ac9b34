// How a router reaches the experts of one server: over a gRPC stream, or by a direct call in one
// process.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/expert_rows.h"
#include "common/tensor.h"

namespace expertmesh {

// One slice of a round; fields as in DispatchRequest of the wire contract.
struct ExpertSlice {
  int32_t layer = 0;
  uint64_t placement_epoch = 0;
  std::vector<int32_t> expert_ids;
  std::vector<int64_t> m_sizes;
  std::vector<int32_t> gather;
  std::vector<float> input_weights;
  ExpertRows rows;                               // [R, D]
  absl::Time deadline = absl::InfiniteFuture();  // of the last caller who waits for it
};

// Thread-safe.
class ExpertBackend {
 public:
  // Gets the rows [P without padding, D], or why there are none. Called exactly once, on any
  // thread; must not block.
  using Done = absl::AnyInvocable<void(absl::StatusOr<Tensor>) &&>;

  virtual ~ExpertBackend() = default;

  // Starts the computation of a slice and returns its id. UNAVAILABLE when the server is gone, also
  // while the slice is under way. Deadlines are the caller's to watch: it cancels what is late.
  virtual uint64_t Dispatch(ExpertSlice slice, Done done) = 0;

  // Nobody waits for the slice any more: it is dropped where it is and answered, with CANCELLED
  // unless that has happened already. No effect for ids that have been answered.
  virtual void Cancel(uint64_t id) = 0;
};

}  // namespace expertmesh
