// expertmesh status, expertmesh health.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "common/text.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

struct Options {
  std::string router;
  double timeout_seconds = 5;
  bool json = false;
};

const char* StateName(v1::ServerInfo::State state) {
  switch (state) {
    case v1::ServerInfo::STATE_SERVING:
      return "serving";
    case v1::ServerInfo::STATE_CONNECTING:
      return "connecting";
    case v1::ServerInfo::STATE_DOWN:
      return "down";
    default:
      return "unknown";
  }
}

void PrintJson(const v1::GetClusterResponse& cluster) {
  nlohmann::ordered_json out;
  out["serving"] = cluster.serving();
  out["missing"] = cluster.missing();
  out["placement_epoch"] = cluster.placement_epoch();
  out["version"] = cluster.version();
  out["servers"] = nlohmann::ordered_json::array();
  for (const v1::ServerInfo& server : cluster.servers()) {
    nlohmann::ordered_json one = {{"name", server.name()},
                                  {"address", server.address()},
                                  {"pid", server.pid()},
                                  {"state", StateName(server.state())}};
    one["layers"] = nlohmann::ordered_json::array();
    one["experts"] = nlohmann::ordered_json::object();
    for (const v1::LayerExperts& layer : server.layers()) {
      one["layers"].push_back(layer.layer());
      one["experts"][std::to_string(layer.layer())] = layer.expert_ids();
    }
    one["rows"] = server.rows();
    one["numerics"] = server.numerics();
    out["servers"].push_back(std::move(one));
  }
  out["layers"] = nlohmann::ordered_json::array();
  for (const v1::LayerRounds& layer : cluster.layers()) {
    out["layers"].push_back({{"layer", layer.layer()},
                             {"rounds", layer.rounds()},
                             {"requests", layer.requests()},
                             {"tokens", layer.tokens()},
                             {"format", layer.format()},
                             {"pairs", layer.pairs()},
                             {"unique_rows", layer.unique_rows()},
                             {"padded_positions", layer.padded_positions()},
                             {"row_bytes", layer.row_bytes()},
                             {"saturated_values", layer.saturated_values()},
                             {"saturated_rows", layer.saturated_rows()},
                             {"zero_rows", layer.zero_rows()}});
  }
  std::printf("%s\n", out.dump(2).c_str());
}

void PrintTable(const v1::GetClusterResponse& cluster) {
  std::printf("%-12s %-22s %8s %-10s %7s %-16s %12s  %s\n", "name", "address", "pid", "state",
              "layers", "experts", "rows", "numerics");
  for (const v1::ServerInfo& server : cluster.servers()) {
    std::string experts;
    for (const v1::LayerExperts& layer : server.layers()) {
      const std::string ids = layer.expert_ids().empty() ? "none" : IdRanges(layer.expert_ids());
      if (experts.empty()) experts = ids;
      if (experts != ids) experts = "differs";
    }
    std::printf("%-12s %-22s %8lld %-10s %7d %-16s %12llu  %s\n", server.name().c_str(),
                server.address().c_str(), static_cast<long long>(server.pid()),
                StateName(server.state()), server.layers_size(), experts.c_str(),
                static_cast<unsigned long long>(server.rows()), server.numerics().c_str());
  }
  std::printf("\n%5s %-14s %9s %11s %11s %11s %11s %13s %10s %10s\n", "layer", "format", "rounds",
              "tokens", "pairs", "rows sent", "padding", "bytes sent", "saturated", "zero rows");
  for (const v1::LayerRounds& layer : cluster.layers()) {
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    std::printf("%5d %-14s %9llu %11llu %11llu %11llu %11llu %13llu %10llu %10llu\n", layer.layer(),
                layer.format().c_str(), number(layer.rounds()), number(layer.tokens()),
                number(layer.pairs()), number(layer.unique_rows()),
                number(layer.padded_positions()), number(layer.row_bytes()),
                number(layer.saturated_rows()), number(layer.zero_rows()));
  }
  if (cluster.serving()) {
    std::printf("\nserving: every expert of every layer has a server\n");
  } else {
    std::printf("\nnot serving: %s\n", cluster.missing().c_str());
  }
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const Options& options) {
  return Client::Create(options.router, {.timeout = absl::Seconds(options.timeout_seconds)});
}

}  // namespace

Command AddStatus(CLI::App& app) {
  auto options = std::make_shared<Options>();
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  app.add_flag("--json", options->json, "print JSON");
  return [options] {
    auto client = Connect(*options);
    if (!client.ok()) return Fail(client.status());
    const absl::StatusOr<v1::GetClusterResponse> cluster = (*client)->GetCluster();
    if (!cluster.ok()) return Fail(cluster.status());
    options->json ? PrintJson(*cluster) : PrintTable(*cluster);
    return static_cast<int>(kOk);
  };
}

Command AddHealth(CLI::App& app) {
  auto options = std::make_shared<Options>();
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  return [options] {
    absl::StatusOr<bool> serving = false;
    if (auto client = Connect(*options); client.ok()) {
      serving = (*client)->IsServing();
    } else {
      serving = client.status();
    }
    if (!serving.ok()) {
      Fail(serving.status());
      return static_cast<int>(kUnreachable);
    }
    std::printf(*serving ? "serving\n" : "not serving\n");
    return static_cast<int>(*serving ? kOk : kFailed);
  };
}

}  // namespace expertmesh
