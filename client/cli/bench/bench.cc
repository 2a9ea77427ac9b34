// expertmesh bench: how fast this machine and this build are.
#include "client/cli/bench/bench.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "client/cli/common.h"

namespace expertmesh {

int NumProcessors() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

int Finish(const absl::Status& status) {
  return status.ok() ? static_cast<int>(kOk) : Fail(status);
}

void AddThreadsOption(CLI::App& app, int* threads) {
  *threads = NumProcessors();
  app.add_option("--threads", *threads, "threads that compute (default: all processors)")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
}

void AddJsonOption(CLI::App& app, std::string* json) {
  app.add_option("--json", *json, "also write machine facts and rows to this file");
}

void AddCommonBenchOptions(CLI::App& app, CommonBenchOptions* options, int repetitions) {
  AddJsonOption(app, &options->json);
  options->repetitions = repetitions;
  app.add_option("--repetitions", options->repetitions,
                 "repetitions that count; those that other processes disturb are repeated")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  app.add_option(
         "--probe-mib", options->probe_mib,
         "memory that the bandwidth probe reads from, in MiB; far more than the caches hold")
      ->capture_default_str()
      ->check(CLI::Range(2, 1 << 20));
}

Command AddBench(CLI::App& app) {
  app.footer(
      "Every benchmark prints a table and, with --json FILE, writes the same rows with the facts "
      "of\n"
      "the machine.\n\n"
      "  expertmesh bench roofline                    what the processor and its memory can do at "
      "most\n"
      "  expertmesh bench gemm                        the kernel that computes the experts\n"
      "  expertmesh bench layer --shape olmoe-1b-7b   a whole layer through a cluster of its own\n"
      "  expertmesh bench wire                        the way of the rows alone, beside bare gRPC\n"
      "  expertmesh bench permute                     the router's work on the rows of a round\n"
      "  expertmesh bench load --router HOST:PORT     throughput and latency of a running "
      "cluster\n\n"
      "efficiency = max(bytes / bandwidth, flops / peak) / time: 1 is as fast as the machine "
      "allows.\n"
      "Bandwidth and peak are probed around every repetition, because other programs and the "
      "clock\n"
      "change them; repetitions that others disturbed are dropped and repeated (column `dropped`;\n"
      "`contended` counts those that were kept in the end). `error probe` marks an efficiency "
      "that\n"
      "cannot be true. Do not trust numbers from a busy machine.");
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* text, Command (*setup)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, text);
    commands.emplace_back(command, setup(*command));
  };
  add("roofline", "Memory bandwidth and peak of multiply-adds of this machine", AddBenchRoofline);
  add("gemm", "The grouped GEMM by format, instruction set and rows per expert", AddBenchGemm);
  add("layer", "A whole MoE layer through a cluster of its own", AddBenchLayer);
  add("wire", "The way of the rows through a cluster that computes nothing", AddBenchWire);
  add("permute", "The router's work on the rows of a round", AddBenchPermute);
  add("load", "Clients of a running cluster: throughput and latency", AddBenchLoad);
  const auto add_hidden = [&](const char* name, Command (*setup)(CLI::App&)) {
    add(name, "", setup);
    commands.back().first->group("");
  };
  add_hidden("wire-server", AddBenchWireServer);
  add_hidden("relay-server", AddBenchRelayServer);
  add_hidden("relay-router", AddBenchRelayRouter);
  return [commands] {
    for (const auto& [command, run] : commands) {
      if (command->parsed()) return run();
    }
    return static_cast<int>(kFailed);
  };
}

}  // namespace expertmesh
