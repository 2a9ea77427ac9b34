// One round: tokens of one or more calls of a layer that go to the servers together, and what comes
// back. The bookkeeping of the batcher, which says who may touch what.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/kernels/isa.h"
#include "common/model/description.h"
#include "common/tensor.h"
#include "router/dispatch/expert_backend.h"
#include "router/dispatch/forward_call.h"
#include "router/dispatch/plan.h"
#include "router/placement/membership.h"

namespace expertmesh {

// A call between its gate and its answer.
struct BatchedCall {
  ForwardCall call;       // at least one token
  ForwardResult result;   // routing: from the gate; output: allocated, filled by the rounds
  Tensor shared_weights;  // F32 [T, S] where shared experts are gated, else empty [0]
  ForwardDone done;       // null once answered
  absl::Time arrival;
  int64_t planned = 0;   // tokens that rounds have taken
  int64_t combined = 0;  // tokens whose output is there
  int rounds = 0;        // under way with tokens of it

  int64_t tokens() const { return call.hidden_states.dim(0); }
  bool answered() const { return done == nullptr; }
};

struct Round {
  // Consecutive tokens of one call.
  struct Part {
    std::shared_ptr<BatchedCall> call;
    int64_t begin = 0;  // the first of them in the call
    int64_t tokens = 0;
    int64_t offset = 0;   // the first of them in the round
    size_t missing = 0;   // slices that it needs and that are not there
    bool closed = false;  // nothing is left to be done
    absl::Span<const int32_t> topk_ids() const;
  };
  // What one server gets.
  struct Slice {
    std::shared_ptr<ExpertBackend> backend;
    uint64_t id = 0;            // the backend's
    std::vector<size_t> parts;  // indices of those that need it
    std::vector<int32_t> expert_ids;
    std::vector<int64_t> reply_shape;
    bool over = false;     // answered, or given up
    absl::Status failure;  // how it was answered
  };

  DType dtype = DType::kF32;                // of the parts' hidden states
  std::set<const ExpertBackend*> suspects;  // servers that kept others waiting when it was made
  std::vector<std::shared_ptr<ExpertBackend>> lost;  // servers that went with these parts before
  absl::Time start;
  absl::Time planned;  // between planning and gathering
  absl::Time sent;     // when handing out the slices began
  std::vector<Part> parts;
  RoundPlan plan;
  std::vector<Slice> slices;
  std::vector<Tensor> replies;  // by slice
};

// Plans the round for all parts that are not closed, every expert of which has a server, and fills
// plan, planned, slices, replies, offset and missing. Returns what to dispatch, by slice.
absl::StatusOr<std::vector<ExpertSlice>> PlanSlices(const LayerDescription& layer,
                                                    const LayerPlacement& placement, Round* round);

// Writes the part's output into its call. All slices that it needs are there.
void CombinePart(const LayerDescription& layer, const Round& round, const Round::Part& part,
                 Isa isa);

// Why a part fails when a slice that it needs does: names the experts that are lost to it.
absl::Status DescribeFailure(const LayerDescription& layer, const Round::Part& part,
                             const Round::Slice& slice);

// The experts that servers must hold for tokens with these ids, ascending: the layer's shared ones
// among them, those that return their input not.
std::vector<int32_t> NeededExperts(const LayerDescription& layer,
                                   absl::Span<const int32_t> topk_ids);

}  // namespace expertmesh
