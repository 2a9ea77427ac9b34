#include "router/service/moe_service.h"

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/rpc/process.h"
#include "common/rpc/status.h"
#include "router/service/forward_message.h"

namespace expertmesh {
namespace {

// Experts that are missing are so at the next attempt too: with -1, the caller's gRPC does not
// repeat the call by itself, and the caller hears the reason at once. A router that is stopping
// does not say so: the next attempt finds another one, or its successor.
constexpr char kRetryPushbackKey[] = "grpc-retry-pushback-ms";

// Decoding one and computing its gate takes no longer than handing it to another thread.
constexpr size_t kSmallRequest = 64 << 10;  // bytes

// How long it takes until requests have left a full router, give or take.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

absl::Status OutOfMemory() {
  return absl::ResourceExhaustedError("the router is out of memory for this call");
}

// One call that was let in. Shared by gRPC (until OnDone) and the router (until its answer).
class ForwardReactor final : public grpc::ServerUnaryReactor {
 public:
  // `on_done` gets the bytes of request and answer.
  ForwardReactor(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                 grpc::ByteBuffer* response, std::function<void(int64_t bytes)> charge,
                 std::function<void(int64_t bytes)> on_done)
      : context_(context),
        request_(request),
        response_(response),
        charge_(std::move(charge)),
        on_done_(std::move(on_done)),
        bytes_(static_cast<int64_t>(request->Length())) {}
  void Keep(std::shared_ptr<ForwardReactor> self) { self_ = std::move(self); }

  // Decodes, forwards, answers.
  static void Run(const std::shared_ptr<ForwardReactor>& self, Router* router) {
    if (self->cancelled_) return self->Answer(absl::CancelledError("the caller has given up"));
    v1::ForwardRequest request;
    absl::StatusOr<ForwardCall> call = OutOfMemory();
    try {
      call = DecodeForward(*router, *self->request_, &request);
    } catch (const std::bad_alloc&) {
    }
    if (!call.ok()) return self->Answer(call.status());
    call->deadline = self->deadline();
    call->cancelled = [self] { return self->cancelled_.load(); };
    router->Forward(*std::move(call), [self, with_logits = request.return_router_logits()](
                                          absl::StatusOr<ForwardResult> result) {
      if (!result.ok()) return self->Answer(result.status());
      absl::StatusOr<grpc::ByteBuffer> encoded = OutOfMemory();
      try {
        encoded = EncodeForward(*result, with_logits);
      } catch (const std::bad_alloc&) {
      }
      self->Answer(std::move(encoded));
    });
  }

  // To be called once.
  void Answer(absl::StatusOr<grpc::ByteBuffer> result) {
    if (result.ok()) {
      const int64_t bytes = static_cast<int64_t>(result->Length());
      charge_(bytes);
      bytes_ += bytes;
      *response_ = *std::move(result);
    }
    if (absl::IsUnavailable(result.status())) {
      context_->AddTrailingMetadata(kRetryPushbackKey, "-1");
    }
    Finish(ToGrpcStatus(result.status()));
  }

  void OnCancel() override { cancelled_ = true; }
  void OnDone() override {
    on_done_(bytes_);
    self_.reset();
  }

 private:
  absl::Time deadline() const { return absl::FromChrono(context_->deadline()); }

  grpc::CallbackServerContext* const context_;
  const grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  const std::function<void(int64_t)> charge_;
  const std::function<void(int64_t)> on_done_;
  std::atomic<int64_t> bytes_;
  std::atomic<bool> cancelled_ = false;
  std::shared_ptr<ForwardReactor> self_;
};

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext* context) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

const char* FormatName(const LayerDescription& layer) {
  return layer.row_format() ? NameOf(*layer.row_format()) : "native";
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

absl::Status MoeServiceImpl::Admit(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return absl::UnavailableError("the router is stopping");
  if (under_way_ >= limits_.requests) {
    return RetryLater(absl::StrCat(limits_.requests, " requests are under way in the router"),
                      kRetryAfter);
  }
  if (bytes_ > limits_.bytes) {
    return RetryLater(
        absl::StrCat("requests of more than ", limits_.bytes, " bytes are under way in the router"),
        kRetryAfter);
  }
  ++under_way_;
  bytes_ += bytes;
  return absl::OkStatus();
}

void MoeServiceImpl::Release(int64_t requests, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  under_way_ -= requests;
  bytes_ -= bytes;
}

grpc::ServerUnaryReactor* MoeServiceImpl::Forward(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  if (const absl::Status status = Admit(static_cast<int64_t>(request->Length())); !status.ok()) {
    grpc::ServerUnaryReactor* refusal = context->DefaultReactor();
    refusal->Finish(ToGrpcStatus(status));
    return refusal;
  }
  auto reactor = std::make_shared<ForwardReactor>(
      context, request, response, [this](int64_t bytes) { Release(0, -bytes); },
      [this](int64_t bytes) { Release(1, bytes); });
  reactor->Keep(reactor);
  if (request->Length() <= kSmallRequest) {
    ForwardReactor::Run(reactor, router_);
  } else if (!router_->executor().TryRun(
                 [this, reactor] { ForwardReactor::Run(reactor, router_); })) {
    reactor->Answer(RetryLater("the router has no thread for the request", kRetryAfter));
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
    // A dense layer's one network is its shared expert.
    const ExpertDescriptor& experts =
        layer.router.num_experts > 0 ? layer.experts : layer.shared.experts;
    info->set_intermediate_size(experts.intermediate_size);
    info->set_num_experts(layer.router.num_experts);
    info->set_top_k(layer.router.top_k);
    info->set_weight_dtype(NameOf(experts.weight_dtype));
    info->set_num_shared_experts(layer.shared.count);
    if (layer.shared.count > 0) {
      info->set_shared_intermediate_size(layer.shared.experts.intermediate_size);
    }
    info->set_num_identity_experts(layer.router.identity_experts);
    info->set_format(FormatName(layer));
    info->set_pad_multiple(static_cast<int32_t>(layer.pad_multiple));
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
  for (const LayerDescription& layer : router_->checkpoint().model().layers) {
    const RoundCounters& counters = router_->counters(layer.layer);
    v1::LayerRounds* rounds = response->add_layers();
    rounds->set_layer(layer.layer);
    rounds->set_rounds(counters.rounds);
    rounds->set_requests(counters.requests);
    rounds->set_tokens(counters.tokens);
    rounds->set_gate_us(counters.gate_ns / 1000);
    rounds->set_plan_us(counters.plan_ns / 1000);
    rounds->set_gather_us(counters.gather_ns / 1000);
    rounds->set_servers_us(counters.servers_ns / 1000);
    rounds->set_combine_us(counters.combine_ns / 1000);
    rounds->set_format(FormatName(layer));
    rounds->set_pairs(counters.pairs);
    rounds->set_unique_rows(counters.unique_rows);
    rounds->set_padded_positions(counters.padded_positions);
    rounds->set_row_bytes(counters.row_bytes);
    rounds->set_saturated_values(counters.saturated_values);
    rounds->set_saturated_rows(counters.saturated_rows);
    rounds->set_zero_rows(counters.zero_rows);
  }
  for (const ServerRecord& record : membership.Servers()) {
    v1::ServerInfo* info = response->add_servers();
    info->set_name(record.registration.name);
    info->set_address(record.registration.address);
    info->set_pid(record.registration.pid);
    info->set_state(ToProto(record.state));
    info->set_rows(record.rows);
    info->set_gather_us(record.gather_us);
    info->set_gemm_us(record.gemm_us);
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
