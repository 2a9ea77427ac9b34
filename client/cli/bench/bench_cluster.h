// Processes that a benchmark starts and ends.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/child_process.h"

namespace expertmesh {

// A program of this installation: the file of that name beside the running one.
std::string SiblingProgram(const std::string& name);

// Starts argv[0] and reads the address from its line "listening HOST:PORT".
struct ListeningProcess {
  std::unique_ptr<ChildProcess> process;
  std::string address;
};
absl::StatusOr<ListeningProcess> StartListening(const std::vector<std::string>& argv);

// A router and expert servers, which end with this object. Not thread-safe.
class BenchCluster {
 public:
  // The command line of server i, to which "--router HOST:PORT" is added.
  using ServerCommand = std::function<std::vector<std::string>(int server)>;

  // Waits until every expert is served. `router_arguments`: further ones of the router. UNAVAILABLE
  // when one of the processes ends before.
  static absl::StatusOr<std::unique_ptr<BenchCluster>> Start(
      const std::string& model, const std::vector<std::string>& router_arguments, int servers,
      const ServerCommand& command);

  const std::string& router() const { return router_.address; }

 private:
  BenchCluster() = default;

  std::vector<ChildProcess> servers_;
  ListeningProcess router_;  // ends first: it would complain about the servers
};

}  // namespace expertmesh
