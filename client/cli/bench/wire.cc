// expertmesh bench wire: what the way through router and servers costs when nothing is computed.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "client/cli/bench/bench.h"
#include "client/cli/bench/bench_cluster.h"
#include "client/cli/bench/relay.h"
#include "client/cli/bench/report.h"
#include "client/cli/bench/synthetic_model.h"
#include "client/cpp/client.h"
#include "common/rpc/process.h"
#include "common/status.h"
#include "expert_server/service/expert_server.h"
#include "router/gating/gate.h"

namespace expertmesh {
namespace {

struct Options {
  std::string json;
  int repetitions = 9;
  std::string shape = "2048x64x64x8";
  std::vector<int64_t> tokens = {1, 64, 512};
};

constexpr int kServers = 2;      // as the relay
constexpr int kProcesses = 4;    // that take part
constexpr double kBurst = 0.02;  // seconds of calls of one kind before the next kind's turn
constexpr int32_t kLayer = 0;
constexpr int64_t kHeaderBytes = 4096;  // left for the header of a message that rows fill

// Experts that read every row and write every row of the answer, and compute nothing. Only this
// benchmark can start a server with them.
class UncomputedExperts final : public Experts {
 public:
  explicit UncomputedExperts(int64_t hidden_size) : hidden_size_(hidden_size) {}
  void SetWeights(int64_t, ExpertWeights) override {}
  absl::Status Prepare() override { return absl::OkStatus(); }
  int64_t bytes() const override { return 0; }
  absl::Status Forward(const ExpertBatch& batch, void* output) const override {
    const auto* rows = static_cast<const uint8_t*>(batch.rows.data);
    const int64_t bytes = batch.rows.shape[0] * hidden_size_ * BytesOf(batch.rows.dtype);
    uint8_t sum = 0;
    for (int64_t i = 0; i < bytes; i += 64) sum ^= rows[i];
    asm volatile("" : : "r"(static_cast<int>(sum)));
    const int64_t pairs = std::count_if(batch.gather.begin(), batch.gather.end(),
                                        [](int32_t row) { return row >= 0; });
    std::memset(output, kRelayFill, pairs * hidden_size_ * BytesOf(ReplyDType(batch.dtype())));
    return absl::OkStatus();
  }

 private:
  const int64_t hidden_size_;
};

struct ServerOptions {
  std::string model;
  std::string router;
  int32_t shard = 0;
};

// A real expert server but for its experts.
absl::Status RunServer(const ServerOptions& options) {
  StopSignals stop;
  ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                   Checkpoint::Open(options.model));
  ExpertServerOptions server_options;
  server_options.listen = "127.0.0.1:0";
  server_options.router = options.router;
  server_options.shard = options.shard;
  server_options.num_shards = kServers;
  server_options.experts = [](const ExpertDescriptor& descriptor,
                              int64_t) -> absl::StatusOr<std::unique_ptr<Experts>> {
    return std::make_unique<UncomputedExperts>(descriptor.hidden_size);
  };
  ASSIGN_OR_RETURN(const std::unique_ptr<ExpertServer> server,
                   ExpertServer::Start(
                       *checkpoint, server_options, [](const LoadProgress&) {},
                       [&stop](const absl::Status&) { stop.Stop(/*exit_code=*/1); }));
  stop.Ready();
  stop.Wait();
  server->Shutdown(absl::Seconds(1));
  return absl::OkStatus();
}

// The relay's processes.
struct Relay {
  std::vector<ListeningProcess> servers;
  ListeningProcess router;  // ends first
  std::unique_ptr<RelayClient> client;
};

absl::StatusOr<Relay> StartRelay() {
  const std::string program = SiblingProgram("expertmesh");
  Relay relay;
  for (int i = 0; i < kServers; ++i) {
    ASSIGN_OR_RETURN(ListeningProcess server, StartListening({program, "bench", "relay-server"}));
    relay.servers.push_back(std::move(server));
  }
  const std::string servers = absl::StrCat(relay.servers[0].address, ",", relay.servers[1].address);
  ASSIGN_OR_RETURN(relay.router,
                   StartListening({program, "bench", "relay-router", "--servers", servers}));
  ASSIGN_OR_RETURN(relay.client, RelayClient::Create(relay.router.address));
  return relay;
}

// Calls for kBurst seconds, three at least; appends the seconds of each.
absl::Status Burst(const std::function<absl::Status()>& call, std::vector<double>* seconds) {
  const double start = Now();
  for (int i = 0; i < 3 || Now() - start < kBurst; ++i) {
    const double begin = Now();
    RETURN_IF_ERROR(call());
    seconds->push_back(Now() - begin);
  }
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const MoeShape shape, ParseMoeShape(options.shape));
  if (shape.hidden_size % kRelayBlock != 0 || shape.top_k % kServers != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape: expected a hidden size that is a multiple of ", kRelayBlock,
                     " and an even top-k, got \"", options.shape, "\""));
  }
  // The relay sends whole messages: the rows of one server's answer have to fit.
  const int64_t row_bytes = shape.hidden_size * BytesOf(DType::kBF16) * shape.top_k / kServers;
  const int64_t most = (ChannelOptions().max_message_bytes - kHeaderBytes) / row_bytes;
  for (const int64_t tokens : options.tokens) {
    if (tokens > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens: expected at most ", most, " for this shape, got ", tokens));
    }
  }
  std::unique_ptr<BenchCluster> cluster;
  absl::StatusOr<Gate> gate = absl::InternalError("not made yet");
  {
    ASSIGN_OR_RETURN(const std::unique_ptr<TemporaryFolder> folder, TemporaryFolder::Create());
    ASSIGN_OR_RETURN(const BenchFormat format, ParseBenchFormat("dtype", "bf16"));
    RETURN_IF_ERROR(WriteSyntheticModel(folder->path(), shape, format));
    ASSIGN_OR_RETURN(cluster, BenchCluster::Start(folder->path(), {}, kServers, [&](int server) {
                       return std::vector<std::string>{SiblingProgram("expertmesh"),
                                                       "bench",
                                                       "wire-server",
                                                       "--model",
                                                       folder->path(),
                                                       "--shard",
                                                       absl::StrCat(server)};
                     }));
    ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                     Checkpoint::Open(folder->path()));
    ASSIGN_OR_RETURN(RouterWeights weights, checkpoint->ReadRouter(kLayer));
    gate = Gate::Create(checkpoint->model().layers[0].router, std::move(weights));
    RETURN_IF_ERROR(gate.status());
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                   Client::Create(cluster->router(), {.timeout = absl::Seconds(30)}));
  ASSIGN_OR_RETURN(const Relay relay, StartRelay());

  enum Kind { kOurs, kRelay, kGate, kKinds };
  struct Point {
    int64_t tokens;
    Tensor input;
    std::function<absl::Status()> calls[kKinds];
    std::vector<double> once[kKinds], all[kKinds];
  };
  std::vector<Point> points(options.tokens.size());
  for (size_t i = 0; i < points.size(); ++i) {
    Point& point = points[i];
    point.tokens = options.tokens[i];
    point.input = RandomNormal(DType::kBF16, {point.tokens, shape.hidden_size}, 1, /*seed=*/1);
    point.calls[kOurs] = [&] { return client->Forward(kLayer, point.input).status(); };
    point.calls[kRelay] = [&] { return relay.client->Forward(point.input, shape.top_k).status(); };
    point.calls[kGate] = [&] { return gate->Route(point.input).status(); };
    // Both must have answered what the servers wrote, or nothing is worth timing. Ours is a row of
    // one value, weighed by the gate, which sums to less than 1 where the family does not
    // normalise.
    ASSIGN_OR_RETURN(const MoeOutput mine, client->Forward(kLayer, point.input));
    for (int64_t j = 0; j < mine.output.num_elements(); ++j) {
      const uint16_t* const element = mine.output.as<uint16_t>() + j;
      if (*element == 0 || *element != element[-(j % shape.hidden_size)]) {
        return absl::InternalError("the cluster's answer is not what its servers sent");
      }
    }
    ASSIGN_OR_RETURN(const Tensor output, relay.client->Forward(point.input, shape.top_k));
    const uint16_t fill = kRelayFill << 8 | kRelayFill;
    for (int64_t j = 0; j < output.num_elements(); ++j) {
      if (output.as<uint16_t>()[j] != fill) {
        return absl::InternalError("the relay's answer is not what its servers sent");
      }
    }
  }
  const auto once = [&](int repetition) -> absl::Status {
    for (Point& point : points) {
      ShowProgress(absl::StrCat("repetition ", repetition + 1, " of ", options.repetitions, ": ",
                                point.tokens, " tokens"));
      for (int kind = 0; kind < kKinds; ++kind) {
        point.once[kind].clear();
        RETURN_IF_ERROR(Burst(point.calls[kind], &point.once[kind]));
      }
    }
    return absl::OkStatus();
  };
  const auto keep = [&] {
    for (Point& point : points) {
      for (int kind = 0; kind < kKinds; ++kind) {
        point.all[kind].insert(point.all[kind].end(), point.once[kind].begin(),
                               point.once[kind].end());
      }
    }
  };
  RETURN_IF_ERROR(once(0));  // warms up
  ASSIGN_OR_RETURN(const Repetitions repetitions,
                   Repeat(options.repetitions, std::min(kProcesses, NumProcessors()), once, keep));

  Report report("wire");
  for (const Point& point : points) {
    const double ours = Median(point.all[kOurs]);
    const double bare = Median(point.all[kRelay]);
    const double gating = Median(point.all[kGate]);
    const auto row = [&](const char* name, const std::vector<double>& seconds) {
      return nlohmann::ordered_json(
          {{"case", name},
           {"format", "bf16"},
           {"tokens", point.tokens},
           {"calls", seconds.size()},
           {"ms_min", 1e3 * *std::min_element(seconds.begin(), seconds.end())},
           {"ms_median", 1e3 * Median(seconds)},
           {"ms_p99", 1e3 * Percentile(seconds, .99)}});
    };
    nlohmann::ordered_json mine = row("expertmesh", point.all[kOurs]);
    mine["gate_ms"] = 1e3 * gating;
    mine["ratio_to_relay"] = ours / bare;
    mine["ratio_without_gate"] = (ours - gating) / bare;
    AddRepetitions(repetitions, &mine);
    report.Add(std::move(mine));
    nlohmann::ordered_json relayed = row("relay", point.all[kRelay]);
    AddRepetitions(repetitions, &relayed);
    report.Add(std::move(relayed));
  }
  return report.Finish(options.json);
}

}  // namespace

Command AddBenchWire(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(
      "The same call as everywhere, through a real router and two real expert servers whose "
      "experts\n"
      "read and write every row but compute nothing; beside it, in turn, a bare relay of as many\n"
      "processes and threads over the same gRPC, with as many bytes where K is large (it sends "
      "every\n"
      "row to both servers, the router only where it is needed). ratio_to_relay is what our own "
      "code adds;\n"
      "ratio_without_gate leaves out the gate, which the relay does not have (gate_ms, measured "
      "in\n"
      "this process).");
  AddJsonOption(app, &options->json);
  app.add_option("--repetitions", options->repetitions, "repetitions that count")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  app.add_option("--shape", options->shape,
                 "DxFxExK as in `bench layer`; D a multiple of 32, K even")
      ->capture_default_str();
  app.add_option("--tokens", options->tokens, "numbers of tokens, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 12));
  return [options] { return Finish(Run(*options)); };
}

Command AddBenchWireServer(CLI::App& app) {
  auto options = std::make_shared<ServerOptions>();
  app.add_option("--model", options->model)->required();
  app.add_option("--router", options->router)->required();
  app.add_option("--shard", options->shard)->required();
  return [options] {
    spdlog::set_level(spdlog::level::warn);
    return Finish(RunServer(*options));
  };
}

Command AddBenchRelayServer(CLI::App&) {
  return [] { return Finish(RunRelayServer()); };
}

Command AddBenchRelayRouter(CLI::App& app) {
  auto servers = std::make_shared<std::string>();
  app.add_option("--servers", *servers)->required();
  return [servers] { return Finish(RunRelayRouter(*servers)); };
}

}  // namespace expertmesh
