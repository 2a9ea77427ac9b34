// expertmesh inspect: what a model folder is.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "common/model/checkpoint.h"
#include "common/status.h"
#include "common/text.h"
#include "expert_server/engine/expert_store.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

struct Options {
  std::string model;
  int32_t servers = 1;
  bool json = false;
};

nlohmann::ordered_json Describe(const Checkpoint& checkpoint,
                                const std::vector<ExpertStore::Held>& shards) {
  const ModelDescription& model = checkpoint.model();
  nlohmann::ordered_json out;
  out["model_type"] = model.model_type;
  out["model_fingerprint"] = checkpoint.fingerprint();
  out["layout"] = checkpoint.layout();
  out["num_hidden_layers"] = model.num_hidden_layers;
  out["layers"] = nlohmann::ordered_json::array();
  for (const LayerDescription& layer : model.layers) {
    out["layers"].push_back({{"layer", layer.layer},
                             {"kind", layer.kind == LayerKind::kMoe ? "moe" : "dense"},
                             {"hidden_size", layer.experts.hidden_size},
                             {"intermediate_size", layer.experts.intermediate_size},
                             {"num_experts", layer.router.num_experts},
                             {"top_k", layer.router.top_k},
                             {"weight_dtype", NameOf(layer.experts.weight_dtype)},
                             {"format", "native"},
                             {"expert_bytes", checkpoint.ExpertBytes(layer.layer)}});
  }
  out["servers"] = nlohmann::ordered_json::array();
  for (const ExpertStore::Held& held : shards) {
    nlohmann::ordered_json server = {{"bytes", ExpertStore::BytesOf(checkpoint, held)}};
    server["experts"] = nlohmann::ordered_json::object();
    for (const auto& [layer, experts] : held) server["experts"][std::to_string(layer)] = experts;
    out["servers"].push_back(std::move(server));
  }
  out["skipped_tensors"] = checkpoint.skipped_tensors();
  return out;
}

void Print(const Checkpoint& checkpoint, const std::vector<ExpertStore::Held>& shards) {
  const ModelDescription& model = checkpoint.model();
  std::printf("model type   %s, experts stored %s\n", model.model_type.c_str(),
              checkpoint.layout().c_str());
  std::printf("fingerprint  %s\n", checkpoint.fingerprint().c_str());
  std::vector<int32_t> served;
  for (const LayerDescription& layer : model.layers) served.push_back(layer.layer);
  std::printf("layers       %zu of %d have experts: %s\n", served.size(), model.num_hidden_layers,
              IdRanges(served).c_str());
  // Layers that are alike share a line.
  std::map<std::string, std::vector<int32_t>> alike;
  for (const LayerDescription& layer : model.layers) {
    alike[absl::StrCat("hidden_size ", layer.experts.hidden_size, ", intermediate_size ",
                       layer.experts.intermediate_size, ", ", layer.router.num_experts,
                       " experts, top-", layer.router.top_k, ", ",
                       NameOf(layer.experts.weight_dtype), ", ",
                       HumanBytes(checkpoint.ExpertBytes(layer.layer)), " an expert")]
        .push_back(layer.layer);
  }
  for (const auto& [text, layers] : alike) {
    std::printf("             %s: %s\n", IdRanges(layers).c_str(), text.c_str());
  }
  std::printf("servers      %zu\n", shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto& first = shards[i].begin()->second;
    std::printf("             %zu/%zu: experts %s of each layer, %s\n", i, shards.size(),
                first.empty() ? "none" : IdRanges(first).c_str(),
                HumanBytes(ExpertStore::BytesOf(checkpoint, shards[i])).c_str());
  }
  std::printf("skipped      %zu tensors that the experts do not need",
              checkpoint.skipped_tensors().size());
  const size_t shown = std::min<size_t>(5, checkpoint.skipped_tensors().size());
  for (size_t i = 0; i < shown; ++i) {
    std::printf("%s%s", i == 0 ? ": " : ", ", checkpoint.skipped_tensors()[i].c_str());
  }
  std::printf(checkpoint.skipped_tensors().size() > shown ? ", ... (--json lists them all)\n"
                                                          : "\n");
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(options.model));
  std::vector<ExpertStore::Held> shards;
  for (int32_t i = 0; i < options.servers; ++i) {
    ASSIGN_OR_RETURN(ExpertStore::Held held,
                     ExpertStore::ShardOf(checkpoint->model(), i, options.servers));
    shards.push_back(std::move(held));
  }
  if (options.json) {
    std::printf("%s\n", Describe(*checkpoint, shards).dump(2).c_str());
  } else {
    Print(*checkpoint, shards);
  }
  return absl::OkStatus();
}

}  // namespace

Command AddInspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("model", options->model, "Hugging Face model folder")->required();
  app.add_option("--servers", options->servers, "number of expert servers to plan for")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_flag("--json", options->json, "print JSON, everything in it");
  return [options] {
    const absl::Status status = Run(*options);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
