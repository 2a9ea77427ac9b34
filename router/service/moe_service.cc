#include "router/service/moe_service.h"

#include <atomic>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "common/rpc/process.h"
#include "common/rpc/status.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// A caller with less time than this left is told not to try again: gRPC would repeat the call by
// itself, the deadline would end that, and the reason would be lost.
constexpr absl::Duration kNoTimeToRetry = absl::Milliseconds(250);
constexpr char kRetryPushbackKey[] = "grpc-retry-pushback-ms";  // -1: do not

// Refuses what the contract reserves for later, by name.
absl::Status CheckSupported(const v1::ForwardRequest& request) {
  const auto refuse = [](const char* field) {
    return absl::UnimplementedError(absl::StrCat(field, ": not supported by this version"));
  };
  if (request.save_for_backward()) return refuse("save_for_backward");
  if (!request.context_id().empty()) return refuse("context_id");
  if (request.has_topk_ids()) return refuse("topk_ids");
  if (request.has_topk_weights()) return refuse("topk_weights");
  if (request.has_input_ids()) return refuse("input_ids");
  return absl::OkStatus();
}

absl::StatusOr<grpc::ByteBuffer> RunForward(const Router& router, const grpc::ByteBuffer& bytes,
                                            absl::Time deadline,
                                            const std::function<bool()>& cancelled) {
  v1::ForwardRequest request;
  Tensor hidden_states;
  RETURN_IF_ERROR(DecodeWithTensor(bytes, "hidden_states", &request, &hidden_states));
  RETURN_IF_ERROR(CheckSupported(request));
  const std::string& fingerprint = router.checkpoint().fingerprint();
  if (!request.model_fingerprint().empty() && request.model_fingerprint() != fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat("model_fingerprint: expected ", fingerprint,
                                                      ", got ", request.model_fingerprint()));
  }
  if (const uint64_t epoch = router.membership()->epoch();
      request.placement_epoch() != 0 && request.placement_epoch() != epoch) {
    return absl::FailedPreconditionError(
        absl::StrCat("placement_epoch: expected ", epoch, ", got ", request.placement_epoch()));
  }
  ForwardCall call;
  call.layer = request.layer();
  call.hidden_states = hidden_states;
  call.first_row = request.first_row();
  call.deadline = deadline;
  call.cancelled = cancelled;
  ASSIGN_OR_RETURN(const ForwardResult result, router.Forward(call));
  v1::ForwardResponse response;
  ToProto(result.routing.topk_ids, response.mutable_topk_ids());
  ToProto(result.routing.topk_weights, response.mutable_topk_weights());
  if (request.return_router_logits()) {
    ToProto(result.routing.logits, response.mutable_router_logits());
  }
  return EncodeWithTensor(response, result.output);
}

// One call. The executor's task and gRPC each hold it until they are done with it.
class ForwardReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit ForwardReactor(absl::AnyInvocable<void()> on_done) : on_done_(std::move(on_done)) {}
  void Keep(std::shared_ptr<ForwardReactor> self) { self_ = std::move(self); }
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override {
    std::move(on_done_)();
    self_.reset();
  }
  bool cancelled() const { return cancelled_; }

 private:
  absl::AnyInvocable<void()> on_done_;
  std::atomic<bool> cancelled_ = false;
  std::shared_ptr<ForwardReactor> self_;
};

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext* context) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

v1::ServerInfo::State ToProto(ServerState state) {
  switch (state) {
    case ServerState::kServing:
      return v1::ServerInfo::STATE_SERVING;
    case ServerState::kConnecting:
      return v1::ServerInfo::STATE_CONNECTING;
    case ServerState::kDown:
      return v1::ServerInfo::STATE_DOWN;
  }
  return v1::ServerInfo::STATE_UNSPECIFIED;
}

}  // namespace

grpc::ServerUnaryReactor* MoeServiceImpl::Forward(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  const int64_t bytes = static_cast<int64_t>(request->Length());
  auto reactor = std::make_shared<ForwardReactor>([this, bytes] {
    absl::MutexLock lock(&mutex_);
    --under_way_;
    bytes_ -= bytes;
  });
  reactor->Keep(reactor);
  bool draining, full;
  {
    absl::MutexLock lock(&mutex_);
    full = bytes_ > max_queued_bytes_;
    ++under_way_;
    bytes_ += bytes;
    draining = draining_;
  }
  if (draining) {
    reactor->Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the router is stopping"));
    return reactor.get();
  }
  if (full) {
    reactor->Finish(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                 absl::StrCat("requests of more than ", max_queued_bytes_,
                                              " bytes are under way in the router; retry later")));
    return reactor.get();
  }
  const absl::Time deadline = absl::FromChrono(context->deadline());
  const bool queued = executor_->TryRun([this, reactor, context, deadline, request, response] {
    absl::StatusOr<grpc::ByteBuffer> result =
        reactor->cancelled()
            ? absl::CancelledError("the caller has given up")
            : RunForward(*router_, *request, deadline, [&reactor] { return reactor->cancelled(); });
    if (result.ok()) *response = *std::move(result);
    if (absl::IsUnavailable(result.status()) && deadline - absl::Now() < kNoTimeToRetry) {
      context->AddTrailingMetadata(kRetryPushbackKey, "-1");
    }
    reactor->Finish(ToGrpcStatus(result.status()));
  });
  if (!queued) {
    reactor->Finish(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                 absl::StrCat("the router's queue of ", executor_->max_queued(),
                                              " requests is full; retry later")));
  }
  return reactor.get();
}

void MoeServiceImpl::Drain(absl::Time deadline) {
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return under_way_ == 0; };
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  mutex_.AwaitWithDeadline(absl::Condition(&answered), deadline);
}

grpc::ServerUnaryReactor* MoeServiceImpl::GetModel(grpc::CallbackServerContext* context,
                                                   const v1::GetModelRequest*,
                                                   v1::GetModelResponse* response) {
  const ModelDescription& model = router_->checkpoint().model();
  response->set_model_fingerprint(router_->checkpoint().fingerprint());
  response->set_model_type(model.model_type);
  for (const LayerDescription& layer : model.layers) {
    v1::LayerInfo* info = response->add_layers();
    info->set_layer(layer.layer);
    info->set_kind(layer.kind == LayerKind::kMoe ? v1::LayerInfo::KIND_MOE
                                                 : v1::LayerInfo::KIND_DENSE);
    info->set_hidden_size(layer.experts.hidden_size);
    info->set_intermediate_size(layer.experts.intermediate_size);
    info->set_num_experts(layer.router.num_experts);
    info->set_top_k(layer.router.top_k);
    info->set_weight_dtype(NameOf(layer.experts.weight_dtype));
    info->set_format("native");
    info->set_pad_multiple(1);
  }
  return FinishNow(context);
}

grpc::ServerUnaryReactor* MoeServiceImpl::GetCluster(grpc::CallbackServerContext* context,
                                                     const v1::GetClusterRequest*,
                                                     v1::GetClusterResponse* response) {
  const Membership& membership = *router_->membership();
  response->set_placement_epoch(membership.epoch());
  response->set_missing(membership.Missing());
  response->set_serving(response->missing().empty());
  response->set_version(kVersion);
  for (const ServerRecord& record : membership.Servers()) {
    v1::ServerInfo* info = response->add_servers();
    info->set_name(record.registration.name);
    info->set_address(record.registration.address);
    info->set_pid(record.registration.pid);
    info->set_state(ToProto(record.state));
    info->set_rows(record.rows);
    info->set_numerics(record.registration.numerics);
    for (const auto& [layer, experts] : record.registration.experts) {
      v1::LayerExperts* held = info->add_layers();
      held->set_layer(layer);
      held->mutable_expert_ids()->Add(experts.begin(), experts.end());
    }
  }
  return FinishNow(context);
}

}  // namespace expertmesh
