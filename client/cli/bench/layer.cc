// expertmesh bench layer: one whole MoE layer, through a cluster of its own.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cli/bench/bench.h"
#include "client/cli/bench/bench_cluster.h"
#include "client/cli/bench/report.h"
#include "client/cli/bench/synthetic_model.h"
#include "client/cpp/client.h"
#include "client/cpp/local_cluster.h"
#include "common/command_line.h"
#include "common/safetensors/safetensors.h"
#include "common/status.h"

namespace expertmesh {
namespace {

struct Options {
  CommonBenchOptions common;
  std::string shape = "olmoe-1b-7b";
  std::vector<std::string> dtypes = {"bf16"};
  int servers = 2;
  int threads = 0;
  EngineKind engine = EngineKind::kGrouped;
  Isa isa = BestIsa();
  std::vector<int64_t> tokens = {1, 8, 64, 512, 2048};
  std::string keep_model;
  bool in_process = false;
  bool stages = false;
  bool worker = false;
};

constexpr int kWarmUp = 5;
constexpr double kStageSeconds = 0.3;  // of calls whose stages are averaged
// Servers tell the router what they have done every second.
constexpr absl::Duration kHeartbeats = absl::Milliseconds(2100);
constexpr int32_t kLayer = 0;

// How the layer can be called.
struct Target {
  std::string name;
  int servers = 0;
  int threads = 0;  // of each
  std::function<absl::StatusOr<MoeOutput>(const Tensor& hidden_states)> forward;
};

// A synthetic layer, served; and its inputs.
class Layer {
 public:
  // Its weights are in `model`, or are written there.
  static absl::StatusOr<std::unique_ptr<Layer>> Start(const Options& options, const MoeShape& shape,
                                                      const BenchFormat& format,
                                                      const std::string& model) {
    std::unique_ptr<Layer> layer(new Layer(shape, format, model));
    ShowProgress(absl::StrCat("writing the weights in ", format.name));
    RETURN_IF_ERROR(WriteSyntheticModel(layer->model_, layer->shape_, layer->format_));
    ShowProgress("");
    if (options.servers > 0) RETURN_IF_ERROR(layer->StartCluster(options));
    if (options.in_process) RETURN_IF_ERROR(layer->StartInProcess(options));
    return layer;
  }

  const MoeShape& shape() const { return shape_; }
  const BenchFormat& format() const { return format_; }
  const std::string& model() const { return model_; }
  const std::string& router() const { return cluster_->router(); }
  const std::vector<Target>& targets() const { return targets_; }
  // To the cluster; null where there is none.
  Client* client() const { return client_.get(); }

  // [T, D], the same in every run.
  Tensor Input(int64_t tokens) const {
    return RandomNormal(format_.activations, {tokens, shape_.hidden_size}, 1,
                        /*seed=*/100 + tokens);
  }

 private:
  Layer(MoeShape shape, const BenchFormat& format, std::string model)
      : shape_(std::move(shape)), format_(format), model_(std::move(model)) {}

  absl::Status StartCluster(const Options& options) {
    const int threads =
        options.threads > 0 ? options.threads : std::max(1, NumProcessors() / options.servers);
    const std::vector<std::string> engine = {"--engine", NameOf(options.engine), "--isa",
                                             NameOf(options.isa)};
    const auto server_command = [&](int server) {
      std::vector<std::string> argv = {SiblingProgram("expertmesh-expert-server"),
                                       "--model",
                                       model_,
                                       "--listen",
                                       "127.0.0.1:0",
                                       "--shard",
                                       absl::StrCat(server, "/", options.servers),
                                       "--threads",
                                       absl::StrCat(threads)};
      argv.insert(argv.end(), engine.begin(), engine.end());
      return argv;
    };
    ASSIGN_OR_RETURN(cluster_,
                     BenchCluster::Start(model_, engine, options.servers, server_command));
    ASSIGN_OR_RETURN(client_, Client::Create(cluster_->router(), {.timeout = absl::Minutes(10)}));
    targets_.push_back({"grpc", options.servers, threads, [this](const Tensor& hidden_states) {
                          return client_->Forward(kLayer, hidden_states);
                        }});
    return absl::OkStatus();
  }

  absl::Status StartInProcess(const Options& options) {
    const int threads = options.threads > 0 ? options.threads : NumProcessors();
    LocalClusterOptions local;
    local.engine = {.kind = options.engine, .isa = options.isa, .threads = threads};
    local.router.engine = options.engine;
    local.router.isa = options.isa;
    ASSIGN_OR_RETURN(local_, LocalCluster::Start(model_, local));
    targets_.push_back({"in process", 1, threads, [this](const Tensor& hidden_states) {
                          return local_->Forward(kLayer, hidden_states);
                        }});
    return absl::OkStatus();
  }

  const MoeShape shape_;
  const BenchFormat format_;
  const std::string model_;
  std::unique_ptr<BenchCluster> cluster_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<LocalCluster> local_;
  std::vector<Target> targets_;
};

using Layers = std::vector<std::unique_ptr<Layer>>;

// One for each of --dtype.
absl::StatusOr<Layers> StartLayers(const Options& options) {
  ASSIGN_OR_RETURN(const MoeShape shape, ParseMoeShape(options.shape));
  std::vector<BenchFormat> formats;
  for (const std::string& name : options.dtypes) {
    ASSIGN_OR_RETURN(const BenchFormat format, ParseBenchFormat("dtype", name));
    formats.push_back(format);
  }
  if (options.worker && formats.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: expected one with --worker, got ", formats.size()));
  }
  if (options.servers == 0 && options.stages) {
    return absl::InvalidArgumentError("servers: expected at least 1 with --stages, got 0");
  }
  if (options.servers == 0 && !options.in_process) {
    return absl::InvalidArgumentError("servers: expected at least 1 without --in-process, got 0");
  }
  // The weights are on the disk only until everybody has read them.
  std::unique_ptr<TemporaryFolder> temporary;
  std::string folder = options.keep_model;
  if (folder.empty()) {
    ASSIGN_OR_RETURN(temporary, TemporaryFolder::Create());
    folder = temporary->path();
  }
  Layers layers;
  for (const BenchFormat& format : formats) {
    const std::string model = formats.size() > 1 ? absl::StrCat(folder, "/", format.name) : folder;
    ASSIGN_OR_RETURN(layers.emplace_back(), Layer::Start(options, shape, format, model));
  }
  return layers;
}

int64_t DistinctExperts(const Tensor& topk_ids) {
  const int32_t* ids = topk_ids.as<int32_t>();
  return static_cast<int64_t>(std::set<int32_t>(ids, ids + topk_ids.num_elements()).size());
}

// Microseconds that router and servers have counted so far.
struct Counted {
  double gate = 0, plan = 0, gather = 0, servers = 0, combine = 0;
  std::vector<double> server_gather, gemm;  // by server
};

absl::StatusOr<Counted> Count(Client& client) {
  absl::SleepFor(kHeartbeats);
  ASSIGN_OR_RETURN(const v1::GetClusterResponse cluster, client.GetCluster());
  Counted counted;
  for (const v1::LayerRounds& layer : cluster.layers()) {
    counted.gate += static_cast<double>(layer.gate_us());
    counted.plan += static_cast<double>(layer.plan_us());
    counted.gather += static_cast<double>(layer.gather_us());
    counted.servers += static_cast<double>(layer.servers_us());
    counted.combine += static_cast<double>(layer.combine_us());
  }
  for (const v1::ServerInfo& server : cluster.servers()) {
    counted.server_gather.push_back(static_cast<double>(server.gather_us()));
    counted.gemm.push_back(static_cast<double>(server.gemm_us()));
  }
  return counted;
}

// Where the time of a call goes, in milliseconds, by numbers of tokens: means over some calls.
absl::StatusOr<std::vector<nlohmann::ordered_json>> MeasureStages(const Options& options,
                                                                  const Layer& layer) {
  std::vector<nlohmann::ordered_json> rows;
  ASSIGN_OR_RETURN(Counted before, Count(*layer.client()));
  for (const int64_t tokens : options.tokens) {
    ShowProgress(absl::StrCat("stages of ", tokens, " tokens"));
    const Tensor input = layer.Input(tokens);
    const double start = Now();
    int calls = 0;
    while (calls < 5 || Now() - start < kStageSeconds) {
      RETURN_IF_ERROR(layer.client()->Forward(kLayer, input).status());
      ++calls;
    }
    const double total = 1e3 * (Now() - start) / calls;
    ASSIGN_OR_RETURN(const Counted after, Count(*layer.client()));
    const auto per_call = [calls](double from, double to) { return 1e-3 * (to - from) / calls; };
    // The slower of the servers: the others wait for it.
    double server_gather = 0, gemm = 0;
    for (size_t i = 0; i < before.gemm.size(); ++i) {
      const double one_gather = per_call(before.server_gather[i], after.server_gather[i]);
      const double one_gemm = per_call(before.gemm[i], after.gemm[i]);
      if (one_gather + one_gemm <= server_gather + gemm) continue;
      server_gather = one_gather;
      gemm = one_gemm;
    }
    const double gate = per_call(before.gate, after.gate);
    const double plan = per_call(before.plan, after.plan);
    const double gather = per_call(before.gather, after.gather);
    const double servers = per_call(before.servers, after.servers);
    const double combine = per_call(before.combine, after.combine);
    rows.push_back({{"case", "stages, ms"},
                    {"format", layer.format().name},
                    {"tokens", tokens},
                    {"calls", calls},
                    {"total", total},
                    {"client", std::max(0.0, total - gate - plan - gather - servers - combine)},
                    {"gate", gate},
                    {"plan", plan},
                    {"gather", gather},
                    {"wire", std::max(0.0, servers - server_gather - gemm)},
                    {"server_gather", server_gather},
                    {"gemm", gemm},
                    {"combine", combine}});
    before = after;
  }
  ShowProgress("");
  return rows;
}

absl::Status RunTable(const Options& options, const Layers& layers) {
  const MoeShape& shape = layers.front()->shape();
  Probe probe(NumProcessors(), static_cast<size_t>(options.common.probe_mib) << 20);
  // One case for each number of tokens, each layer and each of its targets, next to each other.
  struct Point {
    int64_t tokens;
    const Layer* layer;
    const Target* target;
    Tensor input;
    int64_t experts = 0;  // that the tokens reached
  };
  std::vector<Point> points;
  for (const int64_t tokens : options.tokens) {
    for (const std::unique_ptr<Layer>& layer : layers) {
      const Tensor input = layer->Input(tokens);
      for (const Target& target : layer->targets()) {
        points.push_back({tokens, layer.get(), &target, input});
      }
    }
  }
  std::vector<BenchCase> cases;
  for (Point& point : points) {
    BenchCase one;
    const BenchFormat& format = point.layer->format();
    one.name = absl::StrCat(format.name, ", ", point.target->name, ", ", point.tokens, " tokens");
    one.ceiling = CeilingOf(options.isa, format.activations, format.dtype);
    one.run = [&point]() -> absl::Status {
      ASSIGN_OR_RETURN(const MoeOutput output, point.target->forward(point.input));
      if (point.experts == 0) point.experts = DistinctExperts(output.topk_ids);
      return absl::OkStatus();
    };
    // The weights of the experts in use, and the gate's.
    one.bytes = [&point, &shape, &format] {
      return static_cast<double>(point.experts * ExpertBytes(shape, format) +
                                 shape.num_experts * shape.hidden_size *
                                     BytesOf(format.activations));
    };
    one.flops = [&point, &shape] {
      return 2.0 *
             static_cast<double>(point.tokens * shape.hidden_size *
                                 (3 * shape.intermediate_size * shape.top_k + shape.num_experts));
    };
    cases.push_back(std::move(one));
  }
  ASSIGN_OR_RETURN(
      const std::vector<Measurement> measurements,
      Measure(probe, cases, {.repetitions = options.common.repetitions, .warm_up = kWarmUp}));

  std::vector<nlohmann::ordered_json> stages;
  for (const std::unique_ptr<Layer>& layer : layers) {
    if (!options.stages) break;
    ASSIGN_OR_RETURN(std::vector<nlohmann::ordered_json> rows, MeasureStages(options, *layer));
    std::move(rows.begin(), rows.end(), std::back_inserter(stages));
  }

  Report report("layer");
  const size_t per_layer = layers.front()->targets().size();
  const size_t per_tokens = layers.size() * per_layer;
  for (size_t i = 0; i < points.size(); ++i) {
    const Point& point = points[i];
    nlohmann::ordered_json row = {
        {"case", point.target->name},
        {"shape", shape.name},
        {"format", point.layer->format().name},
        {"engine", NameOf(options.engine)},
        {"isa", NameOf(options.isa)},
        {"servers", point.target->servers},
        {"threads", point.target->threads},
        {"tokens", point.tokens},
        {"experts", point.experts},
        {"rows_per_expert", static_cast<double>(point.tokens * shape.top_k) /
                                static_cast<double>(std::max<int64_t>(1, point.experts))}};
    AddMeasurement(measurements[i], &row);
    const auto ratio_to = [&](size_t other) {
      return Median(measurements[i].seconds) / Median(measurements[other].seconds);
    };
    if (per_layer > 1) {  // the last target of each layer is the one in this process
      row["ratio_to_in_process"] = ratio_to(i / per_layer * per_layer + per_layer - 1);
    }
    if (layers.size() > 1) {  // the same target of the first layer
      row[absl::StrCat("ratio_to_", layers.front()->format().name)] =
          ratio_to(i / per_tokens * per_tokens + i % per_layer);
    }
    report.Add(std::move(row));
  }
  if (!stages.empty()) report.NextTable();
  for (nlohmann::ordered_json& row : stages) report.Add(std::move(row));
  return report.Finish(options.common.json);
}

// One line of the protocol; what it prints, or an error.
absl::StatusOr<std::string> Answer(const Layer& layer, const std::string& line) {
  const Target& target = layer.targets().front();
  std::istringstream words(line);
  std::string verb;
  int64_t tokens = -1;
  words >> verb >> tokens;
  if (tokens < 0) return absl::InvalidArgumentError(absl::StrCat("tokens: missing in ", line));
  const Tensor input = layer.Input(tokens);
  if (verb == "run") {
    int repetitions = 0;
    if (!(words >> repetitions) || repetitions < 1) {
      return absl::InvalidArgumentError(absl::StrCat("repetitions: expected 1 or more in ", line));
    }
    std::string milliseconds;
    for (int i = 0; i < repetitions; ++i) {
      const double start = Now();
      RETURN_IF_ERROR(target.forward(input).status());
      absl::StrAppend(&milliseconds, i == 0 ? "" : " ", 1e3 * (Now() - start));
    }
    return milliseconds;
  }
  if (verb == "save") {
    std::string path;
    words >> path;
    ASSIGN_OR_RETURN(const MoeOutput output, target.forward(input));
    RETURN_IF_ERROR(WriteSafetensors(
        path,
        {{"hidden_states", input}, {"output", output.output}, {"topk_ids", output.topk_ids}}));
    return absl::StrCat("saved ", path);
  }
  return absl::InvalidArgumentError(absl::StrCat("expected run or save, got \"", line, "\""));
}

absl::Status RunWorker(const Layer& layer) {
  const bool cluster = layer.targets().front().name == "grpc";
  std::printf("ready %s\n", cluster ? layer.router().c_str() : "-");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const absl::StatusOr<std::string> answer = Answer(layer, line);
    std::printf("%s\n", answer.ok() ? answer->c_str()
                                    : absl::StrCat("error ", answer.status().ToString()).c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const Layers layers, StartLayers(options));
  return options.worker ? RunWorker(*layers.front()) : RunTable(options, layers);
}

}  // namespace

Command AddBenchLayer(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(
      "Writes a layer of random weights, serves it with a router and expert servers of its own, "
      "and\n"
      "times calls of the C++ client, numbers of tokens in turn. Gigabytes are written and read\n"
      "before it starts.\n\n"
      "  expertmesh bench layer --shape qwen3-30b-a3b --tokens 1,8,64\n"
      "  expertmesh bench layer --shape 1024x512x32x4 --servers 4 --in-process\n"
      "  expertmesh bench layer --dtype bf16,fp8,mxfp4\n\n"
      "efficiency counts the weights of the experts that the tokens reach, and the gate's; the "
      "time\n"
      "is that of the whole call. With --stages, `client` is the client and its way to the "
      "router,\n"
      "`wire` the way between router and servers with its queues, `server_gather` and `gemm` are\n"
      "the slower server's. Rounds of large calls overlap: there the stages may add up to more "
      "than\n"
      "the total.");
  AddCommonBenchOptions(app, &options->common, /*repetitions=*/9);
  app.add_option("--shape", options->shape,
                 "olmoe-1b-7b, qwen3-30b-a3b, or DxFxExK: hidden and intermediate size, experts, "
                 "top-k")
      ->capture_default_str();
  app.add_option("--dtype", options->dtypes,
                 "of weights and hidden states: bf16, fp32 or f16; or of the weights, with hidden "
                 "states in bf16: fp8 (scales of blocks), fp8_row or mxfp4. Several, separated by "
                 "commas, are measured in turn; `ratio_to_...` is the time in units of the first's")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--servers", options->servers, "expert servers; 0: none, with --in-process alone")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  app.add_option("--threads", options->threads,
                 "threads that compute, per server (default: processors / servers, at least 1)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--tokens", options->tokens, "numbers of tokens, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  AddEngineOptions(app, &options->engine, &options->isa);
  app.add_option("--keep-model", options->keep_model,
                 "folder for the weights (of several dtypes: one in it for each), kept and used "
                 "again (default: a temporary one)");
  app.add_flag("--in-process", options->in_process,
               "also one server inside this process, called directly, in turn with the others");
  app.add_flag(
      "--stages", options->stages,
      "also where the time of a call through the cluster goes, as router and servers count "
      "it, in milliseconds");
  app.add_flag(
      "--worker", options->worker,
      "no table: prints \"ready ROUTER\" and answers lines of standard input: \"run TOKENS "
      "REPETITIONS\" with milliseconds, \"save TOKENS FILE\" by writing input and output "
      "as safetensors");
  return [options] { return Finish(Run(*options)); };
}

}  // namespace expertmesh
