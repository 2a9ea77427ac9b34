#include "client/cli/common.h"

#include <cstdio>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"

namespace expertmesh {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "expertmesh: %s\n", std::string(status.message()).c_str());
  return kFailed;
}

void AddRouterOptions(CLI::App& app, std::string* router, double* timeout_seconds) {
  *router = kDefaultRouter;
  app.add_option("--router", *router, "HOST:PORT[,HOST:PORT] of the routers; any of them will do")
      ->capture_default_str();
  app.add_option("--timeout", *timeout_seconds, "seconds a call may take")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

std::string HumanBytes(int64_t bytes) {
  if (bytes < 1 << 20) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / (1 << 10));
  if (bytes < 1 << 30) return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30));
}

}  // namespace expertmesh
