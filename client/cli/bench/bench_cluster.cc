#include "client/cli/bench/bench_cluster.h"

#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kStart = absl::Minutes(10);  // it may read gigabytes
constexpr char kListening[] = "listening ";

}  // namespace

std::string SiblingProgram(const std::string& name) {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / name;
}

absl::StatusOr<ListeningProcess> StartListening(const std::vector<std::string>& argv) {
  ASSIGN_OR_RETURN(ChildProcess process, ChildProcess::Start(argv, /*capture=*/true));
  const absl::StatusOr<std::string> line = process.ReadLine(absl::Now() + kStart);
  if (!line.ok() || !absl::StartsWith(*line, kListening)) {
    return absl::UnavailableError(absl::StrCat(argv[0], " did not start: see its message above"));
  }
  return ListeningProcess{std::make_unique<ChildProcess>(std::move(process)),
                          line->substr(sizeof(kListening) - 1)};
}

absl::StatusOr<std::unique_ptr<BenchCluster>> BenchCluster::Start(
    const std::string& model, const std::vector<std::string>& router_arguments, int servers,
    const ServerCommand& command) {
  std::unique_ptr<BenchCluster> cluster(new BenchCluster());
  std::vector<std::string> router = {SiblingProgram("expertmesh-router"), "--model", model,
                                     "--listen", "127.0.0.1:0"};
  router.insert(router.end(), router_arguments.begin(), router_arguments.end());
  ASSIGN_OR_RETURN(cluster->router_, StartListening(router));
  for (int i = 0; i < servers; ++i) {
    std::vector<std::string> argv = command(i);
    argv.push_back("--router");
    argv.push_back(cluster->router());
    ASSIGN_OR_RETURN(ChildProcess server, ChildProcess::Start(argv, /*capture=*/false));
    cluster->servers_.push_back(std::move(server));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                   Client::Create(cluster->router(), {.timeout = absl::Seconds(1)}));
  const absl::Time give_up = absl::Now() + kStart;
  while (absl::Now() < give_up) {
    const absl::StatusOr<bool> serving = client->IsServing();
    if (serving.ok() && *serving) return cluster;
    if (const std::optional<std::string> ended = cluster->router_.process->Poll()) {
      return absl::UnavailableError(
          absl::StrCat("the router ended with ", *ended, ": see its message above"));
    }
    for (ChildProcess& server : cluster->servers_) {
      if (const std::optional<std::string> ended = server.Poll()) {
        return absl::UnavailableError(
            absl::StrCat("an expert server ended with ", *ended, ": see its message above"));
      }
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::DeadlineExceededError("the cluster did not come up in time");
}

}  // namespace expertmesh
