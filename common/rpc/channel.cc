#include "common/rpc/channel.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// A peer that stops answering is noticed within kKeepaliveTimeMs + kKeepaliveTimeoutMs. Servers
// permit pings more often than anyone sends them, else they would answer GOAWAY "too_many_pings".
constexpr int kKeepaliveTimeMs = 10'000;
constexpr int kKeepaliveTimeoutMs = 5'000;
constexpr int kMinPingIntervalMs = 5'000;

// "HOST:PORT" as gRPC's ipv4: and ipv6: targets want it: numeric.
absl::StatusOr<std::vector<std::string>> Resolve(const std::string& address, bool* ipv6) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("address: expected HOST:PORT, got \"", address, "\""));
  }
  std::string host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string port = address.substr(colon + 1);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("address: cannot resolve \"", address, "\": ", gai_strerror(error)));
  }
  std::vector<std::string> v4, v6;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    char numeric[NI_MAXHOST];
    if (getnameinfo(a->ai_addr, a->ai_addrlen, numeric, sizeof(numeric), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    if (a->ai_family == AF_INET) v4.push_back(absl::StrCat(numeric, ":", port));
    if (a->ai_family == AF_INET6) v6.push_back(absl::StrCat("[", numeric, "]:", port));
  }
  freeaddrinfo(found);
  *ipv6 = v4.empty();
  return *ipv6 ? v6 : v4;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& addresses,
                                                           const ChannelOptions& options) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(options.max_message_bytes);
  args.SetMaxSendMessageSize(options.max_message_bytes);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // Loopback and cluster addresses never go through a proxy of the environment.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  std::string target = addresses;
  const std::vector<std::string> list = absl::StrSplit(addresses, ',', absl::SkipEmpty());
  if (list.empty()) {
    return absl::InvalidArgumentError("address: expected HOST:PORT[,HOST:PORT], got nothing");
  }
  if (!absl::StartsWith(addresses, "unix:")) {
    std::vector<std::string> v4, v6;
    for (const std::string& address : list) {
      bool ipv6 = false;
      ASSIGN_OR_RETURN(const std::vector<std::string> resolved, Resolve(address, &ipv6));
      if (list.size() == 1 && resolved.size() > 1) continue;  // left to gRPC's resolver, below
      (ipv6 ? v6 : v4).insert((ipv6 ? v6 : v4).end(), resolved.begin(), resolved.end());
    }
    if (!v4.empty() && !v6.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("address: IPv4 and IPv6 cannot be mixed in \"", addresses, "\""));
    }
    if (!v4.empty()) target = absl::StrCat("ipv4:", absl::StrJoin(v4, ","));
    if (!v6.empty()) target = absl::StrCat("ipv6:", absl::StrJoin(v6, ","));
    if (list.size() > 1) args.SetLoadBalancingPolicyName("round_robin");
  }
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), args);
}

absl::StatusOr<ListeningServer> StartServer(const std::string& listen,
                                            const std::vector<grpc::Service*>& services,
                                            const ChannelOptions& options) {
  const bool is_unix = absl::StartsWith(listen, "unix:");
  const size_t colon = listen.rfind(':');
  if (!is_unix && (colon == std::string::npos || colon == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen: expected HOST:PORT, got \"", listen, "\""));
  }
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = -1;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || (!is_unix && port <= 0)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", listen,
                     ": the port is in use or the address is not one of this machine; choose "
                     "another with --listen (port 0: any free one)"));
  }
  ListeningServer listening;
  listening.address = is_unix ? listen : absl::StrCat(listen.substr(0, colon), ":", port);
  listening.server = std::move(server);
  return listening;
}

void SetServing(grpc::Server& server, const std::vector<std::string>& services, bool serving) {
  grpc::HealthCheckServiceInterface* health = server.GetHealthCheckService();
  health->SetServingStatus("", serving);
  for (const std::string& service : services) health->SetServingStatus(service, serving);
}

}  // namespace expertmesh
