// expertmesh inspect: what a model folder is.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "common/command_line.h"
#include "common/model/checkpoint.h"
#include "common/status.h"
#include "common/text.h"
#include "expert_server/engine/cpu/grouped_experts.h"
#include "expert_server/engine/expert_store.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

struct Options {
  ModelSource model;
  int32_t servers = 1;
  bool json = false;
};

// How scales are laid out: for programs, and in words.
std::pair<const char*, const char*> LayoutOf(const ExpertDescriptor& experts) {
  switch (experts.scale_layout) {
    case ScaleLayout::kNone:
      return {"none", "no scales"};
    case ScaleLayout::kBlock128:
      return {"block_128x128", "one for a block of 128 x 128"};
    case ScaleLayout::kRow:
      return {"channel", "one for an output channel"};
    case ScaleLayout::kMatrix:
      return {"tensor", "one for a matrix"};
    case ScaleLayout::kMixed:
      return {"channel_or_tensor", "one for an output channel or for a matrix"};
    case ScaleLayout::kGroup32:
      return {"group_32", "one for 32 weights of a row"};
  }
  return {"", ""};
}

// U8 scales are exponents.
std::string ScaleDTypeOf(const ExpertDescriptor& experts) {
  return NameOf(experts.scale_dtype == DType::kU8 ? DType::kF8_E8M0 : experts.scale_dtype);
}

// What is said of routed experts and of shared ones alike.
void Describe(const ExpertDescriptor& experts, nlohmann::ordered_json* out) {
  (*out)["intermediate_size"] = experts.intermediate_size;
  (*out)["weight_dtype"] = NameOf(experts.weight_dtype);
  (*out)["weight_format"] = NameOf(experts.weight_format);
  if (experts.scale_layout != ScaleLayout::kNone) {
    (*out)["scale_dtype"] = ScaleDTypeOf(experts);
    (*out)["scale_layout"] = LayoutOf(experts).first;
  }
  (*out)["format"] = "native";
  (*out)["expert_bytes"] = BytesOfGroupedExpert(experts);
}

nlohmann::ordered_json Describe(const LayerDescription& layer) {
  const bool moe = layer.kind == LayerKind::kMoe;
  nlohmann::ordered_json out = {{"layer", layer.layer},
                                {"kind", moe ? "moe" : "dense"},
                                {"hidden_size", layer.experts.hidden_size},
                                {"num_experts", layer.router.num_experts},
                                {"top_k", layer.router.top_k}};
  if (moe) Describe(layer.experts, &out);
  if (layer.router.identity_experts > 0) out["identity_experts"] = layer.router.identity_experts;
  if (layer.shared.count > 0) {  // of a dense layer, its MLP
    out["shared_experts"] = {{"count", layer.shared.count}};
    Describe(layer.shared.experts, &out["shared_experts"]);
  }
  return out;
}

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
    out["layers"].push_back(Describe(layer));
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

// What the weights are stored as, and what one expert takes in memory.
std::string Stored(const ExpertDescriptor& experts) {
  std::string text = NameOf(experts.weight_dtype);
  if (experts.scale_layout != ScaleLayout::kNone) {
    absl::StrAppend(&text, " (", ScaleDTypeOf(experts), " scales, ", LayoutOf(experts).second, ")");
  }
  return absl::StrCat(text, ", ", HumanBytes(BytesOfGroupedExpert(experts)));
}

// A layer in words.
std::string InWords(const LayerDescription& layer) {
  std::string text = absl::StrCat("hidden_size ", layer.experts.hidden_size);
  const ExpertDescriptor& shared = layer.shared.experts;
  if (layer.kind == LayerKind::kDense) {
    return absl::StrCat(text, ", dense, intermediate_size ", shared.intermediate_size, ", ",
                        Stored(shared));
  }
  absl::StrAppend(&text, ", intermediate_size ", layer.experts.intermediate_size, ", ",
                  layer.router.num_experts, " experts, top-", layer.router.top_k, ", ",
                  Stored(layer.experts), " an expert");
  if (layer.router.identity_experts > 0) {
    absl::StrAppend(&text, ", ", layer.router.identity_experts, " that return their input");
  }
  if (layer.shared.count > 0) {
    absl::StrAppend(&text, "; ", layer.shared.count, " shared of intermediate_size ",
                    shared.intermediate_size, ", ", Stored(shared));
  }
  return text;
}

void Print(const Checkpoint& checkpoint, const std::vector<ExpertStore::Held>& shards) {
  const ModelDescription& model = checkpoint.model();
  std::printf("model type   %s, experts stored %s\n", model.model_type.c_str(),
              checkpoint.layout().c_str());
  std::printf("fingerprint  %s\n", checkpoint.fingerprint().c_str());
  std::vector<int32_t> moe, dense;
  for (const LayerDescription& layer : model.layers) {
    (layer.kind == LayerKind::kMoe ? moe : dense).push_back(layer.layer);
  }
  std::printf("layers       %zu of %d have experts: %s\n", moe.size(), model.num_hidden_layers,
              IdRanges(moe).c_str());
  if (!dense.empty()) {
    std::printf("             %zu dense, served too: %s\n", dense.size(), IdRanges(dense).c_str());
  }
  // Layers that are alike share a line.
  std::vector<std::pair<std::string, std::vector<int32_t>>> alike;
  bool everywhere = false;  // some experts are on every server
  for (const LayerDescription& layer : model.layers) {
    const std::string text = InWords(layer);
    auto line = std::find_if(alike.begin(), alike.end(),
                             [&](const auto& candidate) { return candidate.first == text; });
    if (line == alike.end()) line = alike.insert(line, {text, {}});
    line->second.push_back(layer.layer);
    everywhere |= layer.shared.count > 0;
  }
  for (const auto& [text, layers] : alike) {
    std::printf("             %s: %s\n", IdRanges(layers).c_str(), text.c_str());
  }
  std::printf("servers      %zu%s\n", shards.size(),
              everywhere ? ", every one with all shared experts and dense layers" : "");
  const LayerDescription& first_moe = *model.Find(moe.front());
  for (size_t i = 0; i < shards.size(); ++i) {
    std::vector<int32_t> routed = shards[i].at(first_moe.layer);
    routed.erase(std::lower_bound(routed.begin(), routed.end(), first_moe.router.num_experts),
                 routed.end());
    std::printf("             %zu/%zu: experts %s of each layer, %s of weights\n", i, shards.size(),
                routed.empty() ? "none" : IdRanges(routed).c_str(),
                HumanBytes(ExpertStore::BytesOf(checkpoint, shards[i])).c_str());
  }
  std::printf("skipped      %zu tensors that the served layers do not need",
              checkpoint.skipped_tensors().size());
  const size_t shown = std::min<size_t>(5, checkpoint.skipped_tensors().size());
  for (size_t i = 0; i < shown; ++i) {
    std::printf("%s%s", i == 0 ? ": " : ", ", checkpoint.skipped_tensors()[i].c_str());
  }
  std::printf(checkpoint.skipped_tensors().size() > shown ? ", ... (--json lists them all)\n"
                                                          : "\n");
}

absl::Status Run(const Options& options) {
  ASSIGN_OR_RETURN(const auto checkpoint, OpenModel(options.model));
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
  app.add_option("model", options->model.folder, "Hugging Face model folder");
  app.add_option("--preset", options->model.preset, "instead of it, a preset's name");
  app.add_option("--servers", options->servers, "number of expert servers to plan for")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  AddPrecisionOptions(app, &options->model);
  app.add_flag("--json", options->json, "print JSON, everything in it");
  return [options] {
    const absl::Status status = Run(*options);
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
