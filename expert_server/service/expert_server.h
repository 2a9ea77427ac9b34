// A whole expert server: loads its shard, serves it, keeps itself registered.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/executor.h"
#include "common/model/checkpoint.h"
#include "common/rpc/channel.h"
#include "expert_server/engine/expert_store.h"
#include "expert_server/service/expert_service.h"
#include "expert_server/service/registrar.h"

namespace expertmesh {

struct ExpertServerOptions {
  std::string listen = "127.0.0.1:7080";  // port 0: chosen by the kernel
  std::string advertise;  // HOST:PORT that routers connect to; empty: the address listened on
  std::string router = "127.0.0.1:7070";
  std::string name;  // unique in the cluster; empty: "server-<shard>"
  int32_t shard = 0;
  int32_t num_shards = 1;
  EngineOptions engine = {};
  ExpertsFactory experts;  // what computes instead of `engine`, if set
  ChannelOptions channel;
  size_t max_queued = 1024;  // slices that wait for them
};

class ExpertServer {
 public:
  // Listens, then loads (blocking; `progress` after each expert), then registers and serves.
  // `on_refused` as for Registrar. Errors of StartServer, ExpertStore::Load; INVALID_ARGUMENT for a
  // bad shard, for what is no address and for what is no name (CheckServerName).
  static absl::StatusOr<std::unique_ptr<ExpertServer>> Start(
      const Checkpoint& checkpoint, const ExpertServerOptions& options,
      const std::function<void(const LoadProgress&)>& progress,
      std::function<void(const absl::Status&)> on_refused);

  // Leaves the cluster, finishes the slices under way within `grace`, and stops.
  void Shutdown(absl::Duration grace);
  ~ExpertServer();

  const std::string& address() const { return listening_.address; }
  const ExpertStore& store() const { return *store_; }

 private:
  ExpertServer(const ExpertServerOptions& options);

  Executor executor_;
  ExpertServiceImpl service_;
  std::unique_ptr<ExpertStore> store_;
  ListeningServer listening_;
  std::unique_ptr<Registrar> registrar_;
};

}  // namespace expertmesh
