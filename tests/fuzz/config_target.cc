#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/model/checkpoint.h"
#include "common/model/registry.h"
#include "common/safetensors/strict_json.h"
#include "common/tensor.h"
#include "router/gating/gate.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/cluster.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/models.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

// Folders with the weights of the models, one for each layout, and the same config.json.
struct Folders {
  struct Folder {
    MemoryFile weights;
    MemoryFolder folder;
  };
  Folders() {
    for (const TinyModel& model : TinyModels()) {
      for (const ExpertLayout& layout : model.family->layouts) {
        auto& folder = of_family[model.family->model_type].emplace_back(std::make_unique<Folder>());
        folder->weights.Set(MakeWeights(model, layout, DType::kBF16));
        folder->folder.Link("config.json", config);
        folder->folder.Link("model.safetensors", folder->weights);
      }
    }
  }
  MemoryFile config;
  std::map<std::string, std::vector<std::unique_ptr<Folder>>> of_family;
};

void CheckDescription(const ModelDescription& description) {
  FUZZ_CHECK(!description.layers.empty());
  int32_t previous = -1;
  bool moe = false;
  for (const LayerDescription& layer : description.layers) {
    FUZZ_CHECK(layer.layer > previous && layer.layer < description.num_hidden_layers);
    previous = layer.layer;
    FUZZ_CHECK(layer.experts.hidden_size > 0);
    const RouterDescriptor& router = layer.router;
    for (const auto& [count, experts] : {std::pair(router.num_experts, layer.experts),
                                         std::pair(layer.shared.count, layer.shared.experts)}) {
      if (count == 0) continue;
      const int64_t gate_up[] = {count, 2 * experts.intermediate_size, experts.hidden_size,
                                 sizeof(float)};
      FUZZ_CHECK(NumElements(gate_up) > 0);
    }
    if (layer.kind == LayerKind::kDense) {
      FUZZ_CHECK(router.num_experts == 0 && router.top_k == 0 && layer.shared.count == 1);
      continue;
    }
    moe = true;
    FUZZ_CHECK(1 <= router.top_k && router.top_k <= router.num_experts + router.identity_experts);
    FUZZ_CHECK((router.num_experts + router.identity_experts) % router.num_groups == 0);
    FUZZ_CHECK(router.topk_groups <= router.num_groups);
    const absl::Status valid = ValidateRouter(router);
    FUZZ_CHECK(valid.ok() || absl::IsUnimplemented(valid));
  }
  FUZZ_CHECK(moe);
}

}  // namespace

void Config(Bytes bytes) {
  static Folders folders;
  const std::string text(bytes.begin(), bytes.end());
  const auto config = ParseStrictJson(text);
  if (!config.ok()) return;
  // The fingerprint is of this form, which has to be as good as the text.
  const auto again = ParseStrictJson(config->dump());
  FUZZ_CHECK(again.ok() && *again == *config);

  const auto model = DescribeModel(*config, Families());
  if (!model.ok()) return;
  CheckDescription(model->description);

  folders.config.Set(bytes);
  const auto found = folders.of_family.find(model->family->model_type);
  if (found == folders.of_family.end()) return;
  for (const auto& folder : found->second) {
    const auto checkpoint = Checkpoint::Open(folder->folder.path(), Families());
    if (!checkpoint.ok()) {
      FUZZ_CHECK(absl::IsInvalidArgument(checkpoint.status()) ||
                 absl::IsUnimplemented(checkpoint.status()));
      continue;
    }
    const absl::Status served = ServeAndCompare(*checkpoint);
    FUZZ_CHECK(served.ok() || absl::IsUnimplemented(served));  // an activation
  }
}

}  // namespace expertmesh::fuzz
