#include "tests/fuzz/cluster.h"

#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/status.h"
#include "tests/fuzz/check.h"
#include "tests/random_tensor.h"

namespace expertmesh::fuzz {
namespace {

constexpr char kNumerics[] = "numerics";

class Server final : public ExpertBackend {
 public:
  Server(int number, std::unique_ptr<ExpertStore> store, Cluster::Answer answer)
      : number_(number), store_(std::move(store)), answer_(std::move(answer)) {}
  uint64_t Dispatch(ExpertSlice slice, Done done) override {
    std::move(done)(
        answer_(number_, store_->Forward(slice.layer, slice.expert_ids, slice.m_sizes, slice.gather,
                                         slice.input_weights, slice.rows)));
    return 0;
  }
  void Cancel(uint64_t) override {}

 private:
  const int number_;
  const std::unique_ptr<ExpertStore> store_;
  const Cluster::Answer answer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Serve(
    const std::shared_ptr<const Checkpoint>& checkpoint, const Options& options,
    const Answer& answer) {
  RouterOptions router_options;
  router_options.engine = options.engine;
  router_options.startup_grace = absl::ZeroDuration();
  router_options.batching.max_tokens = options.max_tokens;
  ASSIGN_OR_RETURN(std::unique_ptr<Router> router,
                   Router::Create(checkpoint, kNumerics, router_options));
  std::unique_ptr<Cluster> cluster(new Cluster(std::move(router)));
  Membership& membership = *cluster->router_->membership();
  for (int i = 0; i < options.servers; ++i) {
    ASSIGN_OR_RETURN(const ExpertStore::Held held,
                     ExpertStore::ShardOf(checkpoint->model(), i, options.servers));
    ASSIGN_OR_RETURN(std::unique_ptr<ExpertStore> store,
                     ExpertStore::Load(*checkpoint, held, MakeEngine({.kind = options.engine}),
                                       [](const LoadProgress&) {}));
    ServerRegistration registration;
    registration.name = absl::StrCat("server-", i);
    registration.address = "in process";
    registration.model_fingerprint = checkpoint->fingerprint();
    registration.numerics = kNumerics;
    registration.experts = held;
    ASSIGN_OR_RETURN(const uint64_t ticket, membership.Register(registration));
    membership.SetServing(ticket, std::make_shared<Server>(i, std::move(store), answer));
  }
  FUZZ_CHECK(membership.Missing().empty());
  return cluster;
}

absl::StatusOr<ForwardResult> Cluster::Forward(ForwardCall call) const {
  absl::StatusOr<ForwardResult> result = absl::InternalError("not answered");
  absl::Notification answered;  // refuses to be told twice
  router_->Forward(std::move(call), [&](absl::StatusOr<ForwardResult> answer) {
    result = std::move(answer);
    answered.Notify();
  });
  answered.WaitForNotification();
  return result;
}

bool SameNumbers(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  if (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0) return true;
  const int64_t size = BytesOf(a.dtype());
  for (int64_t i = 0; i < a.num_elements(); ++i) {
    if (std::memcmp(a.data() + i * size, b.data() + i * size, static_cast<size_t>(size)) == 0) {
      continue;
    }
    if (!IsActivationDType(a.dtype()) || !std::isnan(LoadFloat(a.dtype(), a.data(), i)) ||
        !std::isnan(LoadFloat(b.dtype(), b.data(), i))) {
      return false;
    }
  }
  return true;
}

bool SameAnswer(const absl::StatusOr<ForwardResult>& a, const absl::StatusOr<ForwardResult>& b) {
  if (!a.ok() || !b.ok()) return a.status() == b.status();
  return SameNumbers(a->output, b->output) &&
         SameNumbers(a->routing.topk_ids, b->routing.topk_ids) &&
         SameNumbers(a->routing.topk_weights, b->routing.topk_weights) &&
         SameNumbers(a->routing.logits, b->routing.logits);
}

absl::Status ServeAndCompare(const std::shared_ptr<const Checkpoint>& checkpoint) {
  const auto plain = Cluster::Serve(checkpoint, {});
  const auto other =
      Cluster::Serve(checkpoint, {.engine = EngineKind::kGrouped, .servers = 2, .max_tokens = 2});
  // The first weight that is not finite depends on who reads what first.
  FUZZ_CHECK(plain.status().code() == other.status().code());
  RETURN_IF_ERROR(plain.status());
  std::mt19937 rng(2);
  for (const LayerDescription& layer : checkpoint->model().layers) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      ForwardCall call;
      call.layer = layer.layer;
      call.hidden_states = RandomTensor(dtype, {3, layer.experts.hidden_size}, 1.0f, rng);
      const auto answer = (*plain)->Forward(call);
      FUZZ_CHECK(answer.ok() || absl::IsInvalidArgument(answer.status()));  // logits not finite
      FUZZ_CHECK(SameAnswer(answer, (*other)->Forward(call)));
    }
  }
  return absl::OkStatus();
}

}  // namespace expertmesh::fuzz
