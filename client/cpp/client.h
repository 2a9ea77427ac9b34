// The C++ client of a cluster.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/tensor.h"
#include "expertmesh/v1/moe.pb.h"

namespace expertmesh {

struct ClientOptions {
  // Time limit of a call, waiting for a router that is not up yet included. Default 30 s.
  absl::Duration timeout = absl::Seconds(30);
  // Largest message in either direction; a forward whose request is larger than half of it (the
  // reply is larger than the request) is split by rows, two parts under way at a time, which
  // changes no bit. Default and usual limit of the routers: 64 MiB.
  int max_message_bytes = 64 << 20;
};

// What one MoE block returns for T tokens.
struct MoeOutput {
  Tensor output;        // [T, D] in the dtype of the hidden states
  Tensor topk_ids;      // I32 [T, K]
  Tensor topk_weights;  // F32 [T, K]
};

// Thread-safe. Calls block. A call that loses its router before the reply is sent again, to this or
// another one, within its timeout; what a router refuses is not. Every error is a status:
// DEADLINE_EXCEEDED, UNAVAILABLE (no router, or experts without a server), INVALID_ARGUMENT (named
// field), ...
class Client {
 public:
  // `routers`: "HOST:PORT[,HOST:PORT]", any of them will do, or "unix:/PATH". Connects on the first
  // call; several names are resolved here.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const std::string& routers,
                                                        const ClientOptions& options = {});
  virtual ~Client() = default;

  // Runs the MoE block of decoder layer `layer`. hidden_states: [T, D] F32, BF16 or F16.
  virtual absl::StatusOr<MoeOutput> Forward(int32_t layer, const Tensor& hidden_states) = 0;

  virtual absl::StatusOr<v1::GetModelResponse> GetModel() = 0;
  virtual absl::StatusOr<v1::GetClusterResponse> GetCluster() = 0;

  // Health of the router: OK true (serving) or false, or UNAVAILABLE when none can be reached
  // within the timeout; does not wait for one that is not up.
  virtual absl::StatusOr<bool> IsServing() = 0;
};

}  // namespace expertmesh
