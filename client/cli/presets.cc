// expertmesh presets: the models of random weights that need no files.
#include "common/model/presets.h"

#include <cstdio>
#include <string>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "common/model/description.h"
#include "common/model/open_model.h"
#include "common/status.h"
#include "common/text.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

// Of all experts, in the preset's own precision.
int64_t ExpertBytes(const ModelDescription& model) {
  int64_t bytes = 0;
  for (const LayerDescription& layer : model.layers) {
    bytes += layer.router.num_experts * BytesOfExpert(layer.experts);
    if (layer.shared.count > 0) bytes += layer.shared.count * BytesOfExpert(layer.shared.experts);
  }
  return bytes;
}

absl::Status Print(bool json) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (!json) {
    std::printf("%-29s %6s %4s %11s %12s %7s %5s %6s %-11s %10s  %s\n", "name", "layers", "moe",
                "hidden_size", "intermediate", "experts", "top_k", "shared", "precision", "weights",
                "");
  }
  for (const Preset& preset : Presets()) {
    ASSIGN_OR_RETURN(const auto checkpoint, OpenModel({.preset = preset.name}));
    const ModelDescription& model = checkpoint->model();
    const LayerDescription* moe = nullptr;  // the first
    int num_moe = 0;
    for (const LayerDescription& layer : model.layers) {
      if (layer.kind != LayerKind::kMoe) continue;
      if (moe == nullptr) moe = &layer;
      ++num_moe;
    }
    if (moe == nullptr) return absl::InternalError(preset.name + " has no MoE layer");
    const int64_t bytes = ExpertBytes(model);
    if (json) {
      all.push_back({{"name", preset.name},
                     {"summary", preset.summary},
                     {"layers", model.num_hidden_layers},
                     {"moe_layers", num_moe},
                     {"hidden_size", moe->experts.hidden_size},
                     {"intermediate_size", moe->experts.intermediate_size},
                     {"num_experts", moe->router.num_experts},
                     {"top_k", moe->router.top_k},
                     {"num_shared_experts", moe->shared.count},
                     {"precision", preset.precision},
                     {"bytes", bytes},
                     {"fingerprint", checkpoint->fingerprint()}});
      continue;
    }
    std::printf("%-29s %6d %4d %11lld %12lld %7d %5d %6d %-11s %10s  %s\n", preset.name.c_str(),
                model.num_hidden_layers, num_moe, static_cast<long long>(moe->experts.hidden_size),
                static_cast<long long>(moe->experts.intermediate_size), moe->router.num_experts,
                moe->router.top_k, moe->shared.count, preset.precision.c_str(),
                HumanBytes(bytes).c_str(), preset.summary.c_str());
  }
  if (json) std::printf("%s\n", all.dump(2).c_str());
  return absl::OkStatus();
}

}  // namespace

Command AddPresets(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.description(
      "Models of random weights by name, for trying things and for benchmarks; no files are "
      "needed:\n"
      "  expertmesh serve --preset llama4_debugmodel --servers 2\n"
      "The weights are the same on every machine, whatever the number of servers.");
  app.add_flag("--json", *json, "print JSON");
  return [json] {
    const absl::Status status = Print(*json);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
