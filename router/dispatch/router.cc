#include "router/dispatch/router.h"

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "common/text.h"
#include "router/dispatch/plan.h"

namespace expertmesh {
namespace {

// The replies of one sub-round. Shared with the completions, which may outlive the call.
struct Replies {
  absl::Mutex mutex;
  absl::CondVar arrived;
  std::vector<Tensor> rows ABSL_GUARDED_BY(mutex);  // by slice
  size_t outstanding ABSL_GUARDED_BY(mutex) = 0;
  absl::Status status ABSL_GUARDED_BY(mutex);  // the first failure
};

// A sub-round under way: tokens [begin, begin + T').
struct SubRound {
  int64_t begin = 0;
  RoundPlan plan;
  std::shared_ptr<Replies> replies;
};

void Complete(Replies& replies, size_t slice, absl::StatusOr<Tensor> rows) {
  absl::MutexLock lock(&replies.mutex);
  if (rows.ok()) {
    replies.rows[slice] = *std::move(rows);
  } else if (replies.status.ok()) {
    replies.status = rows.status();
  }
  --replies.outstanding;
  replies.arrived.SignalAll();
}

// Waits for all replies, or for the first failure.
absl::Status Wait(Replies& replies, const ForwardCall& call) {
  absl::MutexLock lock(&replies.mutex);
  while (replies.outstanding > 0 && replies.status.ok()) {
    const absl::Time now = absl::Now();
    if (now >= call.deadline) {
      return absl::DeadlineExceededError("the deadline passed while the experts were computing");
    }
    if (call.cancelled()) return absl::CancelledError("the caller has given up");
    replies.arrived.WaitWithDeadline(&replies.mutex, std::min(now + kCancelPoll, call.deadline));
  }
  return replies.status;
}

// Refuses by name what a description can say but dispatch and combine do not do.
absl::Status CheckSupported(const LayerDescription& layer) {
  const auto refuse = [&layer](const char* what) {
    return absl::UnimplementedError(
        absl::StrCat("layer ", layer.layer, ": ", what, " not supported yet"));
  };
  if (layer.kind != LayerKind::kMoe) return refuse("dense layers are");
  if (layer.shared.count > 0) return refuse("shared experts are");
  if (layer.router.weigh_input) return refuse("weights on the experts' input are");
  if (layer.router.identity_experts > 0) return refuse("identity experts are");
  return absl::OkStatus();
}

// The same rows of a [T, n] tensor.
TensorView Rows(const TensorView& tensor, const std::vector<int64_t>& shape, int64_t begin) {
  const int64_t row_bytes = shape[1] * BytesOf(tensor.dtype);
  return TensorView(tensor.dtype, shape,
                    static_cast<const std::byte*>(tensor.data) + begin * row_bytes);
}

// Names the experts of the slice that failed, so that the caller knows what is gone.
absl::Status DescribeFailure(const absl::Status& status, int32_t layer,
                             const std::vector<int32_t>& experts) {
  if (status.code() != absl::StatusCode::kUnavailable) return status;
  return absl::UnavailableError(absl::StrCat("layer ", layer, ": lost the server of expert",
                                             experts.size() == 1 ? " " : "s ", IdRanges(experts),
                                             ": ", std::string(status.message())));
}

}  // namespace

Router::Router(std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
               const RouterOptions& options)
    : checkpoint_(std::move(checkpoint)),
      options_(options),
      membership_(std::make_shared<Membership>(checkpoint_->model(), checkpoint_->fingerprint(),
                                               numerics, options.startup_grace)) {}

absl::StatusOr<std::unique_ptr<Router>> Router::Create(std::shared_ptr<const Checkpoint> checkpoint,
                                                       const std::string& numerics,
                                                       const RouterOptions& options) {
  if (options.max_subrounds_in_flight < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_subrounds_in_flight: expected at least 1, got ", options.max_subrounds_in_flight));
  }
  std::unique_ptr<Router> router(new Router(std::move(checkpoint), numerics, options));
  for (const LayerDescription& layer : router->checkpoint_->model().layers) {
    RETURN_IF_ERROR(CheckSupported(layer));
    ASSIGN_OR_RETURN(RouterWeights weights, router->checkpoint_->ReadRouter(layer.layer));
    ASSIGN_OR_RETURN(Gate gate,
                     Gate::Create(layer.router, std::move(weights), options.engine, options.isa));
    router->gates_.emplace(layer.layer, std::move(gate));
  }
  return router;
}

absl::StatusOr<ForwardResult> Router::Forward(const ForwardCall& call) const {
  const LayerDescription* layer = checkpoint_->model().Find(call.layer);
  if (layer == nullptr) {
    std::vector<int32_t> layers;
    for (const LayerDescription& l : checkpoint_->model().layers) layers.push_back(l.layer);
    return absl::InvalidArgumentError(absl::StrCat("layer: expected one of the MoE layers ",
                                                   IdRanges(layers), ", got ", call.layer));
  }
  const TensorView& hidden_states = call.hidden_states;
  const int64_t hidden_size = layer->experts.hidden_size;
  if (!IsActivationDType(hidden_states.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hidden_states.dtype: expected F32, BF16 or F16, got ", NameOf(hidden_states.dtype)));
  }
  if (hidden_states.shape.size() != 2 || hidden_states.shape[1] != hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_states.shape: expected [T, ",
                                                   hidden_size, "], got ",
                                                   ShapeToString(hidden_states.shape)));
  }
  const int64_t tokens = hidden_states.shape[0];
  const int32_t top_k = layer->router.top_k;
  ForwardResult result;
  ASSIGN_OR_RETURN(result.routing, gates_.at(call.layer).Route(hidden_states, call.first_row));
  result.output = Tensor(hidden_states.dtype, {tokens, hidden_size});
  if (tokens == 0) return result;

  const absl::Span<const int32_t> ids(result.routing.topk_ids.as<int32_t>(), tokens * top_k);
  const absl::Span<const float> weights(result.routing.topk_weights.as<float>(), tokens * top_k);
  std::vector<bool> used(layer->router.num_experts);
  for (const int32_t id : ids) used[id] = true;
  std::vector<int32_t> needed;
  for (int32_t e = 0; e < layer->router.num_experts; ++e) {
    if (used[e]) needed.push_back(e);
  }
  // So early that the answer, which names the experts, is there before the caller's own clock runs
  // out.
  const absl::Duration left = call.deadline - absl::Now();
  const absl::Time answer_by = call.deadline - std::min(absl::Milliseconds(100), left / 10);
  ASSIGN_OR_RETURN(const LayerPlacement placement,
                   membership_->WaitFor(call.layer, needed, answer_by, call.cancelled));

  // A server that holds all experts returns K rows a token, in fp32 at the widest.
  const int64_t token_bytes = top_k * hidden_size * 4;
  const DType reply_dtype = ReplyDType(hidden_states.dtype);
  const int64_t tokens_per_subround = std::max<int64_t>(1, options_.subround_bytes / token_bytes);
  std::deque<SubRound> in_flight;
  int64_t next = 0;
  while (next < tokens || !in_flight.empty()) {
    if (next < tokens && static_cast<int>(in_flight.size()) < options_.max_subrounds_in_flight) {
      const int64_t count = std::min(tokens_per_subround, tokens - next);
      SubRound sub;
      sub.begin = next;
      ASSIGN_OR_RETURN(sub.plan, PlanRound(ids.subspan(next * top_k, count * top_k), top_k,
                                           placement.server_of_expert, /*pad_multiple=*/1));
      const size_t num_slices = sub.plan.slices.size();
      sub.replies = std::make_shared<Replies>();
      {
        absl::MutexLock lock(&sub.replies->mutex);
        sub.replies->rows.resize(num_slices);
        sub.replies->outstanding = num_slices;
      }
      const std::vector<int64_t> shape = {count, hidden_size};
      const TensorView rows = Rows(hidden_states, shape, next);
      for (size_t s = 0; s < num_slices; ++s) {
        ServerSlice& source = sub.plan.slices[s];
        ExpertSlice slice;
        slice.layer = call.layer;
        slice.placement_epoch = placement.epoch;
        slice.expert_ids = source.expert_ids;
        slice.m_sizes = std::move(source.m_sizes);
        slice.gather = std::move(source.gather);
        slice.rows = GatherRows(rows, source.row_tokens);
        slice.deadline = call.deadline;
        placement.backends[source.server]->Dispatch(
            std::move(slice),
            [replies = sub.replies, s, layer = call.layer, experts = source.expert_ids, reply_dtype,
             expected = std::vector<int64_t>{source.num_pairs, hidden_size}](
                absl::StatusOr<Tensor> reply) {
              if (reply.ok() && (reply->dtype() != reply_dtype || reply->shape() != expected)) {
                reply = absl::InternalError(absl::StrCat(
                    "expected reply rows ", NameOf(reply_dtype), " ", ShapeToString(expected),
                    ", got ", NameOf(reply->dtype()), " ", ShapeToString(reply->shape())));
              }
              if (!reply.ok()) reply = DescribeFailure(reply.status(), layer, experts);
              Complete(*replies, s, std::move(reply));
            });
      }
      in_flight.push_back(std::move(sub));
      next += count;
      continue;
    }
    SubRound sub = std::move(in_flight.front());
    in_flight.pop_front();
    RETURN_IF_ERROR(Wait(*sub.replies, call));
    std::vector<Tensor> rows;
    {
      absl::MutexLock lock(&sub.replies->mutex);
      rows = std::move(sub.replies->rows);
    }
    Combine(sub.plan, rows, weights.subspan(sub.begin * top_k, sub.plan.pairs.size()), top_k,
            layer->router.routed_scale, hidden_size, hidden_states.dtype,
            result.output.data() + sub.begin * hidden_size * BytesOf(hidden_states.dtype),
            options_.isa);
  }
  return result;
}

}  // namespace expertmesh
