// ExpertService: slices in, rows out.
#pragma once

#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "common/executor.h"
#include "common/rpc/server_identity.h"
#include "expert_server/engine/expert_store.h"
#include "expertmesh/v1/expert.grpc.pb.h"

namespace expertmesh {

// One Dispatch stream per router. gRPC's threads decode and queue; the executor computes and its
// threads write. A slice that cannot be computed is answered with its error and the stream goes on.
// Thread-safe.
class ExpertServiceImpl final
    : public v1::ExpertService::WithRawCallbackMethod_Dispatch<v1::ExpertService::Service> {
 public:
  // `executor` outlives the service. Replies of more than max_message_bytes are refused. Streams
  // that come before SetStore are ended with UNAVAILABLE.
  ExpertServiceImpl(Executor* executor, int64_t max_message_bytes)
      : executor_(executor), max_message_bytes_(max_message_bytes) {}

  // What is served from now on, and who says so to the routers. To be called once; `store` outlives
  // the service.
  void SetStore(const ExpertStore* store, ServerIdentity identity);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Dispatch(
      grpc::CallbackServerContext* context) override;

 private:
  Executor* const executor_;
  const int64_t max_message_bytes_;
  absl::Mutex mutex_;
  const ExpertStore* store_ ABSL_GUARDED_BY(mutex_) = nullptr;
  ServerIdentity identity_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertmesh
