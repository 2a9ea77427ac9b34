// ClusterService: how expert servers join.
#pragma once

#include <memory>
#include <utility>

#include "common/rpc/channel.h"
#include "expertmesh/v1/cluster.grpc.pb.h"
#include "router/placement/membership.h"

namespace expertmesh {

// One Register stream per server: the server takes part from the moment the router's Dispatch
// stream to it stands until either stream breaks. Thread-safe.
class ClusterServiceImpl final
    : public v1::ClusterService::WithCallbackMethod_Register<v1::ClusterService::Service> {
 public:
  // `channel`: how the router connects to the servers.
  ClusterServiceImpl(std::shared_ptr<Membership> membership, const ChannelOptions& channel)
      : membership_(std::move(membership)), channel_(channel) {}

  grpc::ServerBidiReactor<v1::RegisterRequest, v1::RegisterResponse>* Register(
      grpc::CallbackServerContext* context) override;

 private:
  const std::shared_ptr<Membership> membership_;
  const ChannelOptions channel_;
};

}  // namespace expertmesh
