// expertmesh-expert-server: holds one shard of a model's experts.
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/command_line.h"
#include "common/progress_bar.h"
#include "common/rpc/process.h"
#include "expert_server/service/expert_server.h"

namespace expertmesh {
namespace {

int Fail(const absl::Status& status) {
  spdlog::error("{}", std::string(status.message()));
  return 1;
}

bool ParseShard(const std::string& text, int32_t* shard, int32_t* num_shards) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  return parts.size() == 2 && absl::SimpleAtoi(parts[0], shard) &&
         absl::SimpleAtoi(parts[1], num_shards) && *shard >= 0 && *num_shards > *shard;
}

int Main(int argc, char** argv) {
  ExpertServerOptions options;
  ModelSource model;
  std::string shard = "0/1";
  double grace_seconds = 10;
  options.engine.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  CLI::App app(
      "Holds one shard of a model's experts and computes them for the routers.\n"
      "Start order does not matter: it keeps looking for its router.");
  app.set_version_flag("--version", VersionText());
  AddModelOptions(app, &model);
  app.add_option("--listen", options.listen,
                 "HOST:PORT to serve on, port 0: any free one; or unix:/PATH")
      ->capture_default_str();
  app.add_option("--advertise", options.advertise,
                 "HOST:PORT under which routers reach this server, if not the one listened on");
  app.add_option("--router", options.router, "HOST:PORT or unix:/PATH of the node's router")
      ->capture_default_str();
  app.add_option("--shard", shard,
                 "which share of every layer's experts: i/n, with i from 0 to n-1")
      ->capture_default_str()
      ->check([&](const std::string& text) {
        int32_t i, n;
        return ParseShard(text, &i, &n) ? std::string()
                                        : "expected i/n with 0 <= i < n, got \"" + text + "\"";
      });
  app.add_option("--name", options.name, "unique name in the cluster; default: server-<i>");
  app.add_option("--threads", options.engine.threads, "threads that compute one slice together")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  AddEngineOptions(app, &options.engine.kind, &options.engine.isa);
  app.add_option("--queue", options.max_queued, "slices that may wait")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--max-message-bytes", options.channel.max_message_bytes,
                 "largest message in either direction; the same on the routers")
      ->capture_default_str()
      ->check(CLI::Range(1 << 16, INT32_MAX));
  app.add_option("--grace", grace_seconds, "seconds to finish what is under way after SIGTERM")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  CLI11_PARSE(app, argc, argv);
  ParseShard(shard, &options.shard, &options.num_shards);

  if (absl::Status status = InitProcess("expert-server"); !status.ok()) return Fail(status);
  StopSignals stop;
  spdlog::info("expertmesh-expert-server {}: model {}, shard {}/{}, {} threads, {} on {}",
               VersionText(), NameOf(model), options.shard, options.num_shards,
               options.engine.threads, NameOf(options.engine.kind), NameOf(options.engine.isa));
  if (options.engine.kind == EngineKind::kForLoop) {
    spdlog::info("for_loop is scalar and has one thread, whatever --isa and --threads say");
  }
  std::unique_ptr<ExpertServer> server;
  {
    const absl::StatusOr<std::shared_ptr<const Checkpoint>> checkpoint = OpenModel(model);
    if (!checkpoint.ok()) return Fail(checkpoint.status());
    ProgressBar bar("loading experts");
    absl::StatusOr<std::unique_ptr<ExpertServer>> started = ExpertServer::Start(
        **checkpoint, options,
        [&bar](const LoadProgress& load) { bar.Update(load.bytes_done, load.bytes_total); },
        [&stop](const absl::Status& status) {
          spdlog::error("the router refuses this server: {}", std::string(status.message()));
          stop.Stop(/*exit_code=*/1);
        });
    bar.Finish();
    if (!started.ok()) return Fail(started.status());
    server = *std::move(started);
  }
  stop.Ready();
  spdlog::info("serving on {}", server->address());
  std::printf("listening %s\n", server->address().c_str());
  std::fflush(stdout);
  const int exit_code = stop.Wait();
  spdlog::info("stopping");
  server->Shutdown(absl::Seconds(grace_seconds));
  return exit_code;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
