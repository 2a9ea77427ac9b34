// expertmesh forward: one layer on rows of a file.
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "common/safetensors/safetensors.h"
#include "common/status.h"

namespace expertmesh {
namespace {

struct Options {
  std::string router;
  double timeout_seconds = 30;
  int32_t layer = 0;
  std::string input;
  std::string output;
};

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(options.input));
  ASSIGN_OR_RETURN(const Tensor hidden_states, file->ReadTensor("hidden_states"));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Client> client,
      Client::Create(options.router, {.timeout = absl::Seconds(options.timeout_seconds)}));
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const MoeOutput result, client->Forward(options.layer, hidden_states));
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  const std::map<std::string, TensorView> tensors = {{"output", result.output},
                                                     {"topk_ids", result.topk_ids},
                                                     {"topk_weights", result.topk_weights}};
  RETURN_IF_ERROR(WriteSafetensors(options.output, tensors, {}));
  std::printf("layer %d: %s %s in %.2f ms, written to %s\n", options.layer,
              NameOf(result.output.dtype()), ShapeToString(result.output.shape()).c_str(), ms,
              options.output.c_str());
  return absl::OkStatus();
}

}  // namespace

Command AddForward(CLI::App& app) {
  auto options = std::make_shared<Options>();
  AddRouterOptions(app, &options->router, &options->timeout_seconds);
  app.add_option("--layer", options->layer, "decoder layer, as Hugging Face numbers them")
      ->required();
  app.add_option("--input", options->input,
                 "safetensors file with `hidden_states` [T, hidden_size], F32, BF16 or F16")
      ->required();
  app.add_option("--output", options->output,
                 "safetensors file to write: `output` [T, hidden_size] in the input's dtype, "
                 "`topk_ids` I32 and `topk_weights` F32 [T, top_k]")
      ->required();
  return [options] {
    const absl::Status status = Run(*options);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
