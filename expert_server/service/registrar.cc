#include "expert_server/service/registrar.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kFirstRetry = absl::Milliseconds(200);
constexpr absl::Duration kLongestRetry = absl::Seconds(2);
// A registration that lasted this long was a good one.
constexpr absl::Duration kStable = absl::Seconds(2);

}  // namespace

Registrar::Registrar(const std::string& router, v1::Registration registration,
                     std::function<ExpertWork()> work,
                     std::function<void(const absl::Status&)> on_refused)
    : router_(router),
      registration_(std::move(registration)),
      work_(std::move(work)),
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
  absl::Duration retry = kFirstRetry;
  std::string logged;  // the last reason: each is logged once, not at every attempt
  while (true) {
    const absl::Time start = absl::Now();
    const Attempt attempt = RegisterOnce();
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    if (!attempt.registered &&
        (absl::IsFailedPrecondition(attempt.status) || absl::IsInvalidArgument(attempt.status))) {
      on_refused_(attempt.status);
      return;
    }
    if (attempt.registered && absl::Now() - start > kStable) {
      retry = kFirstRetry;
      logged.clear();
    }
    const std::string reason =
        absl::StrCat(attempt.registered ? "lost" : "waiting for", " the router at ", router_,
                     attempt.status.ok() ? "" : ": ", std::string(attempt.status.message()));
    if (reason != logged) spdlog::warn("{}", reason);
    logged = reason;
    if (!SleepFor(retry)) return;
    retry = std::min(retry * 2, kLongestRetry);
  }
}

Registrar::Attempt Registrar::RegisterOnce() {
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(router_);
  if (!channel.ok()) return {false, absl::UnavailableError(channel.status().message())};
  const std::unique_ptr<v1::ClusterService::Stub> stub = v1::ClusterService::NewStub(*channel);
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return {false, absl::CancelledError()};
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
      const ExpertWork work = work_();
      heartbeat.mutable_heartbeat()->set_rows(work.rows);
      heartbeat.mutable_heartbeat()->set_gather_us(work.gather_us);
      heartbeat.mutable_heartbeat()->set_gemm_us(work.gemm_us);
    } while (stream->Write(heartbeat) && SleepFor(interval));
    stream->WritesDone();  // the router ends the stream, or has done so
  }
  const absl::Status status = FromGrpcStatus(stream->Finish());
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  return {registered, status};
}

}  // namespace expertmesh
