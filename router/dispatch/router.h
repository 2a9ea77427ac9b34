// The router's work on one call: gate, place, permute, dispatch, combine. Knows nothing of gRPC.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/model/checkpoint.h"
#include "common/tensor.h"
#include "router/gating/gate.h"
#include "router/placement/membership.h"

namespace expertmesh {

struct RouterOptions {
  // What computes the gates and the combine.
  EngineKind engine = EngineKind::kGrouped;
  Isa isa = BestIsa();
  // A call for experts that no server has held yet waits for at most this long after the start.
  absl::Duration startup_grace = absl::Seconds(60);
  // A round is cut into sub-rounds of tokens whose replies take at most this many bytes, so that
  // memory is bounded whatever T is. At least one token goes into each.
  int64_t subround_bytes = 8 << 20;
  // Sub-rounds of a call under way at a time.
  int max_subrounds_in_flight = 2;
};

// One forward call.
struct ForwardCall {
  int32_t layer = 0;
  TensorView hidden_states;  // [T, D]
  int64_t first_row = 0;     // what row 0 is called in error texts
  absl::Time deadline = absl::InfiniteFuture();
  // True once the caller has given up; called from the thread that runs Forward.
  std::function<bool()> cancelled = [] { return false; };
};

struct ForwardResult {
  Routing routing;
  Tensor output;  // [T, D] in the dtype of hidden_states
};

// Holds the gates of all layers and the membership. Thread-safe.
class Router {
 public:
  // Reads the gates of all layers.
  static absl::StatusOr<std::unique_ptr<Router>> Create(
      std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
      const RouterOptions& options);

  // Blocks until the result is there, the deadline has passed while experts compute
  // (DEADLINE_EXCEEDED; while servers are awaited it is UNAVAILABLE), the caller gave up
  // (CANCELLED), or it cannot be computed: INVALID_ARGUMENT naming the field; UNAVAILABLE naming
  // experts.
  absl::StatusOr<ForwardResult> Forward(const ForwardCall& call) const;

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  // Shared, because streams to servers that are ending may outlive the router.
  const std::shared_ptr<Membership>& membership() const { return membership_; }

 private:
  Router(std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
         const RouterOptions& options);

  const std::shared_ptr<const Checkpoint> checkpoint_;
  const RouterOptions options_;
  const std::shared_ptr<Membership> membership_;
  std::map<int32_t, Gate> gates_;  // by layer
};

}  // namespace expertmesh
