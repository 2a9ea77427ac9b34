// MoeService: what clients call.
#pragma once

#include <memory>

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
  MoeServiceImpl(const Router* router, Executor* executor) : router_(router), executor_(executor) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* GetCluster(grpc::CallbackServerContext* context,
                                       const v1::GetClusterRequest* request,
                                       v1::GetClusterResponse* response) override;

 private:
  const Router* const router_;
  Executor* const executor_;
};

}  // namespace expertmesh
