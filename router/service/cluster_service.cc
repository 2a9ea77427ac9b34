#include "router/service/cluster_service.h"

#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/rpc/status.h"
#include "common/status.h"
#include "router/service/grpc_expert_backend.h"

namespace expertmesh {
namespace {

constexpr int kHeartbeatIntervalMs = 1000;

ServerRegistration FromProto(const v1::Registration& message) {
  ServerRegistration registration;
  registration.name = message.name();
  registration.address = message.address();
  registration.pid = message.pid();
  registration.model_fingerprint = message.model_fingerprint();
  registration.numerics = message.numerics();
  for (const v1::LayerExperts& layer : message.layers()) {
    registration.experts[layer.layer()].assign(layer.expert_ids().begin(),
                                               layer.expert_ids().end());
  }
  return registration;
}

// One server's stream. Shared by gRPC (until OnDone) and the events of the backend.
class RegisterStream final
    : public grpc::ServerBidiReactor<v1::RegisterRequest, v1::RegisterResponse>,
      public std::enable_shared_from_this<RegisterStream> {
 public:
  RegisterStream(std::shared_ptr<Membership> membership, const ChannelOptions& channel)
      : membership_(std::move(membership)), channel_(channel) {}

  void Start() {
    absl::MutexLock lock(&mutex_);
    self_ = shared_from_this();
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    if (!ok) return End(grpc::Status::OK);
    if (ticket_ == 0) {
      if (absl::Status status = Register(); !status.ok()) return End(ToGrpcStatus(status));
    } else if (request_.has_heartbeat()) {
      const v1::Heartbeat& heartbeat = request_.heartbeat();
      membership_->SetRows(ticket_, heartbeat.rows());
      membership_->SetTimes(ticket_, heartbeat.gather_us(), heartbeat.gemm_us());
    } else {
      return End(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                              "message: expected a heartbeat after the registration"));
    }
    if (!ended_) StartRead(&request_);
  }

  void OnDone() override {
    std::shared_ptr<RegisterStream> self;  // until the end of this function
    absl::MutexLock lock(&mutex_);
    self = std::move(self_);
    if (ticket_ == 0) return;
    spdlog::warn("server {} is gone", name_);
    membership_->SetDown(ticket_);
    if (backend_ != nullptr) backend_->Close();
    backend_ = nullptr;
  }

 private:
  absl::Status Register() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!request_.has_registration()) {
      return absl::InvalidArgumentError("message: expected a registration first");
    }
    const ServerRegistration registration = FromProto(request_.registration());
    name_ = registration.name;
    address_ = registration.address;
    absl::StatusOr<uint64_t> ticket = membership_->Register(registration);
    if (!ticket.ok()) {
      return ticket.status();
    }
    ticket_ = *ticket;
    response_.set_heartbeat_interval_ms(kHeartbeatIntervalMs);
    StartWrite(&response_);
    spdlog::info("server {} registered from {}", name_, registration.address);
    absl::StatusOr<std::shared_ptr<GrpcExpertBackend>> backend = GrpcExpertBackend::Connect(
        registration.address, {registration.name, registration.model_fingerprint}, channel_,
        {.on_ready = [self = shared_from_this()] { self->Ready(); },
         .on_gone = [self =
                         shared_from_this()](const absl::Status& reason) { self->Lost(reason); }});
    if (!backend.ok()) return backend.status();
    backend_ = *std::move(backend);
    return absl::OkStatus();
  }

  // The Dispatch stream stands.
  void Ready() {
    absl::MutexLock lock(&mutex_);    // Register() has returned
    if (backend_ == nullptr) return;  // the stream has ended meanwhile
    membership_->SetServing(ticket_, backend_);
    spdlog::info("server {} is serving", name_);
  }

  // The Dispatch stream broke or could not be made: the server has to register again.
  void Lost(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    membership_->SetDown(ticket_);
    End(grpc::Status(grpc::StatusCode::UNAVAILABLE,
                     absl::StrCat("the router has no connection to ", address_, ": ",
                                  std::string(reason.message()))));
  }

  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(ended_, true)) return;
    if (!status.ok() && !name_.empty())
      spdlog::warn("server {}: {}", name_, status.error_message());
    Finish(status);
  }

  const std::shared_ptr<Membership> membership_;
  const ChannelOptions channel_;

  // gRPC runs the reactions one after the other, but on different threads, and the backend's events
  // beside them.
  absl::Mutex mutex_;
  std::shared_ptr<RegisterStream> self_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  v1::RegisterRequest request_ ABSL_GUARDED_BY(mutex_);
  v1::RegisterResponse response_ ABSL_GUARDED_BY(mutex_);
  std::string name_ ABSL_GUARDED_BY(mutex_);
  std::string address_ ABSL_GUARDED_BY(mutex_);
  uint64_t ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<GrpcExpertBackend> backend_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::RegisterRequest, v1::RegisterResponse>* ClusterServiceImpl::Register(
    grpc::CallbackServerContext*) {
  auto stream = std::make_shared<RegisterStream>(membership_, channel_);
  stream->Start();
  return stream.get();
}

}  // namespace expertmesh
