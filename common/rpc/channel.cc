#include "common/rpc/channel.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// A peer that stops answering is noticed within kKeepaliveTimeMs and the time-out. Servers permit
// pings more often than anyone sends them, else they would answer GOAWAY "too_many_pings".
constexpr int kKeepaliveTimeMs = 10'000;
constexpr int kServerPingTimeoutMs = 12'000;
constexpr int kMinPingIntervalMs = 5'000;

// How long one attempt to connect may take; gRPC calls this the minimal back-off.
constexpr int kConnectTimeoutMs = 5'000;

// gRPC retries no message that is larger than this buffer, by default 256 KiB. What a message has
// beside the limited bytes fits in the rest.
constexpr int kRetryBufferExtraBytes = 64 << 10;

// Every call of MoeService is idempotent. UNAVAILABLE is what gRPC makes of a connection that was
// lost, and of a router that is stopping: this router will be started again, or another is there.
// A router that means its UNAVAILABLE says so by grpc-retry-pushback-ms: -1, and gRPC returns it at
// once. The same is in client/python/src/expertmesh/target.py.
constexpr char kServiceConfig[] = R"({"methodConfig": [{
  "name": [{"service": "expertmesh.v1.MoeService"}],
  "retryPolicy": {
    "maxAttempts": 3,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"]
  }
}]})";

constexpr char kUnix[] = "unix:";

struct HostPort {
  std::string host;  // without brackets
  std::string port;
};

// `field`: what the address is called in the error text.
absl::StatusOr<HostPort> Parse(const std::string& field, const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon != std::string::npos && colon > 0) {
    HostPort parsed = {address.substr(0, colon), address.substr(colon + 1)};
    const bool brackets =
        parsed.host.size() > 2 && parsed.host.front() == '[' && parsed.host.back() == ']';
    if (brackets) parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
    int port = -1;
    if ((brackets || parsed.host.find_first_of(":[]") == std::string::npos) &&
        absl::SimpleAtoi(parsed.port, &port) && port >= 0 && port <= 65535) {
      return parsed;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      field,
      ": expected HOST:PORT with a port from 0 to 65535 (IPv6 as [ADDRESS]:PORT), or unix:/PATH, "
      "got \"",
      address, "\""));
}

bool IsUnix(const std::string& address) { return absl::StartsWith(address, kUnix); }

// What follows unix: is a path that means the same in every process, to the kernel, and to gRPC,
// which takes it for part of a URI.
absl::Status CheckUnix(const std::string& field, const std::string& address) {
  const std::string path = address.substr(sizeof(kUnix) - 1);
  const bool plain = std::all_of(path.begin(), path.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("/._-+@=~", std::string(1, c));
  });
  if (path.size() > 1 && path.size() < sizeof(sockaddr_un::sun_path) && path[0] == '/' && plain) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": expected unix:/PATH, absolute, of at most ", sizeof(sockaddr_un::sun_path) - 1,
      " letters, digits and /._-+@=~, got \"", address, "\""));
}

// gRPC takes the place of any socket file. Only one that nobody listens on any more may go.
absl::Status CheckNobodyListens(const std::string& address) {
  const std::string path = address.substr(sizeof(kUnix) - 1);
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) return absl::OkStatus();
  if (!S_ISSOCK(file.st_mode)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": the file is there and no socket"));
  }
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool refused =
      connect(probe, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 &&
      errno == ECONNREFUSED;
  close(probe);
  if (refused) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address, ": the socket is in use; choose another path"));
}

// The addresses of several routers, as gRPC's ipv4: and ipv6: targets want them: numeric.
// UNAVAILABLE when a name does not resolve (now).
absl::StatusOr<std::string> ResolveAll(const std::vector<HostPort>& addresses) {
  std::vector<std::string> v4, v6;
  for (const HostPort& address : addresses) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found);
    if (error != 0) {
      return absl::UnavailableError(
          absl::StrCat("address: cannot resolve \"", address.host, "\": ", gai_strerror(error)));
    }
    // One of each router: the first IPv4 address, else the first of all.
    const addrinfo* chosen = found;
    for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
      if (a->ai_family == AF_INET) {
        chosen = a;
        break;
      }
    }
    char numeric[NI_MAXHOST];
    const int failed = getnameinfo(chosen->ai_addr, chosen->ai_addrlen, numeric, sizeof(numeric),
                                   nullptr, 0, NI_NUMERICHOST);
    const bool is_v4 = chosen->ai_family == AF_INET;
    freeaddrinfo(found);
    if (failed != 0) {
      return absl::UnavailableError(absl::StrCat("address: cannot resolve \"", address.host, "\""));
    }
    if (is_v4) {
      v4.push_back(absl::StrCat(numeric, ":", address.port));
    } else {
      v6.push_back(absl::StrCat("[", numeric, "]:", address.port));
    }
  }
  if (!v4.empty() && !v6.empty()) {
    return absl::InvalidArgumentError("address: IPv4 and IPv6 cannot be mixed");
  }
  return v6.empty() ? absl::StrCat("ipv4:", absl::StrJoin(v4, ","))
                    : absl::StrCat("ipv6:", absl::StrJoin(v6, ","));
}

// gRPC cleans up when the last channel and server of a process end. That waits for threads that may
// sleep for kKeepaliveTimeMs, and for ever where it comes from one of gRPC's own. So once there was
// one, gRPC stays up until the process ends.
void KeepGrpcInitialized() {
  static const bool kept = (grpc_init(), true);
  (void)kept;
}

}  // namespace

absl::Status CheckAddress(const std::string& field, const std::string& address) {
  if (IsUnix(address)) return CheckUnix(field, address);
  return Parse(field, address).status();
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& addresses,
                                                           const ChannelOptions& options) {
  KeepGrpcInitialized();
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(options.max_message_bytes);
  args.SetMaxSendMessageSize(options.max_message_bytes);
  args.SetInt(GRPC_ARG_PER_RPC_RETRY_BUFFER_SIZE,
              std::min(options.max_message_bytes, INT32_MAX - kRetryBufferExtraBytes) +
                  kRetryBufferExtraBytes);
  args.SetServiceConfigJSON(kServiceConfig);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
              static_cast<int>(absl::ToInt64Milliseconds(options.ping_timeout)));
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // Loopback and cluster addresses never go through a proxy of the environment.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (IsUnix(addresses)) {
    RETURN_IF_ERROR(CheckUnix("address", addresses));
    return grpc::CreateCustomChannel(addresses, grpc::InsecureChannelCredentials(), args);
  }
  std::vector<HostPort> list;
  for (const absl::string_view address : absl::StrSplit(addresses, ',')) {
    ASSIGN_OR_RETURN(HostPort parsed, Parse("address", std::string(address)));
    list.push_back(std::move(parsed));
  }
  // One name is resolved by gRPC itself, again and again until it is known.
  std::string target = absl::StrCat("dns:///", addresses);
  if (list.size() > 1) {
    ASSIGN_OR_RETURN(target, ResolveAll(list));
    args.SetLoadBalancingPolicyName("round_robin");
  }
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), args);
}

absl::StatusOr<ListeningServer> StartServer(const std::string& listen,
                                            const std::vector<grpc::Service*>& services,
                                            const ChannelOptions& options) {
  RETURN_IF_ERROR(CheckAddress("listen", listen));
  if (IsUnix(listen)) RETURN_IF_ERROR(CheckNobodyListens(listen));
  KeepGrpcInitialized();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = -1;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kServerPingTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port <= 0) {
    if (IsUnix(listen)) {
      return absl::UnavailableError(absl::StrCat(
          "cannot listen on ", listen, ": the folder is missing or may not be written to"));
    }
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", listen,
        ": the port is in use or the address is not one of this machine; choose another "
        "(port 0: any free one)"));
  }
  SetServing(*server, {}, false);  // gRPC begins with the opposite
  ListeningServer listening;
  listening.address =
      IsUnix(listen) ? listen : absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
  listening.server = std::move(server);
  return listening;
}

void SetServing(grpc::Server& server, const std::vector<std::string>& services, bool serving) {
  grpc::HealthCheckServiceInterface* health = server.GetHealthCheckService();
  health->SetServingStatus("", serving);
  for (const std::string& service : services) health->SetServingStatus(service, serving);
}

}  // namespace expertmesh
