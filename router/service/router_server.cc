#include "router/service/router_server.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "common/rpc/process.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr char kMoeService[] = "expertmesh.v1.MoeService";
constexpr char kClusterService[] = "expertmesh.v1.ClusterService";
constexpr absl::Duration kFlush = absl::Milliseconds(100);  // for answers that are being sent

}  // namespace

RouterServer::RouterServer(std::unique_ptr<Router> router, const RouterServerOptions& options)
    : router_(std::move(router)),
      moe_service_(router_.get(), options.limits),
      cluster_service_(router_->membership(), options.channel) {}

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(
    std::shared_ptr<const Checkpoint> checkpoint, const RouterServerOptions& options) {
  // What goes to and comes from a server has to fit in a message too; half of one leaves room for
  // the indices.
  RouterOptions router_options = options.router;
  int64_t& max_reply_bytes = router_options.batching.max_reply_bytes;
  max_reply_bytes = std::min<int64_t>(max_reply_bytes, options.channel.max_message_bytes / 2);
  ASSIGN_OR_RETURN(std::unique_ptr<Router> router,
                   Router::Create(std::move(checkpoint), kNumerics, router_options));
  std::unique_ptr<RouterServer> server(new RouterServer(std::move(router), options));
  ASSIGN_OR_RETURN(server->listening_,
                   StartServer(options.listen, {&server->moe_service_, &server->cluster_service_},
                               options.channel));
  grpc::Server& grpc_server = *server->listening_.server;
  grpc_server.GetHealthCheckService()->SetServingStatus(kClusterService, true);
  server->router_->membership()->OnServingChange([&grpc_server](bool serving) {
    spdlog::info(serving ? "every expert has a server: serving"
                         : "experts are missing: not serving");
    // The whole server serves when the model can be computed.
    grpc_server.GetHealthCheckService()->SetServingStatus("", serving);
    grpc_server.GetHealthCheckService()->SetServingStatus(kMoeService, serving);
  });
  return server;
}

void RouterServer::Shutdown(absl::Duration grace) {
  if (listening_.server == nullptr) return;
  router_->membership()->OnServingChange(nullptr);
  SetServing(*listening_.server, {kMoeService, kClusterService}, false);
  const absl::Time deadline = absl::Now() + grace;
  moe_service_.Drain(deadline);
  // What is left are the servers' registrations, which do not end by themselves and are cancelled.
  listening_.server->Shutdown(absl::ToChronoTime(std::min(deadline, absl::Now() + kFlush)));
  listening_.server.reset();
}

RouterServer::~RouterServer() { Shutdown(absl::ZeroDuration()); }

}  // namespace expertmesh
