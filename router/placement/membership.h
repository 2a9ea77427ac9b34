// Which servers are there and which experts they hold. A router believes what servers register, not
// a plan.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/model/description.h"
#include "router/dispatch/expert_backend.h"

namespace expertmesh {

// How often a waiting call looks whether its caller has given up.
inline constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);

// What a server says of itself.
struct ServerRegistration {
  std::string name;
  std::string address;
  int64_t pid = 0;
  std::string model_fingerprint;
  std::string numerics;
  std::map<int32_t, std::vector<int32_t>> experts;  // layer -> global expert ids, ascending
};

enum class ServerState { kConnecting, kServing, kDown };

// A server as the router sees it.
struct ServerRecord {
  ServerRegistration registration;
  ServerState state = ServerState::kConnecting;
  uint64_t rows = 0;  // pairs computed since the server started
  // Time spent since then, in microseconds: on bringing rows to where they are computed, and on
  // everything else of the experts.
  uint64_t gather_us = 0;
  uint64_t gemm_us = 0;
};

// Where the experts of one layer are, at one epoch.
struct LayerPlacement {
  uint64_t epoch = 0;
  // By id, of the routed experts, then of the shared ones: index into backends, or -1.
  std::vector<int32_t> server_of_expert;
  std::vector<int32_t> shared_servers;  // those that hold all shared experts, if there are any
  std::vector<std::shared_ptr<ExpertBackend>> backends;

  // Those of `experts` that have no server, ascending.
  std::vector<int32_t> Missing(absl::Span<const int32_t> experts) const;
};

// UNAVAILABLE naming experts that nobody holds; `why` follows.
absl::Status NoServer(int32_t layer, absl::Span<const int32_t> experts,
                      const std::string& why = "");

// Thread-safe.
class Membership {
 public:
  // Calls for experts that no server has held since the start wait for at most `startup_grace` from
  // now.
  Membership(const ModelDescription& model, std::string fingerprint, std::string numerics,
             absl::Duration startup_grace);

  // Adds a server in state kConnecting. A registration of the same name from the same address, or
  // after the old one went down, replaces it. Returns a ticket that names this registration in the
  // calls below. FAILED_PRECONDITION when fingerprint or numerics differ from the router's;
  // INVALID_ARGUMENT when it names layers or experts that the model does not have; ALREADY_EXISTS
  // when a live server at another address has the name.
  absl::StatusOr<uint64_t> Register(const ServerRegistration& registration);

  // The server can be reached through `backend` from now on. No effect if the ticket is not
  // current: the registration has been replaced, or the server is down.
  void SetServing(uint64_t ticket, std::shared_ptr<ExpertBackend> backend);
  void SetRows(uint64_t ticket, uint64_t rows);
  void SetTimes(uint64_t ticket, uint64_t gather_us, uint64_t gemm_us);
  // The server is gone: it stays on the list as kDown until it registers again. No effect if the
  // ticket is not current.
  void SetDown(uint64_t ticket);

  // Placement of every expert in `experts` of that layer. Waits for servers that have not
  // registered yet, at most until `deadline` and the end of the grace period, and while `cancelled`
  // returns false. UNAVAILABLE naming the experts without a server; at once when a server held them
  // before. CANCELLED.
  absl::StatusOr<LayerPlacement> WaitFor(int32_t layer, absl::Span<const int32_t> experts,
                                         absl::Time deadline,
                                         const std::function<bool()>& cancelled) const;

  // As it is now, with experts missing or not, as if the servers `without` were down. The model has
  // the layer.
  LayerPlacement Place(int32_t layer,
                       absl::Span<const std::shared_ptr<ExpertBackend>> without = {}) const;

  // Every server that registered since the start, by name.
  std::vector<ServerRecord> Servers() const;
  uint64_t epoch() const;
  // Empty when every expert of every layer has a serving server, else what is missing.
  std::string Missing() const;
  // Called at once with the present state, and after every change of Missing() from or to empty;
  // must not call back. Null ends that.
  void OnServingChange(std::function<void(bool serving)> callback);

 private:
  struct Server {
    ServerRecord record;
    uint64_t ticket = 0;
    std::shared_ptr<ExpertBackend> backend;  // null unless serving
  };

  // Null if the ticket is not current.
  Server* Find(uint64_t ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Changed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string MissingLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  LayerPlacement PlaceLocked(const LayerDescription& layer,
                             absl::Span<const std::shared_ptr<ExpertBackend>> without = {}) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const ModelDescription model_;
  const std::string fingerprint_;
  const std::string numerics_;
  const absl::Time grace_end_;

  mutable absl::Mutex mutex_;
  mutable absl::CondVar changed_;
  std::map<std::string, Server> servers_ ABSL_GUARDED_BY(mutex_);
  // layer -> [E]: a server held the expert at some time since the start
  std::map<int32_t, std::vector<bool>> ever_served_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 1;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void(bool)> on_serving_change_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertmesh
