// expertmesh: the command for people.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "common/rpc/process.h"

namespace expertmesh {
namespace {

int Main(int argc, char** argv) {
  CLI::App app(
      "Mixture-of-Experts layers as a cluster of services.\n\n"
      "  expertmesh inspect MODEL                    what a checkpoint is and what memory it "
      "needs\n"
      "  expertmesh serve --model MODEL --servers 3  a router and three expert servers on this "
      "machine\n"
      "  expertmesh status                           who is there and what they hold\n"
      "  expertmesh forward --layer 0 --input x.safetensors --output y.safetensors\n\n"
      "MODEL is a Hugging Face folder (config.json and safetensors). Every verb explains itself "
      "with --help.");
  app.name("expertmesh");
  app.set_version_flag("--version", VersionText());
  app.require_subcommand(0, 1);
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* text, Command (*setup)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, text);
    commands.emplace_back(command, setup(*command));
  };
  add("serve", "Run a router and expert servers on this machine until SIGTERM", AddServe);
  add("forward", "Run one MoE layer on rows of a safetensors file", AddForward);
  add("inspect", "Describe a model folder without loading it", AddInspect);
  add("presets", "List the models of random weights that need no files", AddPresets);
  add("status", "Show the servers of a cluster", AddStatus);
  add("top", "Show what a cluster does, every few seconds", AddTop);
  add("health", "Exit 0 when the cluster serves, 1 when not, 2 when no router answers", AddHealth);
  add("demo", "Run recorded activations through every layer and check the answers", AddDemo);
  add("bench", "Measure this machine and this build", AddBench);
  CLI11_PARSE(app, argc, argv);
  if (app.get_subcommands().empty()) {
    std::fputs(app.help().c_str(), stderr);
    return kFailed;
  }
  if (absl::Status status = InitProcess("expertmesh"); !status.ok()) return Fail(status);
  for (const auto& [command, run] : commands) {
    if (command->parsed()) return run();
  }
  return kFailed;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
