#include "common/model/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/kernels/kernels.h"
#include "common/model/fingerprint.h"
#include "common/model/quantization.h"
#include "common/model/registry.h"
#include "common/model/shards.h"
#include "common/safetensors/strict_json.h"
#include "common/status.h"

namespace expertmesh {
namespace {

using nlohmann::json;

constexpr char kExpert[] = "{expert}";

// Where a matrix, or a bias, goes.
enum class Part { kGateUp, kDown, kGateUpBias, kDownBias };

// One matrix of an expert: where it is, and where its rows go. A bias is one with a single column.
struct Matrix {
  Part part = Part::kGateUp;
  std::string pattern;  // full name; kExpert stands for the id
  int64_t rows = 0;     // of one expert, in the canonical arrangement [rows, cols]
  int64_t cols = 0;
  int64_t first_row = 0;  // of the destination
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposed = false;
  int64_t stacked = 0;  // experts in the tensor; 0: it is of one expert
  bool joined = false;  // stacked without a dimension for the experts

  bool is_bias() const { return part == Part::kGateUpBias || part == Part::kDownBias; }
  std::string NameOfExpert(int32_t expert) const {
    return absl::StrReplaceAll(pattern, {{kExpert, absl::StrCat(expert)}});
  }
  // The shape in the file, of a tensor of so many experts where it is stacked.
  std::vector<int64_t> FileShape(int64_t experts) const {
    std::vector<int64_t> shape = {transposed ? cols : rows, transposed ? rows : cols};
    if (is_bias()) shape = {rows};
    if (stacked > 0 && joined) shape[0] *= experts;
    if (stacked > 0 && !joined) shape.insert(shape.begin(), experts);
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

// Tensors of a served layer: full names, empty where there is none.
struct LayerTensors {
  std::string router;
  std::string logits_bias;
  std::string selection_bias;
  std::string per_expert_scale;
  std::string input_norm;
  std::string expert_input_norm;
  std::string shared_gate;
  std::vector<Matrix> routed;  // of one expert each
  std::vector<Matrix> shared;  // a dense layer's MLP among them
};

// How a matrix is stored.
struct StoredAs {
  DType dtype = DType::kBF16;
  WeightFormat format = WeightFormat::kPlain;
  ScaleLayout scale_layout = ScaleLayout::kNone;
  DType scale_dtype = DType::kF32;

  std::string InWords() const { return absl::StrCat(NameOf(dtype), " (", NameOf(format), ")"); }
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
  FolderCheckpoint(ModelDescription model, const Quantization& quantization, Shards shards)
      : model_(std::move(model)), quantization_(quantization), shards_(std::move(shards)) {}

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
  absl::Status RefuseGate(const Family& family, int32_t layer) const;
  absl::Status ResolveLayer(const Family& family, LayerDescription* layer);
  absl::Status ResolveGate(const Family& family, const LayerDescription& layer,
                           const std::string& block, LayerTensors* tensors);
  // True if the tensor of a stacked matrix has its rows and columns exchanged.
  bool IsOtherWayRound(Matrix matrix) const;
  // Finds the first of the layouts that a layer has, checks the tensors of `num_experts` experts
  // (0: of one, whose names have no ids) and sets their dtype. The layout, or null if there is
  // none.
  absl::StatusOr<const ExpertLayout*> ResolveExperts(const std::vector<ExpertLayout>& layouts,
                                                     const std::string& block, int32_t num_experts,
                                                     int32_t identity_experts,
                                                     ExpertDescriptor* experts,
                                                     std::vector<Matrix>* matrices);
  absl::Status ResolveDense(const Family& family, LayerDescription* layer);
  absl::Status ResolveShared(const Family& family, const std::string& block,
                             LayerDescription* layer, LayerTensors* tensors);
  absl::Status RefuseUnknown(const Family& family, const LayerDescription& layer,
                             const LayerTensors& tensors) const;

  // Where a layer's experts are missing: the first tensor that may have been meant, for the error
  // text.
  std::string Others(const Family& family, int32_t layer) const;

  bool Has(const std::string& name) const { return shards_.tensors.count(name) != 0; }
  // Where the matrix of that name is, which may be quantised.
  absl::StatusOr<StoredMatrix> Find(const std::string& name) const;
  // Marks a tensor as used, after checking its shape, one of `shapes`, and its dtype.
  absl::StatusOr<DType> UseOf(const std::string& name,
                              const std::vector<std::vector<int64_t>>& shapes,
                              absl::FunctionRef<bool(DType)> is_supported,
                              const std::string& supported);
  // The same for a dtype that we compute with.
  absl::StatusOr<DType> Use(const std::string& name, const std::vector<int64_t>& shape) {
    return UseOf(name, {shape}, IsActivationDType, "F32, BF16 and F16");
  }
  // The same for all tensors of an expert's matrix; how they are stored.
  absl::StatusOr<StoredAs> UseMatrix(const Matrix& matrix, int32_t expert);
  // The same for one of the names a tensor may have.
  absl::StatusOr<std::string> UseOne(const std::string& block,
                                     const std::vector<std::string>& names,
                                     const std::vector<int64_t>& shape);

  // What is wrong with element `index` of a tensor.
  absl::Status BadElement(const std::string& name, int64_t index, const std::string& value,
                          const std::string& expected) const;
  // The elements [first, first + count) of a tensor, refused if one is not finite.
  absl::Status ReadFinite(const std::string& name, int64_t first, int64_t count,
                          std::byte* destination) const;
  // A whole tensor as stored, or [0] where there is no name.
  absl::StatusOr<Tensor> ReadStored(const std::string& name) const;
  absl::StatusOr<Tensor> ReadVector(const std::string& name) const;
  absl::StatusOr<ExpertWeights> ReadMatrices(const ExpertDescriptor& shape,
                                             const std::vector<Matrix>& matrices,
                                             int32_t expert) const;
  // A matrix, and its scales if it has any, to their places.
  absl::Status ReadMatrix(const Matrix& matrix, int32_t expert, Tensor* values,
                          Tensor* scales) const;
  absl::Status ReadScales(const Matrix& matrix, int32_t expert, const StoredMatrix& stored,
                          Tensor* scales) const;

  ModelDescription model_;
  const Quantization quantization_;
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

// All prefixes of tensors that must be understood in a served layer.
std::vector<std::string> PartPrefixes(const Family& family, int32_t layer) {
  std::vector<std::string> prefixes;
  for (const std::string& block : BlockPrefixes(family, layer)) {
    if (family.parts_of_block.empty()) prefixes.push_back(block);
    for (const std::string& part : family.parts_of_block) prefixes.push_back(block + part);
  }
  return prefixes;
}

std::string FirstNames(const std::vector<ExpertLayout>& layouts, const std::string& block,
                       const ExpertDescriptor& experts, int64_t num_experts);

absl::Status FolderCheckpoint::Resolve(const Family& family, const std::string& canonical_config) {
  for (LayerDescription& layer : model_.layers) RETURN_IF_ERROR(ResolveLayer(family, &layer));
  for (int32_t layer = 0; layer < model_.num_hidden_layers; ++layer) {
    if (model_.Find(layer) != nullptr) continue;
    RETURN_IF_ERROR(RefuseGate(family, layer));
  }
  for (const auto& [name, unused] : shards_.tensors) {
    if (used_.count(name) == 0) skipped_.push_back(name);
  }
  ASSIGN_OR_RETURN(fingerprint_, Fingerprint(canonical_config, shards_, model_));
  return absl::OkStatus();
}

// A gate in a layer that has no experts by the configuration is a contradiction.
absl::Status FolderCheckpoint::RefuseGate(const Family& family, int32_t layer) const {
  for (const std::string& block : BlockPrefixes(family, layer)) {
    for (const std::string& name : family.router_weight) {
      if (!Has(block + name)) continue;
      return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " has a tensor '", block,
                                                     name, "', but by config.json it is not MoE"));
    }
  }
  return absl::OkStatus();
}

absl::Status FolderCheckpoint::ResolveLayer(const Family& family, LayerDescription* layer) {
  if (layer->kind == LayerKind::kDense) return ResolveDense(family, layer);
  std::vector<std::string> looked_for;
  for (const std::string& block : BlockPrefixes(family, layer->layer)) {
    for (const std::string& name : family.router_weight) {
      looked_for.push_back(block + name);
      if (!Has(looked_for.back())) continue;
      LayerTensors tensors;
      tensors.router = looked_for.back();
      RETURN_IF_ERROR(ResolveGate(family, *layer, block, &tensors));
      ASSIGN_OR_RETURN(
          const ExpertLayout* layout,
          ResolveExperts(family.layouts, block, layer->router.num_experts,
                         layer->router.identity_experts, &layer->experts, &tensors.routed));
      if (layout == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat(
            "layer ", layer->layer, " has no experts: none of ",
            FirstNames(family.layouts, block, layer->experts, layer->router.num_experts),
            " is there", Others(family, layer->layer)));
      }
      if (layout_.empty()) layout_ = layout->name;
      if (layout_ != layout->name) {
        return absl::InvalidArgumentError(absl::StrCat("layer ", layer->layer, " is laid out ",
                                                       layout->name, ", the layers before it ",
                                                       layout_));
      }
      RETURN_IF_ERROR(ResolveShared(family, block, layer, &tensors));
      RETURN_IF_ERROR(RefuseUnknown(family, *layer, tensors));
      layers_[layer->layer] = std::move(tensors);
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "layer ", layer->layer,
      " is a MoE layer by config.json, but no gate is there: ", absl::StrJoin(looked_for, " or ")));
}

std::string FolderCheckpoint::Others(const Family& family, int32_t layer) const {
  for (const std::string& prefix : PartPrefixes(family, layer)) {
    for (auto entry = shards_.tensors.lower_bound(prefix);
         entry != shards_.tensors.end() && absl::StartsWith(entry->first, prefix); ++entry) {
      if (used_.count(entry->first) == 0) return absl::StrCat(", but '", entry->first, "' is");
    }
  }
  return "";
}

absl::Status FolderCheckpoint::ResolveGate(const Family& family, const LayerDescription& layer,
                                           const std::string& block, LayerTensors* tensors) {
  const int64_t num_ids = int64_t{layer.router.num_experts} + layer.router.identity_experts;
  const int64_t hidden = layer.experts.hidden_size;
  RETURN_IF_ERROR(Use(tensors->router, {num_ids, hidden}).status());
  const struct {
    bool wanted;
    const std::vector<std::string>& names;
    int64_t size;
    std::string* full_name;
  } vectors[] = {
      {layer.router.has_logits_bias, family.logits_bias, num_ids, &tensors->logits_bias},
      {layer.router.has_selection_bias, family.selection_bias, num_ids, &tensors->selection_bias},
      {layer.router.has_per_expert_scale, family.per_expert_scale, num_ids,
       &tensors->per_expert_scale},
      {layer.router.input_norm.present, family.input_norm, hidden, &tensors->input_norm},
      {layer.expert_input_norm.present, family.expert_input_norm_weight, hidden,
       &tensors->expert_input_norm},
  };
  for (const auto& vector : vectors) {
    if (!vector.wanted) continue;
    ASSIGN_OR_RETURN(*vector.full_name, UseOne(block, vector.names, {vector.size}));
  }
  return absl::OkStatus();
}

// The matrices of a layout in a block: those of one of `num_experts` routed experts, or (0) of one
// expert that is no routed one.
std::vector<Matrix> PlaceMatrices(const ExpertLayout& layout, const std::string& block,
                                  const ExpertDescriptor& experts, int64_t num_experts) {
  const int64_t hidden = experts.hidden_size;
  const int64_t width = experts.intermediate_size;
  const int64_t up_row = experts.gated ? width : 0;
  std::vector<Matrix> matrices;
  const auto add = [&](Part part, const std::string& name, int64_t rows, int64_t cols,
                       int64_t first_row, GateUpOrder order, bool transposed) {
    if (name.empty()) return;
    const bool stacked = num_experts > 0 && !absl::StrContains(name, kExpert);
    matrices.push_back({part, block + name, rows, cols, first_row, order, transposed,
                        stacked ? num_experts : 0, layout.joined});
  };
  const auto in_order = GateUpOrder::kGateFirst;
  add(Part::kGateUp, layout.gate_up, 2 * width, hidden, 0, layout.order, layout.transposed);
  add(Part::kGateUp, layout.gate, width, hidden, 0, in_order, layout.transposed);
  add(Part::kGateUp, layout.up, width, hidden, up_row, in_order, layout.transposed);
  add(Part::kDown, layout.down, hidden, width, 0, in_order,
      layout.transposed || layout.down_transposed);
  if (!experts.has_bias) return matrices;
  add(Part::kGateUpBias, layout.gate_up_bias, 2 * width, 1, 0, layout.order, false);
  add(Part::kGateUpBias, layout.gate_bias, width, 1, 0, in_order, false);
  add(Part::kGateUpBias, layout.up_bias, width, 1, up_row, in_order, false);
  add(Part::kDownBias, layout.down_bias, hidden, 1, 0, in_order, false);
  return matrices;
}

// What an expert's first tensor would be called in each of the layouts.
std::string FirstNames(const std::vector<ExpertLayout>& layouts, const std::string& block,
                       const ExpertDescriptor& experts, int64_t num_experts) {
  std::vector<std::string> names;
  for (const ExpertLayout& layout : layouts) {
    names.push_back(PlaceMatrices(layout, block, experts, num_experts).front().NameOfExpert(0));
  }
  return absl::StrJoin(names, ", ");
}

bool FolderCheckpoint::IsOtherWayRound(Matrix matrix) const {
  const auto found = shards_.tensors.find(matrix.NameOfExpert(0));
  if (found == shards_.tensors.end() || matrix.stacked == 0) return false;
  const std::vector<int64_t>& shape = found->second.info->shape;
  const bool fits = shape == matrix.FileShape(matrix.stacked);
  matrix.transposed = !matrix.transposed;
  return !fits && shape == matrix.FileShape(matrix.stacked);
}

absl::StatusOr<const ExpertLayout*> FolderCheckpoint::ResolveExperts(
    const std::vector<ExpertLayout>& layouts, const std::string& block, int32_t num_experts,
    int32_t identity_experts, ExpertDescriptor* experts, std::vector<Matrix>* matrices) {
  for (const ExpertLayout& layout : layouts) {
    *matrices = PlaceMatrices(layout, block, *experts, num_experts);
    const bool here = std::any_of(matrices->begin(), matrices->end(), [&](const Matrix& matrix) {
      const std::string name = matrix.NameOfExpert(0);
      return Has(name) || Has(name + "_blocks");
    });
    if (!here) continue;
    // The next layout may have the same names, and only the dimensions in another order.
    const bool again = &layout != &layouts.back() && (&layout + 1)->gate_up == layout.gate_up;
    if (again && std::any_of(matrices->begin(), matrices->end(),
                             [this](const Matrix& matrix) { return IsOtherWayRound(matrix); })) {
      continue;
    }

    std::optional<StoredAs> common;
    std::string first;  // whose it is
    for (int32_t expert = 0; expert < std::max(num_experts, 1); ++expert) {
      for (Matrix& matrix : *matrices) {
        if (matrix.stacked > 0 && expert > 0) continue;
        const std::string name = matrix.NameOfExpert(expert);
        // Some files have matrices of identity experts too, which nobody reads.
        const auto found = shards_.tensors.find(name);
        if (matrix.stacked > 0 && found != shards_.tensors.end() &&
            found->second.info->shape == matrix.FileShape(matrix.stacked + identity_experts)) {
          matrix.stacked += identity_experts;
        }
        if (matrix.is_bias()) {
          RETURN_IF_ERROR(Use(name, matrix.FileShape(matrix.stacked)).status());
          continue;
        }
        ASSIGN_OR_RETURN(const StoredAs stored, UseMatrix(matrix, expert));
        if (!common) {
          common = stored;
          first = name;
        }
        if (stored.dtype != common->dtype || stored.format != common->format) {
          return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is ",
                                                         stored.InWords(), ", expected ",
                                                         common->InWords(), " like '", first, "'"));
        }
        if (stored.scale_layout != common->scale_layout) {
          common->scale_layout = ScaleLayout::kMixed;
        }
      }
    }
    experts->weight_dtype = common->dtype;
    experts->weight_format = common->format;
    experts->scale_layout = common->scale_layout;
    experts->scale_dtype = common->scale_dtype;
    return &layout;
  }
  return nullptr;
}

absl::Status FolderCheckpoint::ResolveShared(const Family& family, const std::string& block,
                                             LayerDescription* layer, LayerTensors* tensors) {
  if (layer->shared.count == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(
      const ExpertLayout* layout,
      ResolveExperts(family.shared_layouts, block, 0, 0, &layer->shared.experts, &tensors->shared));
  if (layout == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", layer->layer, " has no shared expert: none of ",
        FirstNames(family.shared_layouts, block, layer->shared.experts, 0), " is there"));
  }
  if (!layer->shared.gated_by_sigmoid) return absl::OkStatus();
  ASSIGN_OR_RETURN(tensors->shared_gate,
                   UseOne(block, family.shared_gate, {1, layer->experts.hidden_size}));
  return absl::OkStatus();
}

absl::Status FolderCheckpoint::ResolveDense(const Family& family, LayerDescription* layer) {
  RETURN_IF_ERROR(RefuseGate(family, layer->layer));
  std::vector<std::string> looked_for;
  for (const std::string& block : BlockPrefixes(family, layer->layer)) {
    LayerTensors tensors;
    ASSIGN_OR_RETURN(
        const ExpertLayout* layout,
        ResolveExperts(family.dense_layouts, block, 0, 0, &layer->shared.experts, &tensors.shared));
    looked_for.push_back(FirstNames(family.dense_layouts, block, layer->shared.experts, 0));
    if (layout == nullptr) continue;
    RETURN_IF_ERROR(RefuseUnknown(family, *layer, tensors));
    layers_[layer->layer] = std::move(tensors);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer->layer,
                                                 " is dense by config.json, but none of ",
                                                 absl::StrJoin(looked_for, ", "), " is there"));
}

// The expert whose matrix `name` would be if there were enough of them, or -1.
int32_t ExpertOfName(const std::vector<Matrix>& matrices, const std::string& name) {
  for (const Matrix& matrix : matrices) {
    const size_t at = matrix.pattern.find(kExpert);
    if (at == std::string::npos || !absl::StartsWith(name, matrix.pattern.substr(0, at))) continue;
    const std::string rest = name.substr(at);
    int32_t expert = -1;
    if (absl::SimpleAtoi(rest.substr(0, rest.find('.')), &expert) && expert >= 0 &&
        name == matrix.NameOfExpert(expert)) {
      return expert;
    }
  }
  return -1;
}

// A tensor in a served block that we do not use would change the block's result if it were used.
absl::Status FolderCheckpoint::RefuseUnknown(const Family& family, const LayerDescription& layer,
                                             const LayerTensors& tensors) const {
  const RouterDescriptor& router = layer.router;
  for (const std::string& prefix : PartPrefixes(family, layer.layer)) {
    for (auto entry = shards_.tensors.lower_bound(prefix);
         entry != shards_.tensors.end() && absl::StartsWith(entry->first, prefix); ++entry) {
      const std::string& name = entry->first;
      if (used_.count(name) != 0) continue;
      if (!quantization_.none() && IsUnusedByQuantization(name)) continue;
      const int32_t expert = ExpertOfName(tensors.routed, name);
      if (expert >= int64_t{router.num_experts} + router.identity_experts) {
        return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is of expert ", expert,
                                                       ", but config.json says ",
                                                       router.num_experts, " experts"));
      }
      if (expert >= router.num_experts) continue;  // of an identity expert: nobody reads it
      return absl::UnimplementedError(
          absl::StrCat("tensor '", name, "' in a served layer is not supported by model type '",
                       family.model_type, "'"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FolderCheckpoint::UseOne(const std::string& block,
                                                     const std::vector<std::string>& names,
                                                     const std::vector<int64_t>& shape) {
  std::string full_name;
  for (const std::string& name : names) {
    if (Has(block + name)) full_name = block + name;
  }
  if (full_name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", block, absl::StrJoin(names, absl::StrCat("' or '", block)),
                     "' is missing, expected with shape ", ShapeToString(shape)));
  }
  RETURN_IF_ERROR(Use(full_name, shape).status());
  return full_name;
}

absl::StatusOr<StoredMatrix> FolderCheckpoint::Find(const std::string& name) const {
  return FindMatrix(quantization_, name, [this](const std::string& tensor) {
    const auto found = shards_.tensors.find(tensor);
    return found == shards_.tensors.end() ? std::nullopt
                                          : std::optional<DType>(found->second.info->dtype);
  });
}

absl::StatusOr<DType> FolderCheckpoint::UseOf(const std::string& name,
                                              const std::vector<std::vector<int64_t>>& shapes,
                                              absl::FunctionRef<bool(DType)> is_supported,
                                              const std::string& supported) {
  const auto expected = [&shapes] {
    std::vector<std::string> texts;
    for (const std::vector<int64_t>& shape : shapes) texts.push_back(ShapeToString(shape));
    return absl::StrJoin(texts, " or ");
  };
  const auto found = shards_.tensors.find(name);
  if (found == shards_.tensors.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", name, "' is missing, expected with shape ", expected()));
  }
  const TensorLocation& location = found->second;
  if (!is_supported(location.info->dtype)) {  // first: packed values have other shapes, too
    return absl::UnimplementedError(absl::StrCat(location.file->path(), ": tensor '", name, "' is ",
                                                 NameOf(location.info->dtype), ", supported are ",
                                                 supported));
  }
  const std::vector<int64_t>& given = location.info->shape;
  // A vector may be stored as one row.
  const bool fits = std::any_of(shapes.begin(), shapes.end(), [&](const auto& shape) {
    return given == shape || (shape.size() == 1 && given == std::vector<int64_t>{1, shape[0]});
  });
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat(location.file->path(), ": tensor '", name,
                                                   "' has shape ", ShapeToString(given),
                                                   ", by config.json expected ", expected()));
  }
  used_.insert(name);
  return location.info->dtype;
}

absl::StatusOr<StoredAs> FolderCheckpoint::UseMatrix(const Matrix& matrix, int32_t expert) {
  ASSIGN_OR_RETURN(const StoredMatrix stored, Find(matrix.NameOfExpert(expert)));
  std::vector<int64_t> shape = matrix.FileShape(matrix.stacked);
  StoredAs result;
  result.format = stored.format;
  if (stored.format == WeightFormat::kPlain) {
    ASSIGN_OR_RETURN(result.dtype, Use(stored.values, shape));
    return result;
  }
  if (matrix.stacked > 0 && matrix.joined) {
    return absl::UnimplementedError(absl::StrCat(
        "tensor '", stored.values, "' is quantised (", NameOf(stored.format),
        "): all experts are rows of this one matrix, and where the scales of one of them begin is "
        "not defined; expected F32, BF16 or F16"));
  }
  std::vector<int64_t> leading;
  if (matrix.stacked > 0) leading.push_back(matrix.stacked);
  const bool mxfp4 = stored.format == WeightFormat::kMxfp4;
  if (mxfp4) {
    if (matrix.cols % kMxBlockK != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", stored.values, "': expected a multiple of ", kMxBlockK,
                       " weights in a row, by config.json there are ", matrix.cols));
    }
    shape = leading;
    shape.insert(shape.end(), {matrix.rows, matrix.cols / kMxBlockK, kMxBlockK / 2});
  }
  result.dtype = mxfp4 ? DType::kF4 : DType::kF8_E4M3;
  const DType storage = StorageDType(result.dtype);
  RETURN_IF_ERROR(
      UseOf(
          stored.values, {shape}, [storage](DType d) { return d == storage; }, NameOf(storage))
          .status());
  ASSIGN_OR_RETURN(
      result.scale_dtype,
      UseOf(
          stored.scales,
          ScaleShapes(stored.format, matrix.rows, matrix.cols, matrix.transposed, leading),
          [&stored](DType d) { return IsScaleDType(stored.format, d); },
          mxfp4 ? "U8 and F8_E8M0" : "F32, BF16, F16 and F8_E8M0"));
  result.scale_layout = LayoutOfScales(stored.format, shards_.tensors.at(stored.scales).info->shape,
                                       std::max<int64_t>(1, matrix.stacked));
  return result;
}

int64_t FolderCheckpoint::ExpertBytes(int32_t layer) const {
  const LayerDescription& description = *model_.Find(layer);
  return description.kind == LayerKind::kDense ? 0 : BytesOfExpert(description.experts);
}

absl::Status FolderCheckpoint::ReadFinite(const std::string& name, int64_t first, int64_t count,
                                          std::byte* destination) const {
  const TensorLocation& location = shards_.tensors.at(name);
  const DType dtype = location.info->dtype;
  RETURN_IF_ERROR(
      location.file->Read(name, first * BytesOf(dtype), count * BytesOf(dtype), destination));
  if (dtype == DType::kU8) return absl::OkStatus();  // codes that are all finite
  const int64_t bad = KernelsOf(BestIsa()).find_not_finite(dtype, destination, count);
  if (bad < 0) return absl::OkStatus();
  const std::string value =
      dtype == DType::kF8_E4M3 ? "nan" : absl::StrCat(LoadFloat(dtype, destination, bad));
  return BadElement(name, first + bad, value, "finite weights");
}

absl::Status FolderCheckpoint::BadElement(const std::string& name, int64_t index,
                                          const std::string& value,
                                          const std::string& expected) const {
  const TensorLocation& location = shards_.tensors.at(name);
  std::vector<int64_t> position(location.info->shape.size());
  for (size_t i = position.size(); i-- > 0;) {
    position[i] = index % location.info->shape[i];
    index /= location.info->shape[i];
  }
  return absl::InvalidArgumentError(absl::StrCat(location.file->path(), ": tensor '", name, "' is ",
                                                 value, " at ", ShapeToString(position),
                                                 ", expected ", expected));
}

absl::StatusOr<Tensor> FolderCheckpoint::ReadStored(const std::string& name) const {
  if (name.empty()) return Tensor();
  const TensorInfo& info = *shards_.tensors.at(name).info;
  Tensor stored(info.dtype, info.shape);
  RETURN_IF_ERROR(ReadFinite(name, 0, stored.num_elements(), stored.data()));
  return stored;
}

// As an F32 vector.
Tensor Widen(const Tensor& stored) {
  Tensor widened(DType::kF32, {stored.num_elements()});
  for (int64_t i = 0; i < stored.num_elements(); ++i) {
    widened.as<float>()[i] = LoadFloat(stored.dtype(), stored.data(), i);
  }
  return widened;
}

absl::StatusOr<Tensor> FolderCheckpoint::ReadVector(const std::string& name) const {
  if (name.empty()) return Tensor();
  ASSIGN_OR_RETURN(const Tensor stored, ReadStored(name));
  return Widen(stored);
}

absl::Status FolderCheckpoint::ReadMatrix(const Matrix& matrix, int32_t expert, Tensor* values,
                                          Tensor* scales) const {
  ASSIGN_OR_RETURN(const StoredMatrix stored, Find(matrix.NameOfExpert(expert)));
  Matrix elements = matrix;
  if (stored.format == WeightFormat::kMxfp4) {  // two in a byte, and in rows whatever the layout
    elements.cols /= 2;
    elements.transposed = false;
  }
  const int64_t count = elements.rows * elements.cols;
  const int64_t first = matrix.stacked > 0 ? expert * count : 0;
  const int64_t element = BytesOf(values->dtype());
  if (!elements.transposed && elements.order == GateUpOrder::kGateFirst) {
    RETURN_IF_ERROR(ReadFinite(stored.values, first, count,
                               values->data() + elements.first_row * elements.cols * element));
  } else {
    Tensor source(values->dtype(), {count});
    RETURN_IF_ERROR(ReadFinite(stored.values, first, count, source.data()));
    if (element == 1) {
      Arrange(elements, source.as<uint8_t>(), values->as<uint8_t>());
    } else if (element == 2) {
      Arrange(elements, source.as<uint16_t>(), values->as<uint16_t>());
    } else {
      Arrange(elements, source.as<uint32_t>(), values->as<uint32_t>());
    }
  }
  if (stored.format == WeightFormat::kPlain) return absl::OkStatus();
  return ReadScales(matrix, expert, stored, scales);
}

absl::Status FolderCheckpoint::ReadScales(const Matrix& matrix, int32_t expert,
                                          const StoredMatrix& stored, Tensor* scales) const {
  const TensorLocation& location = shards_.tensors.at(stored.scales);
  const DType dtype = location.info->dtype;
  const int64_t count = NumElements(location.info->shape) / std::max<int64_t>(1, matrix.stacked);
  const int64_t first = matrix.stacked > 0 ? expert * count : 0;
  Tensor source(dtype, {count});
  RETURN_IF_ERROR(location.file->Read(stored.scales, first * BytesOf(dtype), count * BytesOf(dtype),
                                      source.data()));
  if (const int64_t bad = FindBadScale(stored.format, source); bad >= 0) {
    const bool mxfp4 = stored.format == WeightFormat::kMxfp4;
    const bool exponents = mxfp4 || dtype == DType::kF8_E8M0;
    const std::string value = exponents
                                  ? absl::StrCat("the exponent ", int{source.as<uint8_t>()[bad]})
                                  : absl::StrCat(LoadFloat(dtype, source.data(), bad));
    return BadElement(stored.scales, first + bad, value,
                      mxfp4 ? absl::StrCat("exponents of at most ", int{kMaxMxfp4Scale})
                            : "positive finite scales");
  }
  Matrix rows = matrix;
  const Tensor expanded =
      ExpandScales(stored.format, source, matrix.rows, matrix.cols, matrix.transposed);
  rows.cols = expanded.dim(1);
  rows.transposed = false;
  if (scales->dtype() == DType::kU8) {
    Arrange(rows, expanded.as<uint8_t>(), scales->as<uint8_t>());
  } else {
    Arrange(rows, expanded.as<float>(), scales->as<float>());
  }
  return absl::OkStatus();
}

absl::StatusOr<ExpertWeights> FolderCheckpoint::ReadMatrices(const ExpertDescriptor& shape,
                                                             const std::vector<Matrix>& matrices,
                                                             int32_t expert) const {
  const int64_t rows = (shape.gated ? 2 : 1) * shape.intermediate_size;
  ExpertWeights weights;
  const auto allocate = [&shape](int64_t n, int64_t k, Tensor* values, Tensor* scales) {
    const WeightFormat format = shape.weight_format;
    *values =
        Tensor(StorageDType(shape.weight_dtype), {n, format == WeightFormat::kMxfp4 ? k / 2 : k});
    if (format == WeightFormat::kPlain) return;
    *scales = Tensor(ScaleDType(format), {n, ScalesPerRow(format, k)});
  };
  allocate(rows, shape.hidden_size, &weights.gate_up, &weights.gate_up_scales);
  allocate(shape.hidden_size, shape.intermediate_size, &weights.down, &weights.down_scales);
  if (shape.has_bias) {
    weights.gate_up_bias = Tensor(DType::kF32, {rows});
    weights.down_bias = Tensor(DType::kF32, {shape.hidden_size});
  }
  for (const Matrix& matrix : matrices) {
    if (!matrix.is_bias()) {
      const bool down = matrix.part == Part::kDown;
      RETURN_IF_ERROR(ReadMatrix(matrix, expert, down ? &weights.down : &weights.gate_up,
                                 down ? &weights.down_scales : &weights.gate_up_scales));
      continue;
    }
    Tensor& bias = matrix.part == Part::kDownBias ? weights.down_bias : weights.gate_up_bias;
    const std::string name = matrix.NameOfExpert(expert);
    Tensor stored(shards_.tensors.at(name).info->dtype, {matrix.rows});
    RETURN_IF_ERROR(ReadFinite(name, matrix.stacked > 0 ? expert * matrix.rows : 0, matrix.rows,
                               stored.data()));
    Arrange(matrix, Widen(stored).as<float>(), bias.as<float>());
  }
  return weights;
}

absl::StatusOr<RouterWeights> FolderCheckpoint::ReadRouter(int32_t layer) const {
  const auto found = layers_.find(layer);
  if (found == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " is not served"));
  }
  const LayerTensors& tensors = found->second;
  RouterWeights router;
  ASSIGN_OR_RETURN(router.weight, ReadStored(tensors.router));
  ASSIGN_OR_RETURN(router.logits_bias, ReadVector(tensors.logits_bias));
  ASSIGN_OR_RETURN(router.selection_bias, ReadVector(tensors.selection_bias));
  ASSIGN_OR_RETURN(router.per_expert_scale, ReadVector(tensors.per_expert_scale));
  ASSIGN_OR_RETURN(router.shared_gate, ReadStored(tensors.shared_gate));
  ASSIGN_OR_RETURN(router.input_norm, ReadVector(tensors.input_norm));
  ASSIGN_OR_RETURN(router.expert_input_norm, ReadVector(tensors.expert_input_norm));
  return router;
}

absl::StatusOr<ExpertWeights> FolderCheckpoint::ReadExpert(int32_t layer, int32_t expert) const {
  const auto tensors = layers_.find(layer);
  if (tensors == layers_.end()) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " is not served"));
  }
  const LayerDescription& description = *model_.Find(layer);
  const int32_t routed = description.router.num_experts;
  if (expert < 0 || expert >= routed + description.shared.count) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, " has no expert ", expert, ", it has ",
                                            routed, " and ", description.shared.count, " shared"));
  }
  if (expert >= routed) {
    return ReadMatrices(description.shared.experts, tensors->second.shared, expert - routed);
  }
  return ReadMatrices(description.experts, tensors->second.routed, expert);
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
  std::string canonical_config = config->dump();
  const std::string quantization_path = directory + "/hf_quant_config.json";
  if (model->quantization.none() && std::filesystem::exists(quantization_path, error)) {
    ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(quantization_path));
    const absl::StatusOr<json> file = ParseStrictJson(text);
    if (!file.ok()) return In(quantization_path, file.status());
    const absl::StatusOr<Quantization> quantization = ReadHfQuantConfig(*file);
    if (!quantization.ok()) return In(quantization_path, quantization.status());
    model->quantization = *quantization;
    canonical_config += file->dump();
  }
  ASSIGN_OR_RETURN(Shards shards, OpenShards(directory));
  auto checkpoint = std::make_shared<FolderCheckpoint>(std::move(model->description),
                                                       model->quantization, std::move(shards));
  RETURN_IF_ERROR(In(directory, checkpoint->Resolve(*model->family, canonical_config)));
  return checkpoint;
}

}  // namespace expertmesh
