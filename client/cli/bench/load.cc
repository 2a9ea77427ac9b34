// expertmesh bench load: clients of a running cluster, as a serving benchmark has them.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cli/bench/bench.h"
#include "client/cli/bench/report.h"
#include "client/cli/bench/synthetic_model.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "common/rpc/status.h"
#include "common/status.h"

namespace expertmesh {
namespace {

struct Options {
  std::string json;
  std::string router;
  double timeout_seconds = 30;
  int clients = 4;
  int64_t tokens = 1;
  double seconds = 10;
  std::string layer = "all";
  std::string dtype = "bf16";
};

// Pauses after RESOURCE_EXHAUSTED that says nothing about when to come back.
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLongestPause = absl::Seconds(1);

// What one client saw.
struct Outcome {
  std::vector<double> latencies;                 // seconds, of the calls that succeeded
  std::map<absl::StatusCode, int64_t> failures;  // number by code
  std::string first_error;
};

// Calls until `end`: a random layer of `layers`, T random rows of it, one call after the other.
Outcome RunClient(Client& client, const std::vector<v1::LayerInfo>& layers,
                  const std::map<int64_t, Tensor>& inputs, uint32_t seed, absl::Time end) {
  Outcome outcome;
  std::mt19937 random(seed);
  absl::Duration pause = kFirstPause;
  while (absl::Now() < end) {
    const v1::LayerInfo& layer = layers[random() % layers.size()];
    const double start = Now();
    const absl::Status status =
        client.Forward(layer.layer(), inputs.at(layer.hidden_size())).status();
    if (status.ok()) {
      outcome.latencies.push_back(Now() - start);
      pause = kFirstPause;
      continue;
    }
    ++outcome.failures[status.code()];
    if (outcome.first_error.empty()) outcome.first_error = status.ToString();
    if (absl::IsResourceExhausted(status)) {
      absl::SleepFor(std::min(RetryAfter(status).value_or(pause), end - absl::Now()));
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  return outcome;
}

absl::StatusOr<std::vector<v1::LayerInfo>> ChooseLayers(const v1::GetModelResponse& model,
                                                        const std::string& text) {
  std::vector<v1::LayerInfo> layers(model.layers().begin(), model.layers().end());
  int32_t number = 0;
  if (text != "all") {
    if (!absl::SimpleAtoi(text, &number)) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer: expected a number or all, got \"", text, "\""));
    }
    const auto other = [number](const v1::LayerInfo& info) { return info.layer() != number; };
    layers.erase(std::remove_if(layers.begin(), layers.end(), other), layers.end());
  }
  if (layers.empty()) {
    return absl::NotFoundError(absl::StrCat("layer: the model has no MoE layer ", text));
  }
  return layers;
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const DType dtype, ParseBenchDType(options.dtype));
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < options.clients; ++i) {
    ASSIGN_OR_RETURN(
        std::unique_ptr<Client> client,
        Client::Create(options.router, {.timeout = absl::Seconds(options.timeout_seconds)}));
    clients.push_back(std::move(client));
  }
  ASSIGN_OR_RETURN(const v1::GetModelResponse model, clients.front()->GetModel());
  ASSIGN_OR_RETURN(const std::vector<v1::LayerInfo> layers, ChooseLayers(model, options.layer));
  // Inputs by client and width, made before the clock runs.
  std::vector<std::map<int64_t, Tensor>> inputs(options.clients);
  for (int i = 0; i < options.clients; ++i) {
    for (const v1::LayerInfo& layer : layers) {
      Tensor& input = inputs[i][layer.hidden_size()];
      if (input.num_elements() == 0) {
        input = RandomNormal(dtype, {options.tokens, layer.hidden_size()}, 1, i + 1);
      }
    }
  }
  std::vector<Outcome> outcomes(options.clients);
  std::vector<std::thread> threads;
  const double start = Now();
  const absl::Time end = absl::Now() + absl::Seconds(options.seconds);
  for (int i = 0; i < options.clients; ++i) {
    threads.emplace_back(
        [&, i] { outcomes[i] = RunClient(*clients[i], layers, inputs[i], i + 1, end); });
  }
  while (absl::Now() < end) {
    ShowProgress(absl::StrCat(static_cast<int>(Now() - start), " of ",
                              static_cast<int>(options.seconds), " s"));
    absl::SleepFor(std::min(absl::Seconds(1), end - absl::Now()));
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = Now() - start;
  ShowProgress("");

  std::vector<double> latencies;
  std::map<absl::StatusCode, int64_t> failures;
  std::string first_error;
  for (const Outcome& outcome : outcomes) {
    latencies.insert(latencies.end(), outcome.latencies.begin(), outcome.latencies.end());
    for (const auto& [code, count] : outcome.failures) failures[code] += count;
    if (first_error.empty()) first_error = outcome.first_error;
  }
  if (latencies.empty()) {
    return absl::UnavailableError(absl::StrCat("no call succeeded; the first error: ",
                                               first_error.empty() ? "none" : first_error));
  }
  const auto calls = static_cast<double>(latencies.size());
  nlohmann::ordered_json errors = nlohmann::ordered_json::object();
  for (const auto& [code, count] : failures) errors[absl::StatusCodeToString(code)] = count;
  Report report("load");
  report.Add({{"case", absl::StrCat("layer ", options.layer)},
              {"format", options.dtype},
              {"clients", options.clients},
              {"tokens", options.tokens},
              {"seconds", seconds},
              {"calls", latencies.size()},
              {"calls_per_s", calls / seconds},
              {"tokens_per_s", calls * static_cast<double>(options.tokens) / seconds},
              {"ms_p50", 1e3 * Percentile(latencies, .5)},
              {"ms_p90", 1e3 * Percentile(latencies, .9)},
              {"ms_p99", 1e3 * Percentile(latencies, .99)},
              {"ms_max", 1e3 * Percentile(latencies, 1)},
              {"errors", errors}});
  if (!first_error.empty()) report.Note(absl::StrCat("first error: ", first_error));
  return report.Finish(options.json);
}

}  // namespace

Command AddBenchLoad(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(
      "Drives a running cluster: each client sends its next call when the last one is answered, to "
      "a\n"
      "random layer, for a number of seconds. A client that is told to come back later\n"
      "(RESOURCE_EXHAUSTED) pauses as long as it is told; failed calls are counted by their code "
      "and\n"
      "do not count in throughput and latency. Exit code 1 when no call succeeded.\n\n"
      "  expertmesh bench load --router 127.0.0.1:7070 --clients 32 --tokens 1 --seconds 30");
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  AddJsonOption(app, &options->json);
  app.add_option("--clients", options->clients, "clients at a time")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  app.add_option("--tokens", options->tokens, "tokens of each call")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--seconds", options->seconds, "how long")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 1e6));
  app.add_option("--layer", options->layer, "decoder layer, or all: a random one for each call")
      ->capture_default_str();
  app.add_option("--dtype", options->dtype, "of the hidden states: bf16, fp32 or f16")
      ->capture_default_str();
  return [options] { return Finish(Run(*options)); };
}

}  // namespace expertmesh
