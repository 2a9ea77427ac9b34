// expertmesh-router: gate, dispatch and combine for one node.
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "common/command_line.h"
#include "common/rpc/process.h"
#include "router/service/router_server.h"

namespace expertmesh {
namespace {

int Main(int argc, char** argv) {
  RouterServerOptions options;
  ModelSource model;
  double startup_grace_seconds = 60;
  double grace_seconds = 10;
  int64_t batch_wait_us = 0;
  std::string dispatch_dtype = "native";
  std::string empty_experts = "zero";
  CLI::App app(
      "Routes tokens to the expert servers of one node and combines what they return.\n"
      "Start order does not matter: servers may come before or after it.");
  app.set_version_flag("--version", VersionText());
  AddModelOptions(app, &model);
  app.add_option("--listen", options.listen,
                 "HOST:PORT to serve on, port 0: any free one; or unix:/PATH")
      ->capture_default_str();
  app.add_option(
         "--threads", options.router.threads,
         "threads for large calls, and as many for calls that wait for servers to come; started "
         "when needed")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--queue", options.limits.requests,
                 "requests that may be under way; more are refused (RESOURCE_EXHAUSTED)")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--queue-bytes", options.limits.bytes,
                 "bytes of these requests and their answers; one more is always let in")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 50));
  app.add_option("--rounds-per-layer", options.router.batching.rounds_per_layer,
                 "rounds of a layer in flight at a time; requests that come meanwhile are merged "
                 "into the next one. 0: requests are never merged")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  app.add_option("--batch-wait-us", batch_wait_us,
                 "microseconds that a round which could start waits for more requests")
      ->capture_default_str()
      ->check(CLI::Range(0, 10'000'000));
  app.add_option("--max-round-tokens", options.router.batching.max_tokens,
                 "tokens of a round; fewer where their replies would not fit in half a message. "
                 "Larger requests are cut")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--max-message-bytes", options.channel.max_message_bytes,
                 "largest message in either direction; the same on servers and clients")
      ->capture_default_str()
      ->check(CLI::Range(1 << 16, INT32_MAX));
  app.add_option("--startup-grace", startup_grace_seconds,
                 "seconds from the start in which calls wait for servers that have not come yet")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--grace", grace_seconds, "seconds to finish what is under way after SIGTERM")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  AddDispatchOptions(app, &dispatch_dtype, &empty_experts);
  AddEngineOptions(app, &options.router.engine, &options.router.isa);
  CLI11_PARSE(app, argc, argv);
  options.router.startup_grace = absl::Seconds(startup_grace_seconds);
  options.router.batching.wait = absl::Microseconds(batch_wait_us);
  if (dispatch_dtype == "fp8") options.router.wire_format = QuantizedFormat::kFp8Block128;
  if (empty_experts == "block") options.router.empty_experts = EmptyExperts::kOneBlock;

  const auto fail = [](const absl::Status& status) {
    spdlog::error("{}", std::string(status.message()));
    return 1;
  };
  if (absl::Status status = InitProcess("router"); !status.ok()) return fail(status);
  StopSignals stop;
  spdlog::info("expertmesh-router {}: model {}", VersionText(), NameOf(model));
  absl::StatusOr<std::shared_ptr<const Checkpoint>> checkpoint = OpenModel(model);
  if (!checkpoint.ok()) return fail(checkpoint.status());
  absl::StatusOr<std::unique_ptr<RouterServer>> server =
      RouterServer::Start(*std::move(checkpoint), options);
  if (!server.ok()) return fail(server.status());
  stop.Ready();
  spdlog::info("listening on {}", (*server)->address());
  std::printf("listening %s\n", (*server)->address().c_str());
  std::fflush(stdout);
  const int exit_code = stop.Wait();
  spdlog::info("stopping");
  (*server)->Shutdown(absl::Seconds(grace_seconds));
  return exit_code;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
