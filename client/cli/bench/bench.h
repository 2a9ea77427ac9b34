// The parts of `expertmesh bench`. Each adds its options to its subcommand and returns what runs
// it.
#pragma once

#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "client/cli/commands.h"

namespace expertmesh {

Command AddBenchRoofline(CLI::App& app);
Command AddBenchGemm(CLI::App& app);
Command AddBenchLayer(CLI::App& app);
Command AddBenchPermute(CLI::App& app);
Command AddBenchLoad(CLI::App& app);
Command AddBenchWire(CLI::App& app);

// Processes of `bench wire`; not shown in any help.
Command AddBenchWireServer(CLI::App& app);
Command AddBenchRelayServer(CLI::App& app);
Command AddBenchRelayRouter(CLI::App& app);

// What several of them share.
struct CommonBenchOptions {
  std::string json;      // file to write; empty: none
  int repetitions = 0;   // that count
  int probe_mib = 1024;  // memory that the bandwidth probe reads from
};

// --json.
void AddJsonOption(CLI::App& app, std::string* json);
// --json, --repetitions, --probe-mib.
void AddCommonBenchOptions(CLI::App& app, CommonBenchOptions* options, int repetitions);
// --threads, by default all processors.
void AddThreadsOption(CLI::App& app, int* threads);

int NumProcessors();

// Runs a benchmark; returns its exit code.
int Finish(const absl::Status& status);

}  // namespace expertmesh
