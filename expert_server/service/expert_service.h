// ExpertService: slices in, rows out.
#pragma once

#include <memory>

#include "absl/functional/any_invocable.h"
#include "common/rpc/executor.h"
#include "expert_server/engine/expert_store.h"
#include "expertmesh/v1/expert.grpc.pb.h"

namespace expertmesh {

// One Dispatch stream per router. gRPC's threads decode and queue; the executor computes and its
// threads write. A slice that cannot be computed is answered with its error and the stream goes on.
// Thread-safe.
class ExpertServiceImpl final
    : public v1::ExpertService::WithRawCallbackMethod_Dispatch<v1::ExpertService::Service> {
 public:
  // Both outlive the service. Slices that come before SetStore are answered UNAVAILABLE.
  explicit ExpertServiceImpl(Executor* executor) : executor_(executor) {}
  void SetStore(const ExpertStore* store) { store_ = store; }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Dispatch(
      grpc::CallbackServerContext* context) override;

 private:
  Executor* const executor_;
  std::atomic<const ExpertStore*> store_ = nullptr;
};

}  // namespace expertmesh
