// How every process of the cluster opens channels and servers: one place for limits, keepalive and
// ports.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

struct ChannelOptions {
  // Largest message in either direction, in bytes. Default 64 MiB. At most 2 GiB - 1.
  int max_message_bytes = 64 << 20;
  // A peer that does not answer a ping for this long is gone; a ping is sent after 10 s of silence.
  // Of channels only: servers give their peers, idle clients among them, 12 s.
  absl::Duration ping_timeout = absl::Seconds(5);
};

// INVALID_ARGUMENT, naming `field`, unless `address` is one HOST:PORT or unix:/PATH. Resolves
// nothing.
absl::Status CheckAddress(const std::string& field, const std::string& address);

// A channel to "HOST:PORT" or "unix:/PATH", or, with several HOST:PORT separated by commas, to
// whichever of them answer (round robin). Calls of MoeService whose connection is lost before the
// reply are sent again within their deadline, whatever their size. Reconnects within about a second
// after an outage. One name is resolved when it is needed; several are resolved now, which blocks,
// and UNAVAILABLE says that one of them does not resolve. INVALID_ARGUMENT for what is no address.
// Thread-safe, as gRPC's channels are.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& addresses,
                                                           const ChannelOptions& options = {});

// A running gRPC server with health checking and reflection.
struct ListeningServer {
  std::unique_ptr<grpc::Server> server;
  std::string address;  // HOST:PORT with the port that was bound, or unix:/PATH
};

// Starts serving `services` (not owned; they outlive the server) on `listen` ("HOST:PORT", port 0:
// chosen by the kernel; or "unix:/PATH", a socket that is removed at the end; one that a killed
// process has left is replaced). Health is NOT_SERVING as a whole, and unknown for each service,
// until SetServing. Neither is shared: UNAVAILABLE naming it when it is in use. INVALID_ARGUMENT
// for what is no address.
absl::StatusOr<ListeningServer> StartServer(const std::string& listen,
                                            const std::vector<grpc::Service*>& services,
                                            const ChannelOptions& options = {});

// Sets the health of `server` as a whole and of each named service.
void SetServing(grpc::Server& server, const std::vector<std::string>& services, bool serving);

}  // namespace expertmesh
