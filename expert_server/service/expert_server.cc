#include "expert_server/service/expert_server.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "common/rpc/process.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr char kService[] = "expertmesh.v1.ExpertService";

}  // namespace

ExpertServer::ExpertServer(const ExpertServerOptions& options)
    : executor_("experts", /*max_threads=*/1, options.max_queued),
      service_(&executor_, options.channel.max_message_bytes) {}

absl::StatusOr<std::unique_ptr<ExpertServer>> ExpertServer::Start(
    const Checkpoint& checkpoint, const ExpertServerOptions& options,
    const std::function<void(const LoadProgress&)>& progress,
    std::function<void(const absl::Status&)> on_refused) {
  ASSIGN_OR_RETURN(const ExpertStore::Held held,
                   ExpertStore::ShardOf(checkpoint.model(), options.shard, options.num_shards));
  // What is no address now will never be one: no reason to load first and to wait then.
  RETURN_IF_ERROR(CheckAddress("router", options.router));
  if (!options.advertise.empty()) RETURN_IF_ERROR(CheckAddress("advertise", options.advertise));
  const std::string name =
      options.name.empty() ? absl::StrCat("server-", options.shard) : options.name;
  RETURN_IF_ERROR(CheckServerName("name", name));
  std::unique_ptr<ExpertServer> server(new ExpertServer(options));
  // The port first: a busy one should be known before minutes of loading.
  ASSIGN_OR_RETURN(server->listening_,
                   StartServer(options.listen, {&server->service_}, options.channel));
  const std::string address = options.advertise.empty() ? server->address() : options.advertise;
  if (absl::StartsWith(address, "0.0.0.0:") || absl::StartsWith(address, "[::]:")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "advertise: the server listens on every address of the machine (", options.listen,
        "); say with --advertise HOST:PORT under which one the routers reach it"));
  }
  ASSIGN_OR_RETURN(
      server->store_,
      ExpertStore::Load(checkpoint, held,
                        options.experts ? options.experts : MakeEngine(options.engine), progress));
  server->service_.SetStore(server->store_.get(), {name, checkpoint.fingerprint()});
  SetServing(*server->listening_.server, {kService}, true);

  v1::Registration registration;
  registration.set_name(name);
  registration.set_address(address);
  registration.set_pid(getpid());
  registration.set_model_fingerprint(checkpoint.fingerprint());
  registration.set_numerics(kNumerics);
  registration.set_version(kVersion);
  for (const auto& [layer, experts] : held) {
    v1::LayerExperts* message = registration.add_layers();
    message->set_layer(layer);
    message->mutable_expert_ids()->Add(experts.begin(), experts.end());
  }
  server->registrar_ = std::make_unique<Registrar>(
      options.router, std::move(registration),
      [store = server->store_.get()] { return store->work(); }, std::move(on_refused));
  return server;
}

void ExpertServer::Shutdown(absl::Duration grace) {
  if (listening_.server == nullptr) return;
  registrar_.reset();
  SetServing(*listening_.server, {kService}, false);
  listening_.server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  listening_.server.reset();
}

ExpertServer::~ExpertServer() { Shutdown(absl::ZeroDuration()); }

}  // namespace expertmesh
