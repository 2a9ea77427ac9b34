// expertmesh top: what a cluster does, by layer and by server, every few seconds.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "common/text.h"

namespace expertmesh {
namespace {

struct Options {
  std::string router;
  double timeout_seconds = 5;
  double interval_seconds = 2;
  int count = 0;
};

// Between two samples.
class Rates {
 public:
  explicit Rates(absl::Duration elapsed) : seconds_(absl::ToDoubleSeconds(elapsed)) {}

  // Counters start again from 0 with their process.
  static uint64_t Added(uint64_t before, uint64_t after) {
    return after >= before ? after - before : after;
  }
  double PerSecond(uint64_t before, uint64_t after) const {
    return static_cast<double>(Added(before, after)) / seconds_;
  }

 private:
  const double seconds_;
};

double Ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

void Print(const v1::GetClusterResponse& before, const v1::GetClusterResponse& after,
           absl::Duration elapsed) {
  const Rates rates(elapsed);
  if (isatty(STDOUT_FILENO) != 0) std::printf("\033[H\033[2J");
  std::printf("%s; a second:\n\n", after.serving() ? "serving" : "not serving");
  std::printf("%5s %-14s %9s %11s %11s %11s %11s %11s %8s %10s %10s\n", "layer", "format", "rounds",
              "requests", "tokens", "pairs", "rows sent", "bytes sent", "padding", "saturated",
              "zero rows");
  for (int i = 0; i < after.layers_size(); ++i) {
    const v1::LayerRounds& now = after.layers(i);
    v1::LayerRounds was;
    for (const v1::LayerRounds& layer : before.layers()) {
      if (layer.layer() == now.layer()) was = layer;
    }
    const uint64_t padding = Rates::Added(was.padded_positions(), now.padded_positions());
    const uint64_t pairs = Rates::Added(was.pairs(), now.pairs());
    std::printf(
        "%5d %-14s %9.1f %11.1f %11.1f %11.1f %11.1f %11s %7.1f%% %10.1f %10.1f\n", now.layer(),
        now.format().c_str(), rates.PerSecond(was.rounds(), now.rounds()),
        rates.PerSecond(was.requests(), now.requests()),
        rates.PerSecond(was.tokens(), now.tokens()), rates.PerSecond(was.pairs(), now.pairs()),
        rates.PerSecond(was.unique_rows(), now.unique_rows()),
        HumanBytes(static_cast<int64_t>(rates.PerSecond(was.row_bytes(), now.row_bytes()))).c_str(),
        100 * Ratio(padding, padding + pairs),
        rates.PerSecond(was.saturated_rows(), now.saturated_rows()),
        rates.PerSecond(was.zero_rows(), now.zero_rows()));
  }
  std::printf("\n%-24s %11s %14s\n", "server", "pairs", "busy");
  for (const v1::ServerInfo& now : after.servers()) {
    v1::ServerInfo was;
    for (const v1::ServerInfo& server : before.servers()) {
      if (server.name() == now.name()) was = server;
    }
    const double busy_us = rates.PerSecond(was.gather_us(), now.gather_us()) +
                           rates.PerSecond(was.gemm_us(), now.gemm_us());
    std::printf("%-24s %11.1f %13.0f%%\n", now.name().c_str(),
                rates.PerSecond(was.rows(), now.rows()), busy_us / 1e4);
  }
  std::printf("\n");
  std::fflush(stdout);
}

absl::Status Run(const Options& options) {
  auto client = Client::Create(options.router, {.timeout = absl::Seconds(options.timeout_seconds)});
  if (!client.ok()) return client.status();
  absl::StatusOr<v1::GetClusterResponse> before = (*client)->GetCluster();
  if (!before.ok()) return before.status();
  absl::Time start = absl::Now();
  for (int i = 0; options.count == 0 || i < options.count; ++i) {
    absl::SleepFor(absl::Seconds(options.interval_seconds));
    absl::StatusOr<v1::GetClusterResponse> after = (*client)->GetCluster();
    if (!after.ok()) {  // it may come back
      std::printf("no answer: %s\n", std::string(after.status().message()).c_str());
      std::fflush(stdout);
      continue;
    }
    const absl::Time now = absl::Now();
    Print(*before, *after, now - start);
    before = std::move(after);
    start = now;
  }
  return absl::OkStatus();
}

}  // namespace

Command AddTop(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.description(
      "What a cluster does, by layer and by server, until Ctrl-C. Padding is the share of "
      "positions "
      "that were\n"
      "added to the pairs of token and expert; busy is the time that a server's experts computed.");
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  app.add_option("--interval", options->interval_seconds, "seconds between two tables")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 3600.0));
  app.add_option("--count", options->count, "tables to print; 0: until Ctrl-C")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  return [options] {
    const absl::Status status = Run(*options);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
