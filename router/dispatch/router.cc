#include "router/dispatch/router.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/text.h"

namespace expertmesh {
namespace {

// INVALID_ARGUMENT for a description that is none of a layer.
absl::Status CheckLayer(const LayerDescription& layer) {
  const auto refuse = [&layer](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer.layer, ": ", what));
  };
  if (layer.shared.count < 0 || layer.num_held() == 0) return refuse("there are no experts");
  if (layer.shared.count > 0 && layer.shared.experts.hidden_size != layer.experts.hidden_size) {
    return refuse("the shared experts have another hidden_size than the others");
  }
  if (layer.router.num_experts == 0 &&
      (layer.router.top_k != 0 || layer.router.identity_experts != 0)) {
    return refuse("top_k and identity_experts must be 0 where there are no routed experts");
  }
  return absl::OkStatus();
}

absl::Span<const int32_t> TopkIds(const ForwardResult& result) {
  const Tensor& ids = result.routing.topk_ids;
  return {ids.as<int32_t>(), static_cast<size_t>(ids.num_elements())};
}

}  // namespace

Router::Router(std::shared_ptr<const Checkpoint> checkpoint, const std::string& numerics,
               const RouterOptions& options)
    : checkpoint_(std::move(checkpoint)),
      options_(options),
      membership_(std::make_shared<Membership>(checkpoint_->model(), checkpoint_->fingerprint(),
                                               numerics, options.startup_grace)),
      executor_("forward", options.threads, std::numeric_limits<size_t>::max()),
      waiting_("waiting", options.threads, std::numeric_limits<size_t>::max()) {}

Router::~Router() {
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(calls_->mutex) {
    return calls_->under_way == 0;
  };
  absl::MutexLock lock(&calls_->mutex, absl::Condition(&answered));
}

absl::StatusOr<std::unique_ptr<Router>> Router::Create(std::shared_ptr<const Checkpoint> checkpoint,
                                                       const std::string& numerics,
                                                       const RouterOptions& options) {
  RETURN_IF_ERROR(Validate(options.batching));
  std::unique_ptr<Router> router(new Router(std::move(checkpoint), numerics, options));
  for (const LayerDescription& description : router->checkpoint_->model().layers) {
    RETURN_IF_ERROR(CheckLayer(description));
    if (options.wire_format && description.row_format()) {
      return absl::InvalidArgumentError(
          absl::StrCat("dispatch_dtype: expected none, as the experts of layer ", description.layer,
                       " compute in ", NameOf(*description.row_format()), ", got fp8"));
    }
    ASSIGN_OR_RETURN(RouterWeights weights, router->checkpoint_->ReadRouter(description.layer));
    Layer& layer = router->layers_[description.layer];
    layer.description = &description;
    if (description.shared.count > 0 && description.shared.gated_by_sigmoid) {
      ASSIGN_OR_RETURN(layer.shared_gate,
                       SharedGate::Create(weights.shared_gate, description.shared.count,
                                          options.engine, options.isa));
    }
    const int64_t hidden_size = description.experts.hidden_size;
    if (description.router.input_norm.present) {
      ASSIGN_OR_RETURN(layer.gate_norm, RowNorm::Create(description.router.input_norm,
                                                        weights.input_norm, hidden_size));
    }
    if (description.expert_input_norm.present) {
      ASSIGN_OR_RETURN(layer.expert_norm, RowNorm::Create(description.expert_input_norm,
                                                          weights.expert_input_norm, hidden_size));
    }
    if (description.router.num_experts > 0) {
      ASSIGN_OR_RETURN(layer.gate, Gate::Create(description.router, std::move(weights),
                                                options.engine, options.isa));
    }
    if (options.batching.rounds_per_layer > 0) {
      layer.batcher = std::make_shared<Batcher>(description, router->membership_, options.batching,
                                                router->dispatch(), &router->executor_,
                                                &router->clock_, layer.counters);
    }
  }
  return router;
}

void Router::Forward(ForwardCall call, ForwardDone done) {
  {
    absl::MutexLock lock(&calls_->mutex);
    ++calls_->under_way;
  }
  auto batched = std::make_shared<BatchedCall>();
  batched->call = std::move(call);
  batched->done = [calls = calls_,
                   done = std::move(done)](absl::StatusOr<ForwardResult> result) mutable {
    std::move(done)(std::move(result));
    absl::MutexLock lock(&calls->mutex);
    --calls->under_way;
  };
  absl::Status status;
  try {
    status = Prepare(batched.get());
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("the router is out of memory for this call");
  }
  if (!status.ok()) return std::move(batched->done)(status);
  if (batched->tokens() == 0) return std::move(batched->done)(std::move(batched->result));
  const LayerDescription& layer = *layers_.at(batched->call.layer).description;
  if (membership_->Place(layer.layer)
          .Missing(NeededExperts(layer, TopkIds(batched->result)))
          .empty()) {
    return Submit(std::move(batched));
  }
  const bool queued = waiting_.TryRun([this, batched] {
    const absl::Status there = WaitForServers(*batched);
    if (!there.ok()) return std::move(batched->done)(there);
    Submit(batched);
  });
  if (!queued) {
    std::move(batched->done)(
        absl::ResourceExhaustedError("the router has no thread to wait for servers on"));
  }
}

void Router::Submit(std::shared_ptr<BatchedCall> call) {
  Layer& layer = layers_.at(call->call.layer);
  std::shared_ptr<Batcher> batcher = layer.batcher;
  if (batcher == nullptr) {  // one of its own
    BatchingOptions options = options_.batching;
    options.rounds_per_layer = 1;
    batcher = std::make_shared<Batcher>(*layer.description, membership_, options, dispatch(),
                                        &executor_, &clock_, layer.counters);
  }
  batcher->Submit(std::move(call));
}

absl::Status Router::Prepare(BatchedCall* batched) {
  ForwardCall& call = batched->call;
  const auto found = layers_.find(call.layer);
  if (found == layers_.end()) {
    std::vector<int32_t> layers;
    for (const auto& [layer, gate] : layers_) layers.push_back(layer);
    return absl::InvalidArgumentError(absl::StrCat("layer: expected one of the MoE layers ",
                                                   IdRanges(layers), ", got ", call.layer));
  }
  Layer& layer = found->second;
  const Tensor& hidden_states = call.hidden_states;
  const int64_t hidden_size = layer.description->experts.hidden_size;
  if (!IsActivationDType(hidden_states.dtype())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hidden_states.dtype: expected F32, BF16 or F16, got ", NameOf(hidden_states.dtype())));
  }
  if (hidden_states.shape().size() != 2 || hidden_states.dim(1) != hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat("hidden_states.shape: expected [T, ",
                                                   hidden_size, "], got ",
                                                   ShapeToString(hidden_states.shape())));
  }
  const int64_t most = std::numeric_limits<int64_t>::max() - hidden_states.dim(0);
  if (call.first_row < 0 || call.first_row > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_row: expected 0 to ", most, ", got ", call.first_row));
  }
  ForwardResult& result = batched->result;
  const absl::Time start = absl::Now();
  const Tensor seen_by_gate =
      layer.gate_norm ? layer.gate_norm->Apply(hidden_states, DType::kF32) : hidden_states;
  ASSIGN_OR_RETURN(result.routing, layer.gate ? layer.gate->Route(seen_by_gate, call.first_row)
                                              : RouteNowhere(hidden_states, hidden_size,
                                                             call.first_row, options_.isa));
  if (layer.shared_gate) {
    ASSIGN_OR_RETURN(batched->shared_weights,
                     layer.shared_gate->Weigh(hidden_states, call.first_row));
  }
  layer.counters->gate_ns += absl::ToInt64Nanoseconds(absl::Now() - start);
  result.output = Tensor(hidden_states.dtype(), hidden_states.shape());
  // Only experts see the rows from here on.
  if (layer.expert_norm) {
    call.hidden_states = layer.expert_norm->Apply(hidden_states, hidden_states.dtype());
  }
  return absl::OkStatus();
}

absl::Status Router::WaitForServers(const BatchedCall& batched) const {
  const ForwardCall& call = batched.call;
  // So early that the answer, which names the experts, is there before the caller's own clock runs
  // out.
  const absl::Duration left = call.deadline - absl::Now();
  const absl::Time answer_by = call.deadline - std::min(absl::Milliseconds(100), left / 10);
  const LayerDescription& layer = *layers_.at(call.layer).description;
  return membership_
      ->WaitFor(call.layer, NeededExperts(layer, TopkIds(batched.result)), answer_by,
                call.cancelled)
      .status();
}

}  // namespace expertmesh
