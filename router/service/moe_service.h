// MoeService: what clients call.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "expertmesh/v1/moe.grpc.pb.h"
#include "router/dispatch/router.h"

namespace expertmesh {

// What the requests under way may take; more are refused with RESOURCE_EXHAUSTED and a hint when
// to try again.
struct AdmissionLimits {
  // Requests that have not been answered to the last byte.
  int64_t requests = 1024;
  // Bytes of these requests and of their answers; one more is always let in.
  int64_t bytes = int64_t{2} << 30;
};

// Small requests are worked on where they arrive, large ones on the router's executor. Thread-safe.
class MoeServiceImpl final
    : public v1::MoeService::WithRawCallbackMethod_Forward<
          v1::MoeService::WithCallbackMethod_GetModel<
              v1::MoeService::WithCallbackMethod_GetCluster<v1::MoeService::Service>>> {
 public:
  // The router outlives the service and every call.
  MoeServiceImpl(Router* router, const AdmissionLimits& limits)
      : router_(router), limits_(limits) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* GetCluster(grpc::CallbackServerContext* context,
                                       const v1::GetClusterRequest* request,
                                       v1::GetClusterResponse* response) override;

  // Refuses calls of Forward from now on (UNAVAILABLE) and waits until those under way have been
  // answered, at most until `deadline`.
  void Drain(absl::Time deadline);

 private:
  // OK if one more request may come in, which is counted then.
  absl::Status Admit(int64_t bytes);
  void Release(int64_t requests, int64_t bytes);

  Router* const router_;
  const AdmissionLimits limits_;
  absl::Mutex mutex_;
  int64_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace expertmesh
