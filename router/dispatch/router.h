// The router's work on one call: gate, place, permute, dispatch, combine. Knows nothing of gRPC.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/alarm_clock.h"
#include "common/executor.h"
#include "common/model/checkpoint.h"
#include "router/dispatch/batcher.h"
#include "router/dispatch/forward_call.h"
#include "router/gating/gate.h"
#include "router/gating/input_norm.h"
#include "router/gating/shared_gate.h"
#include "router/placement/membership.h"

namespace expertmesh {

struct RouterOptions {
  // What computes the gates and the combine.
  EngineKind engine = EngineKind::kGrouped;
  Isa isa = BestIsa();
  // A call for experts that no server has held yet waits for at most this long after the start.
  absl::Duration startup_grace = absl::Seconds(60);
  BatchingOptions batching;
  // What rows for experts that compute natively are quantised to on their way: kFp8Block128, or
  // none: they go as they are.
  std::optional<QuantizedFormat> wire_format = {};
  EmptyExperts empty_experts = EmptyExperts::kZeroRows;
  // Threads for what takes long, and as many for calls that wait for servers to come; started when
  // needed.
  int threads = 1024;
};

// Holds the gates of all layers and the membership. Thread-safe.
class Router {
 public:
  // Reads the gates of all layers. INVALID_ARGUMENT for options that cannot work.
  static absl::StatusOr<std::unique_ptr<Router>> Create(
      std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
      const RouterOptions& options);
  // Waits for the answers to all calls.
  ~Router();

  // `done` gets the result, or why there is none: INVALID_ARGUMENT naming the field;
  // DEADLINE_EXCEEDED; CANCELLED; UNAVAILABLE naming the experts, also when the deadline passes
  // while servers are awaited; RESOURCE_EXHAUSTED when there is no memory or thread for it.
  //
  // Computes the gate on this thread, and what can be done at once; does not block.
  void Forward(ForwardCall call, ForwardDone done);

  // For work around calls that is too long for the thread it arises on.
  Executor& executor() { return executor_; }

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  // Shared, because streams to servers that are ending may outlive the router.
  const std::shared_ptr<Membership>& membership() const { return membership_; }
  // The model has the layer.
  const RoundCounters& counters(int32_t layer) const { return *layers_.at(layer).counters; }

 private:
  struct Layer {
    const LayerDescription* description = nullptr;
    std::optional<Gate> gate;               // where there are routed experts
    std::optional<SharedGate> shared_gate;  // where there are shared experts that it weighs
    std::optional<RowNorm> gate_norm;       // of what the gate sees, and of what experts see
    std::optional<RowNorm> expert_norm;
    // Shared with replies that come after the last answer.
    std::shared_ptr<RoundCounters> counters = std::make_shared<RoundCounters>();
    std::shared_ptr<Batcher> batcher;  // null where calls are not merged
  };
  // Shared with the answers, the last of which ends the router's wait for them.
  struct Calls {
    absl::Mutex mutex;
    int64_t under_way ABSL_GUARDED_BY(mutex) = 0;
  };

  Router(std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
         const RouterOptions& options);

  // Checks the call and computes its gate.
  absl::Status Prepare(BatchedCall* call);
  // Waits for the servers that the call needs. Blocks.
  absl::Status WaitForServers(const BatchedCall& call) const;
  void Submit(std::shared_ptr<BatchedCall> call);
  DispatchOptions dispatch() const {
    return {options_.wire_format, options_.empty_experts, options_.isa};
  }

  const std::shared_ptr<const Checkpoint> checkpoint_;
  const RouterOptions options_;
  const std::shared_ptr<Membership> membership_;
  std::map<int32_t, Layer> layers_;
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
  AlarmClock clock_{"batching"};
  // Goes before the clock, which the calls that it works on use.
  Executor executor_;
  Executor waiting_;  // apart, so that those who wait keep no thread from those who work
};

}  // namespace expertmesh
