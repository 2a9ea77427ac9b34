// The router's work on one call: gate, place, permute, dispatch, combine. Knows nothing of gRPC.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/model/checkpoint.h"
#include "router/dispatch/batcher.h"
#include "router/dispatch/forward_call.h"
#include "router/gating/gate.h"
#include "router/placement/membership.h"

namespace expertmesh {

struct RouterOptions {
  // What computes the gates and the combine.
  EngineKind engine = EngineKind::kGrouped;
  Isa isa = BestIsa();
  // A call for experts that no server has held yet waits for at most this long after the start.
  absl::Duration startup_grace = absl::Seconds(60);
  BatchingOptions batching;
};

// Holds the gates of all layers and the membership. Thread-safe; outlives every call.
class Router {
 public:
  // Reads the gates of all layers. INVALID_ARGUMENT for options that cannot work.
  static absl::StatusOr<std::unique_ptr<Router>> Create(
      std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
      const RouterOptions& options);

  // `done` gets the result, or why there is none: INVALID_ARGUMENT naming the field;
  // DEADLINE_EXCEEDED; CANCELLED; UNAVAILABLE naming the experts, also when the deadline passes
  // while servers are awaited.
  //
  // Blocks: while the gate computes and servers are awaited; and when it finds the layer idle, it
  // goes on until that is so again, answering the calls that other threads bring meanwhile.
  void Forward(ForwardCall call, ForwardDone done);

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  // Shared, because streams to servers that are ending may outlive the router.
  const std::shared_ptr<Membership>& membership() const { return membership_; }
  // The model has the layer.
  const RoundCounters& counters(int32_t layer) const { return layers_.at(layer).counters; }

 private:
  struct Layer {
    Layer(const LayerDescription* d, Gate g) : description(d), gate(std::move(g)) {}
    const LayerDescription* description;
    Gate gate;
    RoundCounters counters;
    std::shared_ptr<Batcher> batcher;  // null where calls are not merged
  };

  Router(std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
         const RouterOptions& options);

  // What happens to a call before its rounds.
  absl::Status Prepare(BatchedCall* call);

  const std::shared_ptr<const Checkpoint> checkpoint_;
  const RouterOptions options_;
  const std::shared_ptr<Membership> membership_;
  std::map<int32_t, Layer> layers_;
};

}  // namespace expertmesh
