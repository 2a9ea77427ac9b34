#include "client/cpp/local_cluster.h"

#include <limits>
#include <utility>

#include "common/rpc/process.h"
#include "common/status.h"

namespace expertmesh {

// A server of this process: computes on its own threads.
class LocalCluster::Backend final : public ExpertBackend {
 public:
  explicit Backend(std::unique_ptr<ExpertStore> store)
      : store_(std::move(store)),
        executor_("experts", /*max_threads=*/1, std::numeric_limits<size_t>::max()) {}

  void Dispatch(ExpertSlice slice, Done done) override {
    const bool queued =
        executor_.TryRun([this, slice = std::move(slice), done = std::move(done)]() mutable {
          std::move(done)(store_->Forward(slice.layer, slice.expert_ids, slice.m_sizes,
                                          slice.gather, slice.rows));
        });
    (void)queued;  // the queue has no limit
  }

 private:
  const std::unique_ptr<ExpertStore> store_;
  Executor executor_;  // after the store: its threads end first
};

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(
    const std::string& model_dir, const LocalClusterOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(model_dir));
  std::unique_ptr<LocalCluster> cluster(new LocalCluster());
  ASSIGN_OR_RETURN(cluster->router_, Router::Create(checkpoint, kNumerics, options.router));
  for (int32_t i = 0; i < options.servers; ++i) {
    ASSIGN_OR_RETURN(const ExpertStore::Held held,
                     ExpertStore::ShardOf(checkpoint->model(), i, options.servers));
    ASSIGN_OR_RETURN(std::unique_ptr<ExpertStore> store,
                     ExpertStore::Load(*checkpoint, held, MakeEngine(options.engine),
                                       [](const LoadProgress&) {}));
    ServerRegistration registration;
    registration.name = absl::StrCat("server-", i);
    registration.address = "in process";
    registration.model_fingerprint = checkpoint->fingerprint();
    registration.numerics = kNumerics;
    registration.experts = held;
    Membership& membership = *cluster->router_->membership();
    ASSIGN_OR_RETURN(const uint64_t ticket, membership.Register(registration));
    membership.SetServing(ticket, std::make_shared<Backend>(std::move(store)));
  }
  return cluster;
}

absl::StatusOr<MoeOutput> LocalCluster::Forward(int32_t layer, const Tensor& hidden_states) const {
  ForwardCall call;
  call.layer = layer;
  call.hidden_states = hidden_states;
  ASSIGN_OR_RETURN(ForwardResult result, router_->Forward(call));
  return MoeOutput{std::move(result.output), std::move(result.routing.topk_ids),
                   std::move(result.routing.topk_weights)};
}

}  // namespace expertmesh
