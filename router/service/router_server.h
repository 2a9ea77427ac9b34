// A whole router: MoeService for clients, ClusterService for expert servers.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"
#include "common/rpc/channel.h"
#include "router/dispatch/router.h"
#include "router/service/cluster_service.h"
#include "router/service/moe_service.h"

namespace expertmesh {

struct RouterServerOptions {
  std::string listen = "127.0.0.1:7070";  // port 0: chosen by the kernel
  AdmissionLimits limits;
  ChannelOptions channel;
  RouterOptions router;
};

class RouterServer {
 public:
  // Reads the gates and serves. Health is SERVING while every expert of every layer has a server.
  // Errors of Router::Create and StartServer.
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(
      std::shared_ptr<const Checkpoint> checkpoint, const RouterServerOptions& options);

  // Refuses new calls, finishes those under way within `grace`, and stops.
  void Shutdown(absl::Duration grace);
  ~RouterServer();

  const std::string& address() const { return listening_.address; }
  const Router& router() const { return *router_; }

 private:
  RouterServer(std::unique_ptr<Router> router, const RouterServerOptions& options);

  const std::unique_ptr<Router> router_;
  MoeServiceImpl moe_service_;
  ClusterServiceImpl cluster_service_;
  ListeningServer listening_;
};

}  // namespace expertmesh
