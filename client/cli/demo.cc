// expertmesh demo: recorded activations through every layer of a running cluster, checked twice.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "client/cpp/local_cluster.h"
#include "common/safetensors/safetensors.h"
#include "common/status.h"

namespace expertmesh {
namespace {

struct Options {
  std::string router;
  double timeout_seconds = 30;
  std::string model;
  std::string captured;
};

// Bounds of the relative Frobenius error of a block against transformers in fp32, by the request's
// dtype.
double Bound(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : dtype == DType::kBF16 ? 1e-2 : 2e-3;
}

double RelativeError(const Tensor& got, const Tensor& expected) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < expected.num_elements(); ++i) {
    const double e = LoadFloat(expected.dtype(), expected.data(), i);
    const double d = LoadFloat(got.dtype(), got.data(), i) - e;
    difference += d * d;
    norm += e * e;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), a.num_bytes()) == 0;
}

// Tokens whose set of experts is the expected one.
int64_t SameExperts(const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape()) return 0;
  const int64_t top_k = got.dim(1);
  int64_t same = 0;
  for (int64_t t = 0; t < got.dim(0); ++t) {
    std::vector<int32_t> a(got.as<int32_t>() + t * top_k, got.as<int32_t>() + (t + 1) * top_k);
    std::vector<int32_t> b(expected.as<int32_t>() + t * top_k,
                           expected.as<int32_t>() + (t + 1) * top_k);
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    same += a == b;
  }
  return same;
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto captured, SafetensorsFile::Open(options.captured));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Client> client,
      Client::Create(options.router, {.timeout = absl::Seconds(options.timeout_seconds)}));
  // The same model in this one process, with one server: what every cluster must equal.
  LocalClusterOptions plain_loops;
  plain_loops.engine.kind = EngineKind::kForLoop;
  plain_loops.router.engine = EngineKind::kForLoop;
  ASSIGN_OR_RETURN(const std::unique_ptr<LocalCluster> reference,
                   LocalCluster::Start(options.model, plain_loops));
  ASSIGN_OR_RETURN(const v1::GetModelResponse model, client->GetModel());
  if (model.model_fingerprint() != reference->checkpoint().fingerprint()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the cluster at ", options.router, " serves another model than ", options.model));
  }
  std::printf(
      "model %s: %d MoE layers\n\n"
      "layer  tokens  experts used  load max/mean       ms  error vs transformers  same experts  "
      "same bits as one process\n",
      model.model_type().c_str(), model.layers_size());
  int failures = 0;
  for (const v1::LayerInfo& layer : model.layers()) {
    const std::string prefix = absl::StrCat("layer.", layer.layer(), ".");
    ASSIGN_OR_RETURN(const Tensor hidden_states, captured->ReadTensor(prefix + "hidden_states"));
    ASSIGN_OR_RETURN(const Tensor expected, captured->ReadTensor(prefix + "output"));
    ASSIGN_OR_RETURN(const Tensor expected_ids, captured->ReadTensor(prefix + "topk_ids"));
    if (!IsActivationDType(expected.dtype()) || expected_ids.dtype() != DType::kI32) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.captured, ": ", prefix, "output and ", prefix,
                       "topk_ids: expected F32, BF16 or F16 and I32, got ",
                       NameOf(expected.dtype()), " and ", NameOf(expected_ids.dtype())));
    }
    const auto start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const MoeOutput result, client->Forward(layer.layer(), hidden_states));
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    ASSIGN_OR_RETURN(const MoeOutput local, reference->Forward(layer.layer(), hidden_states));
    if (result.output.shape() != expected.shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          options.captured, ": ", prefix, "output: expected shape ",
          ShapeToString(result.output.shape()), ", got ", ShapeToString(expected.shape())));
    }
    const int32_t num_ids = layer.num_experts() + layer.num_identity_experts();
    std::vector<int64_t> load(
        std::max(num_ids, 1));  // of a dense layer: its one network, idle here
    for (int64_t i = 0; i < result.topk_ids.num_elements(); ++i) {
      const int32_t expert = result.topk_ids.as<int32_t>()[i];
      if (expert < 0 || expert >= num_ids) {
        return absl::InternalError(
            absl::StrCat("the router answered with expert ", expert, " of ", num_ids));
      }
      ++load[expert];
    }
    const int64_t tokens = result.output.dim(0);
    const double mean = static_cast<double>(std::max<int64_t>(1, tokens * layer.top_k())) /
                        static_cast<double>(load.size());
    const int64_t max = *std::max_element(load.begin(), load.end());
    const int64_t used = std::count_if(load.begin(), load.end(), [](int64_t n) { return n > 0; });
    const double error = RelativeError(result.output, expected);
    const int64_t same_experts = SameExperts(result.topk_ids, expected_ids);
    const bool same_bits = SameBits(result.output, local.output) &&
                           SameBits(result.topk_ids, local.topk_ids) &&
                           SameBits(result.topk_weights, local.topk_weights);
    // At most 1 % of the tokens may sit so close to a tie that fp32 rounding decides.
    const bool good =
        error <= Bound(hidden_states.dtype()) && same_bits && same_experts * 100 >= tokens * 99;
    failures += !good;
    std::printf("%5d  %6lld  %8lld/%-3d  %13.2f  %7.2f  %21.2e  %5lld/%-6lld  %s%s\n",
                layer.layer(), static_cast<long long>(tokens), static_cast<long long>(used),
                num_ids, static_cast<double>(max) / mean, ms, error,
                static_cast<long long>(same_experts), static_cast<long long>(tokens),
                same_bits ? "yes" : "NO", good ? "" : "  <- FAILED");
  }
  if (failures > 0) {
    return absl::InternalError(
        absl::StrCat(failures, " of ", model.layers_size(),
                     " layers differ from the reference by more than allowed"));
  }
  return absl::OkStatus();
}

}  // namespace

Command AddDemo(CLI::App& app) {
  auto options = std::make_shared<Options>();
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  app.add_option("--model", options->model, "the model folder that the cluster serves")->required();
  app.add_option("--captured", options->captured,
                 "safetensors file with `layer.N.hidden_states`, `layer.N.output` and "
                 "`layer.N.topk_ids` of every MoE layer N")
      ->required();
  return [options] {
    const absl::Status status = Run(*options);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
