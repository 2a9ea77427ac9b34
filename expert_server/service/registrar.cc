#include "expert_server/service/registrar.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kRetryInterval = absl::Milliseconds(200);

}  // namespace

Registrar::Registrar(const std::string& router, v1::Registration registration,
                     std::function<uint64_t()> rows,
                     std::function<void(const absl::Status&)> on_refused)
    : router_(router),
      registration_(std::move(registration)),
      rows_(std::move(rows)),
      on_refused_(std::move(on_refused)),
      thread_([this] { Run(); }) {}

Registrar::~Registrar() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  thread_.join();
}

bool Registrar::SleepFor(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&stopping_), duration);
  return !stopping_;
}

void Registrar::Run() {
  bool waiting_logged = false;
  while (true) {
    const absl::Status status = RegisterOnce();
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    if (status.code() == absl::StatusCode::kFailedPrecondition ||
        status.code() == absl::StatusCode::kInvalidArgument) {
      on_refused_(status);
      return;
    }
    if (status.ok()) {
      waiting_logged = false;
    } else if (!waiting_logged) {  // once an outage, not at every attempt
      spdlog::info("waiting for the router at {}: {}", router_, std::string(status.message()));
      waiting_logged = true;
    }
    if (!SleepFor(kRetryInterval)) return;
  }
}

// OK: was registered, and the stream broke later.
absl::Status Registrar::RegisterOnce() {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, MakeChannel(router_));
  const std::unique_ptr<v1::ClusterService::Stub> stub = v1::ClusterService::NewStub(channel);
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::CancelledError();
    context_ = &context;
  }
  const auto stream = stub->Register(&context);
  v1::RegisterRequest request;
  *request.mutable_registration() = registration_;
  v1::RegisterResponse response;
  const bool registered = stream->Write(request) && stream->Read(&response);
  if (registered) {
    spdlog::info("registered with the router at {}", router_);
    const absl::Duration interval = absl::Milliseconds(response.heartbeat_interval_ms());
    v1::RegisterRequest heartbeat;
    do {
      heartbeat.mutable_heartbeat()->set_rows(rows_());
    } while (stream->Write(heartbeat) && SleepFor(interval));
    context.TryCancel();  // where Write failed the stream is gone already
  }
  const absl::Status status = FromGrpcStatus(stream->Finish());
  {
    absl::MutexLock lock(&mutex_);
    context_ = nullptr;
    if (registered && !stopping_) spdlog::warn("lost the router at {}", router_);
  }
  return registered ? absl::OkStatus() : status;
}

}  // namespace expertmesh
