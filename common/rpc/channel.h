// How every process of the cluster opens channels and servers: one place for limits, keepalive and
// ports.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

struct ChannelOptions {
  // Largest message in either direction, in bytes. Default 64 MiB. At most 2 GiB - 1.
  int max_message_bytes = 64 << 20;
};

// A channel to one address, or, with several, to whichever of them answer (round robin). An address
// is "HOST:PORT" or "unix:PATH"; several are separated by commas and must be numeric or resolvable
// now. Reconnects within about a second after an outage. Thread-safe, as gRPC's channels are.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& addresses,
                                                           const ChannelOptions& options = {});

// A running gRPC server with health checking and reflection.
struct ListeningServer {
  std::unique_ptr<grpc::Server> server;
  std::string address;  // HOST:PORT with the port that was bound
};

// Starts serving `services` (not owned; they outlive the server) on `listen` ("HOST:PORT", port 0:
// chosen by the kernel; "unix:PATH"). Health is NOT_SERVING for "" and every service until
// SetServing. The port is not shared: UNAVAILABLE naming it when it is in use.
absl::StatusOr<ListeningServer> StartServer(const std::string& listen,
                                            const std::vector<grpc::Service*>& services,
                                            const ChannelOptions& options = {});

// Sets the health of `server` as a whole and of each named service.
void SetServing(grpc::Server& server, const std::vector<std::string>& services, bool serving);

}  // namespace expertmesh
