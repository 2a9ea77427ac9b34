// MoeService: what clients call.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/rpc/executor.h"
#include "expertmesh/v1/moe.grpc.pb.h"
#include "router/dispatch/router.h"

namespace expertmesh {

// Forward runs on the executor, whose threads may block; the two others answer at once.
// Thread-safe.
class MoeServiceImpl final
    : public v1::MoeService::WithRawCallbackMethod_Forward<
          v1::MoeService::WithCallbackMethod_GetModel<
              v1::MoeService::WithCallbackMethod_GetCluster<v1::MoeService::Service>>> {
 public:
  // Both outlive the service and every call.
  MoeServiceImpl(const Router* router, Executor* executor, int64_t max_queued_bytes)
      : router_(router), executor_(executor), max_queued_bytes_(max_queued_bytes) {}

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
  const Router* const router_;
  Executor* const executor_;
  const int64_t max_queued_bytes_;
  absl::Mutex mutex_;
  int64_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the requests under way
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace expertmesh
