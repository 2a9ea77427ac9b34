#include "client/cpp/local_cluster.h"

#include <limits>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "common/executor.h"
#include "common/rpc/process.h"
#include "common/status.h"

namespace expertmesh {
// A server of this process: computes on its own threads.
class LocalCluster::Backend final : public ExpertBackend {
 public:
  explicit Backend(std::unique_ptr<ExpertStore> store)
      : store_(std::move(store)),
        executor_(std::make_unique<Executor>("experts", /*max_threads=*/1,
                                             std::numeric_limits<size_t>::max())) {}

  uint64_t Dispatch(ExpertSlice slice, Done done) override {
    const bool queued =
        executor_->TryRun([this, slice = std::move(slice), done = std::move(done)]() mutable {
          std::move(done)(store_->Forward(slice.layer, slice.expert_ids, slice.m_sizes,
                                          slice.gather, slice.input_weights, slice.rows));
        });
    (void)queued;  // the queue has no limit
    return 0;
  }

  // Calls of this process have no deadline and cannot be cancelled.
  void Cancel(uint64_t) override {}

  // Ends its threads. Not left to the destructor: the last reference may go on one of them.
  void Stop() { executor_.reset(); }

 private:
  const std::unique_ptr<ExpertStore> store_;
  std::unique_ptr<Executor> executor_;
};

LocalCluster::~LocalCluster() {
  for (const std::shared_ptr<Backend>& backend : backends_) backend->Stop();
}

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(
    const std::string& model_dir, const LocalClusterOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(model_dir));
  return Start(std::move(checkpoint), options);
}

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(
    std::shared_ptr<const Checkpoint> checkpoint, const LocalClusterOptions& options) {
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
    cluster->backends_.push_back(std::make_shared<Backend>(std::move(store)));
    membership.SetServing(ticket, cluster->backends_.back());
  }
  return cluster;
}

absl::StatusOr<MoeOutput> LocalCluster::Forward(int32_t layer, const Tensor& hidden_states) const {
  ForwardCall call;
  call.layer = layer;
  call.hidden_states = hidden_states;
  absl::StatusOr<ForwardResult> result = absl::InternalError("not answered");
  absl::Mutex mutex;
  bool answered = false;
  router_->Forward(std::move(call), [&](absl::StatusOr<ForwardResult> answer) {
    absl::MutexLock lock(&mutex);
    result = std::move(answer);
    answered = true;
  });
  absl::MutexLock lock(&mutex, absl::Condition(&answered));
  RETURN_IF_ERROR(result.status());
  return MoeOutput{std::move(result->output), std::move(result->routing.topk_ids),
                   std::move(result->routing.topk_weights)};
}

}  // namespace expertmesh
