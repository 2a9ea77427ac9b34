// Keeps an expert server registered with its router.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "expert_server/engine/expert_store.h"
#include "expertmesh/v1/cluster.grpc.pb.h"

namespace expertmesh {

// Registers, sends heartbeats, and starts over whenever the stream breaks, for as long as it lives:
// router and servers may come and go in any order.
class Registrar {
 public:
  // `work` gives what the heartbeats say. `router` is HOST:PORT. `on_refused` is called, once
  // and on the registrar's thread, when the router says that this server can never take part
  // (another model, other numerics).
  Registrar(const std::string& router, v1::Registration registration,
            std::function<ExpertWork()> work, std::function<void(const absl::Status&)> on_refused);
  // Leaves the cluster.
  ~Registrar();

 private:
  // How one attempt ended.
  struct Attempt {
    bool registered = false;  // for a while
    absl::Status status;      // why it is over
  };

  void Run();
  Attempt RegisterOnce();
  // Sleeps; false when it is time to stop.
  bool SleepFor(absl::Duration duration);

  const std::string router_;
  const v1::Registration registration_;
  const std::function<ExpertWork()> work_;
  const std::function<void(const absl::Status&)> on_refused_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the stream that is open
  std::thread thread_;
};

}  // namespace expertmesh
