#include "client/cli/common.h"

#include <cstdio>

#include "client/cli/commands.h"

namespace expertmesh {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "expertmesh: %s\n", std::string(status.message()).c_str());
  return kFailed;
}

void AddRouterOptions(CLI::App& app, std::string* router, double* timeout_seconds) {
  *router = kDefaultRouter;
  app.add_option("--router", *router,
                 "HOST:PORT[,HOST:PORT] of the routers, any of them will do; or unix:/PATH")
      ->capture_default_str();
  app.add_option("--timeout", *timeout_seconds, "seconds a call may take")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 1e6));
}

}  // namespace expertmesh
