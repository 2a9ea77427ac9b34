// One round: tokens of one or more calls of a layer that go to the servers together, and what comes
// back. The bookkeeping of the batcher, which says who may touch what.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/kernels/isa.h"
#include "common/kernels/quantize.h"
#include "common/model/description.h"
#include "common/quantized_format.h"
#include "common/tensor.h"
#include "router/dispatch/expert_backend.h"
#include "router/dispatch/forward_call.h"
#include "router/dispatch/plan.h"
#include "router/permutation/permute.h"
#include "router/placement/membership.h"

namespace expertmesh {

// How rows go to the servers.
struct DispatchOptions {
  // What rows for experts that compute natively are quantised to on their way: kFp8Block128, or
  // none: they go as they are.
  std::optional<QuantizedFormat> wire_format = {};
  // What experts without a row get, where groups are padded.
  EmptyExperts empty_experts = EmptyExperts::kZeroRows;
  // What weighs, quantises and combines.
  Isa isa = BestIsa();
};

// What goes to the servers in one round, or in many.
struct DispatchCounts {
  int64_t pairs = 0;             // of token and expert
  int64_t unique_rows = 0;       // sent
  int64_t padded_positions = 0;  // beside the pairs
  int64_t row_bytes = 0;         // of the rows sent and of their scales
  // Rows of the round, those that go to several servers once; where the gate weighs the experts'
  // input, one for each pair.
  QuantizeCounts quantized;
};

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
  DispatchCounts counts;
};

// Plans the round for all parts that are not closed, every expert of which has a server, and fills
// plan, planned, slices, replies, counts, offset and missing. Returns what to dispatch, by slice:
// rows in the format that the layer's experts compute in, else in that of the options.
absl::StatusOr<std::vector<ExpertSlice>> PlanSlices(const LayerDescription& layer,
                                                    const LayerPlacement& placement,
                                                    const DispatchOptions& options, Round* round);

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
