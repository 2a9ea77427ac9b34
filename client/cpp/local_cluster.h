// A router and expert servers in one process, without gRPC between them: to try things, and to
// compare with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "common/model/checkpoint.h"
#include "expert_server/engine/expert_store.h"
#include "router/dispatch/router.h"

namespace expertmesh {

struct LocalClusterOptions {
  int32_t servers = 1;
  EngineOptions engine;  // of each server
  RouterOptions router = {};
};

// The same router and the same experts as in a cluster of processes, and so the same bits.
// Thread-safe.
class LocalCluster {
 public:
  // Loads the whole model. Errors of Checkpoint::Open and ExpertStore::Load.
  static absl::StatusOr<std::unique_ptr<LocalCluster>> Start(
      const std::string& model_dir, const LocalClusterOptions& options = {});
  static absl::StatusOr<std::unique_ptr<LocalCluster>> Start(
      std::shared_ptr<const Checkpoint> checkpoint, const LocalClusterOptions& options = {});

  ~LocalCluster();

  // As Client::Forward.
  absl::StatusOr<MoeOutput> Forward(int32_t layer, const Tensor& hidden_states) const;

  const Checkpoint& checkpoint() const { return router_->checkpoint(); }
  Router& router() { return *router_; }

 private:
  class Backend;

  LocalCluster() = default;
  std::unique_ptr<Router> router_;
  std::vector<std::shared_ptr<Backend>> backends_;
};

}  // namespace expertmesh
