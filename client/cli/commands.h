// The verbs of the `expertmesh` command. Each adds its options to its subcommand and, when it was
// chosen, returns the exit code of the process.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace expertmesh {

// Exit codes that are the same for all verbs.
enum ExitCode {
  kOk = 0,
  kFailed = 1,       // the verb could not do its work; the reason is on standard error
  kUnreachable = 2,  // `health`: no router could be reached
};

using Command = std::function<int()>;

Command AddServe(CLI::App& app);
Command AddForward(CLI::App& app);
Command AddInspect(CLI::App& app);
Command AddPresets(CLI::App& app);
Command AddStatus(CLI::App& app);
Command AddTop(CLI::App& app);
Command AddHealth(CLI::App& app);
Command AddDemo(CLI::App& app);
Command AddBench(CLI::App& app);

}  // namespace expertmesh
