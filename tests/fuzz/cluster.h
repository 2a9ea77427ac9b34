// A cluster in one process: a router whose servers answer before they are left.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"
#include "expert_server/engine/expert_store.h"
#include "router/dispatch/router.h"

namespace expertmesh::fuzz {

class Cluster {
 public:
  struct Options {
    EngineKind engine = EngineKind::kForLoop;  // of the router and the servers
    int servers = 1;
    int64_t max_tokens = 4096;  // of a round
  };
  // What server number `server` answers to a slice, instead of what it has computed.
  using Answer = std::function<absl::StatusOr<Tensor>(int server, absl::StatusOr<Tensor> computed)>;

  // Errors are those of Router::Create and ExpertStore::Load.
  static absl::StatusOr<std::unique_ptr<Cluster>> Serve(
      const std::shared_ptr<const Checkpoint>& checkpoint, const Options& options,
      const Answer& answer = [](int, absl::StatusOr<Tensor> computed) { return computed; });

  absl::StatusOr<ForwardResult> Forward(ForwardCall call) const;
  const Router& router() const { return *router_; }

 private:
  explicit Cluster(std::unique_ptr<Router> router) : router_(std::move(router)) {}

  const std::unique_ptr<Router> router_;
};

// Bits, but for NaNs: all are alike.
bool SameNumbers(const Tensor& a, const Tensor& b);

// The two answers to a call: the same error, or the same numbers.
bool SameAnswer(const absl::StatusOr<ForwardResult>& a, const absl::StatusOr<ForwardResult>& b);

// Serves the model by two clusters that have nothing in common, and calls every layer. Ends the
// process unless both give the same. The error, of both, if it cannot be served.
absl::Status ServeAndCompare(const std::shared_ptr<const Checkpoint>& checkpoint);

}  // namespace expertmesh::fuzz
