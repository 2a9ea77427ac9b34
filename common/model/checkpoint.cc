#include "common/model/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/kernels/kernels.h"
#include "common/model/fingerprint.h"
#include "common/model/registry.h"
#include "common/model/shards.h"
#include "common/safetensors/strict_json.h"
#include "common/status.h"

namespace expertmesh {
namespace {

using nlohmann::json;

constexpr char kExpert[] = "{expert}";

// One matrix of a layer's experts: where it is, and where its rows go.
struct Matrix {
  std::string pattern;  // full name; kExpert stands for the id
  int64_t rows = 0;     // of one expert, in the canonical arrangement [rows, cols]
  int64_t cols = 0;
  int64_t first_row = 0;  // of the destination
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposed = false;

  bool stacked() const { return !absl::StrContains(pattern, kExpert); }
  std::string NameOfExpert(int32_t expert) const {
    return absl::StrReplaceAll(pattern, {{kExpert, absl::StrCat(expert)}});
  }
  std::vector<int64_t> FileShape(int32_t num_experts) const {
    std::vector<int64_t> shape = {transposed ? cols : rows, transposed ? rows : cols};
    if (stacked()) shape.insert(shape.begin(), num_experts);
    return shape;
  }
  // The destination's row for row r of the matrix.
  int64_t DestinationRow(int64_t r) const {
    switch (order) {
      case GateUpOrder::kInterleaved:
        return first_row + (r % 2) * (rows / 2) + r / 2;
      case GateUpOrder::kUpFirst:
        return first_row + (r + rows / 2) % rows;
      case GateUpOrder::kGateFirst:
        break;
    }
    return first_row + r;
  }
};

// Tensors of a served layer.
struct LayerTensors {
  std::string router;  // full names; empty where the family has none
  std::string logits_bias;
  std::string selection_bias;
  std::string per_expert_scale;
  std::vector<Matrix> gate_up;  // one or two
  Matrix down;
};

// Copies a matrix as the file has it to its rows of `destination`.
template <typename T>
void Arrange(const Matrix& matrix, const T* source, T* destination) {
  for (int64_t r = 0; r < matrix.rows; ++r) {
    T* row = destination + matrix.DestinationRow(r) * matrix.cols;
    if (!matrix.transposed) {
      std::memcpy(row, source + r * matrix.cols, static_cast<size_t>(matrix.cols) * sizeof(T));
      continue;
    }
    for (int64_t c = 0; c < matrix.cols; ++c) row[c] = source[c * matrix.rows + r];
  }
}

class FolderCheckpoint final : public Checkpoint {
 public:
  FolderCheckpoint(ModelDescription model, Shards shards)
      : model_(std::move(model)), shards_(std::move(shards)) {}

  // Finds and checks every tensor of the served layers, and computes the fingerprint.
  absl::Status Resolve(const Family& family, const std::string& canonical_config);

  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t ExpertBytes(int32_t layer) const override;
  const std::vector<std::string>& skipped_tensors() const override { return skipped_; }
  const std::string& layout() const override { return layout_; }
  absl::StatusOr<RouterWeights> ReadRouter(int32_t layer) const override;
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override;

 private:
  absl::Status ResolveLayer(const Family& family, LayerDescription* layer);
  absl::Status ResolveGate(const Family& family, const LayerDescription& layer,
                           const std::string& block, LayerTensors* tensors);
  absl::Status ResolveExperts(const Family& family, const std::string& block,
                              LayerDescription* layer, LayerTensors* tensors);
  absl::Status RefuseUnknown(const Family& family, const LayerDescription& layer,
                             const LayerTensors& tensors) const;

  bool Has(const std::string& name) const { return shards_.tensors.count(name) != 0; }
  // Marks a tensor as used, after checking its shape and that we compute with its dtype.
  absl::StatusOr<DType> Use(const std::string& name, const std::vector<int64_t>& shape);

  // The elements [first, first + count) of a tensor, refused if one is not finite.
  absl::Status ReadFinite(const std::string& name, int64_t first, int64_t count,
                          std::byte* destination) const;
  absl::StatusOr<Tensor> ReadVector(const std::string& name) const;
  absl::Status ReadMatrix(const Matrix& matrix, int32_t expert, Tensor* destination) const;

  ModelDescription model_;
  Shards shards_;
  std::map<int32_t, LayerTensors> layers_;  // by decoder index
  std::set<std::string> used_;
  std::vector<std::string> skipped_;
  std::string layout_;
  std::string fingerprint_;
};

// All prefixes a layer's MoE block may have, the preferred one first.
std::vector<std::string> BlockPrefixes(const Family& family, int32_t layer) {
  std::vector<std::string> prefixes;
  for (const std::string& prefix : family.layer_prefixes) {
    for (const std::string& block : family.blocks) {
      prefixes.push_back(absl::StrReplaceAll(prefix + block, {{"{layer}", absl::StrCat(layer)}}));
    }
  }
  return prefixes;
}

absl::Status FolderCheckpoint::Resolve(const Family& family, const std::string& canonical_config) {
  for (LayerDescription& layer : model_.layers) RETURN_IF_ERROR(ResolveLayer(family, &layer));
  for (int32_t layer = 0; layer < model_.num_hidden_layers; ++layer) {
    if (model_.Find(layer) != nullptr) continue;
    for (const std::string& block : BlockPrefixes(family, layer)) {
      for (const std::string& name : family.router_weight) {
        if (!Has(block + name)) continue;
        return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " has a tensor '", block,
                                                       name, "', but by config.json it is dense"));
      }
    }
  }
  for (const auto& [name, unused] : shards_.tensors) {
    if (used_.count(name) == 0) skipped_.push_back(name);
  }
  ASSIGN_OR_RETURN(fingerprint_, Fingerprint(canonical_config, shards_, model_));
  return absl::OkStatus();
}

absl::Status FolderCheckpoint::ResolveLayer(const Family& family, LayerDescription* layer) {
  std::vector<std::string> looked_for;
  for (const std::string& block : BlockPrefixes(family, layer->layer)) {
    for (const std::string& name : family.router_weight) {
      looked_for.push_back(block + name);
      if (!Has(looked_for.back())) continue;
      LayerTensors tensors;
      tensors.router = looked_for.back();
      RETURN_IF_ERROR(ResolveGate(family, *layer, block, &tensors));
      RETURN_IF_ERROR(ResolveExperts(family, block, layer, &tensors));
      RETURN_IF_ERROR(RefuseUnknown(family, *layer, tensors));
      layers_[layer->layer] = std::move(tensors);
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "layer ", layer->layer,
      " is a MoE layer by config.json, but no gate is there: ", absl::StrJoin(looked_for, " or ")));
}

absl::Status FolderCheckpoint::ResolveGate(const Family& family, const LayerDescription& layer,
                                           const std::string& block, LayerTensors* tensors) {
  const int64_t num_experts = layer.router.num_experts;
  RETURN_IF_ERROR(Use(tensors->router, {num_experts, layer.experts.hidden_size}).status());
  const struct {
    bool wanted;
    const std::vector<std::string>& names;
    std::string* full_name;
  } vectors[] = {
      {layer.router.has_logits_bias, family.logits_bias, &tensors->logits_bias},
      {layer.router.has_selection_bias, family.selection_bias, &tensors->selection_bias},
      {layer.router.has_per_expert_scale, family.per_expert_scale, &tensors->per_expert_scale},
  };
  for (const auto& vector : vectors) {
    if (!vector.wanted) continue;
    for (const std::string& name : vector.names) {
      if (Has(block + name)) *vector.full_name = block + name;
    }
    if (vector.full_name->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", block, absl::StrJoin(vector.names, "' or '"), "' is missing"));
    }
    RETURN_IF_ERROR(Use(*vector.full_name, {num_experts}).status());
  }
  return absl::OkStatus();
}

// The matrices of a layout in a block.
void PlaceMatrices(const ExpertLayout& layout, const std::string& block,
                   const ExpertDescriptor& experts, LayerTensors* tensors) {
  const int64_t hidden = experts.hidden_size;
  const int64_t intermediate = experts.intermediate_size;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, int64_t first_row,
                          GateUpOrder order) {
    return Matrix{.pattern = block + name,
                  .rows = rows,
                  .cols = cols,
                  .first_row = first_row,
                  .order = order,
                  .transposed = layout.transposed};
  };
  if (layout.gate_up.empty()) {
    tensors->gate_up = {
        matrix(layout.gate, intermediate, hidden, 0, GateUpOrder::kGateFirst),
        matrix(layout.up, intermediate, hidden, intermediate, GateUpOrder::kGateFirst)};
  } else {
    tensors->gate_up = {matrix(layout.gate_up, 2 * intermediate, hidden, 0, layout.order)};
  }
  tensors->down = matrix(layout.down, hidden, intermediate, 0, GateUpOrder::kGateFirst);
}

absl::Status FolderCheckpoint::ResolveExperts(const Family& family, const std::string& block,
                                              LayerDescription* layer, LayerTensors* tensors) {
  std::vector<std::string> looked_for;
  for (const ExpertLayout& layout : family.layouts) {
    PlaceMatrices(layout, block, layer->experts, tensors);
    looked_for.push_back(tensors->gate_up.front().NameOfExpert(0));
    if (!Has(looked_for.back()) && !Has(tensors->down.NameOfExpert(0))) continue;

    if (layout_.empty()) layout_ = layout.name;
    if (layout_ != layout.name) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", layer->layer, " is laid out ",
                                                     layout.name, ", the layers before it ",
                                                     layout_));
    }
    std::vector<Matrix> matrices = tensors->gate_up;
    matrices.push_back(tensors->down);
    std::optional<DType> common;
    for (int32_t expert = 0; expert < layer->router.num_experts; ++expert) {
      for (const Matrix& matrix : matrices) {
        if (matrix.stacked() && expert > 0) continue;
        const std::string name = matrix.NameOfExpert(expert);
        ASSIGN_OR_RETURN(const DType dtype, Use(name, matrix.FileShape(layer->router.num_experts)));
        if (common && *common != dtype) {
          return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is ", NameOf(dtype),
                                                         ", expected ", NameOf(*common),
                                                         " like the layer's other experts"));
        }
        common = dtype;
      }
    }
    layer->experts.weight_dtype = *common;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer->layer,
                                                 " has no experts: neither ",
                                                 absl::StrJoin(looked_for, " nor "), " is there"));
}

// A tensor in a served block that we do not use would change the block's result if it were used.
absl::Status FolderCheckpoint::RefuseUnknown(const Family& family, const LayerDescription& layer,
                                             const LayerTensors& tensors) const {
  for (const std::string& block : BlockPrefixes(family, layer.layer)) {
    for (auto entry = shards_.tensors.lower_bound(block);
         entry != shards_.tensors.end() && absl::StartsWith(entry->first, block); ++entry) {
      const std::string& name = entry->first;
      if (used_.count(name) != 0) continue;
      // Names of experts that would be used if there were more of them.
      std::vector<Matrix> matrices = tensors.gate_up;
      matrices.push_back(tensors.down);
      for (const Matrix& matrix : matrices) {
        const std::string before = matrix.pattern.substr(0, matrix.pattern.find(kExpert));
        int32_t expert = -1;
        if (!matrix.stacked() && absl::StartsWith(name, before)) {
          const std::string rest = name.substr(before.size());
          if (absl::SimpleAtoi(rest.substr(0, rest.find('.')), &expert) &&
              expert >= layer.router.num_experts && name == matrix.NameOfExpert(expert)) {
            return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is of expert ",
                                                           expert, ", but config.json says ",
                                                           layer.router.num_experts, " experts"));
          }
        }
      }
      return absl::UnimplementedError(
          absl::StrCat("tensor '", name, "' in a served layer is not supported by model type '",
                       family.model_type, "'"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> FolderCheckpoint::Use(const std::string& name,
                                            const std::vector<int64_t>& shape) {
  const auto found = shards_.tensors.find(name);
  if (found == shards_.tensors.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", name, "' is missing, expected with shape ", ShapeToString(shape)));
  }
  const TensorLocation& location = found->second;
  // A vector may be stored as one row.
  const bool one_row =
      shape.size() == 1 && location.info->shape == std::vector<int64_t>{1, shape[0]};
  if (location.info->shape != shape && !one_row) {
    return absl::InvalidArgumentError(absl::StrCat(
        location.file->path(), ": tensor '", name, "' has shape ",
        ShapeToString(location.info->shape), ", by config.json expected ", ShapeToString(shape)));
  }
  if (!IsActivationDType(location.info->dtype)) {
    return absl::UnimplementedError(absl::StrCat(location.file->path(), ": tensor '", name, "' is ",
                                                 NameOf(location.info->dtype),
                                                 ", supported are F32, BF16 and F16"));
  }
  used_.insert(name);
  return location.info->dtype;
}

int64_t FolderCheckpoint::ExpertBytes(int32_t layer) const {
  const ExpertDescriptor& experts = model_.Find(layer)->experts;
  return 3 * experts.hidden_size * experts.intermediate_size * BytesOf(experts.weight_dtype);
}

absl::Status FolderCheckpoint::ReadFinite(const std::string& name, int64_t first, int64_t count,
                                          std::byte* destination) const {
  const TensorLocation& location = shards_.tensors.at(name);
  const DType dtype = location.info->dtype;
  RETURN_IF_ERROR(
      location.file->Read(name, first * BytesOf(dtype), count * BytesOf(dtype), destination));
  int64_t bad = KernelsOf(BestIsa()).find_not_finite(dtype, destination, count);
  if (bad < 0) return absl::OkStatus();
  const float value = LoadFloat(dtype, destination, bad);
  bad += first;
  std::vector<int64_t> index(location.info->shape.size());
  for (size_t i = index.size(); i-- > 0;) {
    index[i] = bad % location.info->shape[i];
    bad /= location.info->shape[i];
  }
  return absl::InvalidArgumentError(absl::StrCat(location.file->path(), ": tensor '", name, "' is ",
                                                 value, " at ", ShapeToString(index),
                                                 ", expected finite weights"));
}

absl::StatusOr<Tensor> FolderCheckpoint::ReadVector(const std::string& name) const {
  if (name.empty()) return Tensor();
  const TensorInfo& info = *shards_.tensors.at(name).info;
  const int64_t count = NumElements(info.shape);
  Tensor stored(info.dtype, {count});
  RETURN_IF_ERROR(ReadFinite(name, 0, count, stored.data()));
  Tensor widened(DType::kF32, {count});
  for (int64_t i = 0; i < count; ++i) {
    widened.as<float>()[i] = LoadFloat(info.dtype, stored.data(), i);
  }
  return widened;
}

absl::Status FolderCheckpoint::ReadMatrix(const Matrix& matrix, int32_t expert,
                                          Tensor* destination) const {
  const std::string name = matrix.NameOfExpert(expert);
  const int64_t count = matrix.rows * matrix.cols;
  const int64_t first = matrix.stacked() ? expert * count : 0;
  const int64_t element = BytesOf(destination->dtype());
  if (!matrix.transposed && matrix.order == GateUpOrder::kGateFirst) {
    return ReadFinite(name, first, count,
                      destination->data() + matrix.first_row * matrix.cols * element);
  }
  Tensor stored(destination->dtype(), {count});
  RETURN_IF_ERROR(ReadFinite(name, first, count, stored.data()));
  if (element == 2) {
    Arrange(matrix, stored.as<uint16_t>(), destination->as<uint16_t>());
  } else {
    Arrange(matrix, stored.as<uint32_t>(), destination->as<uint32_t>());
  }
  return absl::OkStatus();
}

absl::StatusOr<RouterWeights> FolderCheckpoint::ReadRouter(int32_t layer) const {
  const auto tensors = layers_.find(layer);
  if (tensors == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " is not served"));
  }
  const TensorInfo& info = *shards_.tensors.at(tensors->second.router).info;
  RouterWeights router;
  router.weight = Tensor(info.dtype, info.shape);
  RETURN_IF_ERROR(
      ReadFinite(tensors->second.router, 0, router.weight.num_elements(), router.weight.data()));
  ASSIGN_OR_RETURN(router.logits_bias, ReadVector(tensors->second.logits_bias));
  ASSIGN_OR_RETURN(router.selection_bias, ReadVector(tensors->second.selection_bias));
  ASSIGN_OR_RETURN(router.per_expert_scale, ReadVector(tensors->second.per_expert_scale));
  return router;
}

absl::StatusOr<ExpertWeights> FolderCheckpoint::ReadExpert(int32_t layer, int32_t expert) const {
  const auto tensors = layers_.find(layer);
  if (tensors == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " is not served"));
  }
  const LayerDescription& description = *model_.Find(layer);
  if (expert < 0 || expert >= description.router.num_experts) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " has no expert ", expert, ", it has ",
                                            description.router.num_experts));
  }
  const ExpertDescriptor& shape = description.experts;
  ExpertWeights weights;
  weights.gate_up = Tensor(shape.weight_dtype, {2 * shape.intermediate_size, shape.hidden_size});
  weights.down = Tensor(shape.weight_dtype, {shape.hidden_size, shape.intermediate_size});
  for (const Matrix& matrix : tensors->second.gate_up) {
    RETURN_IF_ERROR(ReadMatrix(matrix, expert, &weights.gate_up));
  }
  RETURN_IF_ERROR(ReadMatrix(tensors->second.down, expert, &weights.down));
  return weights;
}

// Prepends the folder or file to a message.
absl::Status In(const std::string& path, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Checkpoint>> Checkpoint::Open(const std::string& directory) {
  return Open(directory, BuiltInFamilies());
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> Checkpoint::Open(
    const std::string& directory, absl::Span<const Family> families) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    return absl::NotFoundError(absl::StrCat(directory, ": no such folder"));
  }
  const std::string config_path = directory + "/config.json";
  ASSIGN_OR_RETURN(const std::string config_text, ReadWholeFile(config_path));
  const absl::StatusOr<json> config = ParseStrictJson(config_text);
  if (!config.ok()) return In(config_path, config.status());
  absl::StatusOr<DescribedModel> model = DescribeModel(*config, families);
  if (!model.ok()) return In(config_path, model.status());
  ASSIGN_OR_RETURN(Shards shards, OpenShards(directory));
  auto checkpoint =
      std::make_shared<FolderCheckpoint>(std::move(model->description), std::move(shards));
  RETURN_IF_ERROR(In(directory, checkpoint->Resolve(*model->family, config->dump())));
  return checkpoint;
}

}  // namespace expertmesh
