#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/model/checkpoint.h"
#include "common/safetensors/safetensors.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/cluster.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/models.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

// The tensors tile the end of the file, and what is read of them are its bytes.
void CheckFile(const SafetensorsFile& file, Bytes bytes) {
  std::vector<const TensorInfo*> infos;
  for (const auto& [name, info] : file.tensors()) infos.push_back(&info);
  std::sort(infos.begin(), infos.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::tie(a->file_offset, a->num_bytes) < std::tie(b->file_offset, b->num_bytes);
  });
  auto end = static_cast<int64_t>(bytes.size());
  for (auto info = infos.rbegin(); info != infos.rend(); ++info) {
    FUZZ_CHECK((*info)->num_bytes >= 0 && (*info)->file_offset + (*info)->num_bytes == end);
    end = (*info)->file_offset;
  }
  FUZZ_CHECK(end >= 8);

  for (const auto& [name, info] : file.tensors()) {
    FUZZ_CHECK(NumElements(info.shape) * BitsOf(info.dtype) == info.num_bytes * 8);
    std::vector<uint8_t> content(static_cast<size_t>(info.num_bytes));
    FUZZ_CHECK(file.Read(name, 0, info.num_bytes, content.data()).ok());
    FUZZ_CHECK(std::equal(content.begin(), content.end(), bytes.begin() + info.file_offset));
    FUZZ_CHECK(!file.Read(name, 1, info.num_bytes, content.data()).ok());
    const auto tensor = file.ReadTensor(name);
    FUZZ_CHECK(tensor.ok() == (BitsOf(info.dtype) % 8 == 0));
    if (tensor.ok()) FUZZ_CHECK(tensor->shape() == info.shape);
  }
}

void CheckFinite(const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    FUZZ_CHECK(std::isfinite(LoadFloat(tensor.dtype(), tensor.data(), i)));
  }
}

// What a checkpoint should have read of the file, found by the names that the family has for it.
class Expected {
 public:
  Expected(const TinyModel& model, const std::string& layout_name, const SafetensorsFile& file,
           Bytes bytes)
      : model_(model), file_(file), bytes_(bytes) {
    for (const ExpertLayout& layout : model.family->layouts) {
      if (layout.name == layout_name) layout_ = &layout;
    }
    FUZZ_CHECK(layout_ != nullptr);
    for (const std::string& prefix : model.family->layer_prefixes) {
      for (const std::string& block : model.family->blocks) {
        const std::string path =
            absl::StrReplaceAll(prefix + block, {{"{layer}", absl::StrCat(model.layer.layer)}});
        const bool there = file.tensors().count(path + model.family->router_weight[0]) != 0;
        if (block_.empty() && there) block_ = path;
      }
    }
    FUZZ_CHECK(!block_.empty());
  }

  void CheckRouter(const RouterWeights& weights) const {
    const int64_t experts = model_.layer.router.num_experts;
    FUZZ_CHECK(weights.weight.shape() == (Shape{experts, model_.layer.experts.hidden_size}));
    FUZZ_CHECK(std::memcmp(weights.weight.data(), At(model_.family->router_weight[0]),
                           weights.weight.num_bytes()) == 0);
    CheckFinite(weights.weight);
    CheckVector(model_.family->logits_bias, weights.logits_bias);
    CheckVector(model_.family->selection_bias, weights.selection_bias);
    CheckVector(model_.family->per_expert_scale, weights.per_expert_scale);
  }

  void CheckExpert(int32_t expert, const ExpertWeights& weights) const {
    const int64_t hidden = model_.layer.experts.hidden_size;
    const int64_t intermediate = model_.layer.experts.intermediate_size;
    FUZZ_CHECK(weights.gate_up.shape() == (Shape{2 * intermediate, hidden}));
    FUZZ_CHECK(weights.down.shape() == (Shape{hidden, intermediate}));
    for (int64_t f = 0; f < intermediate; ++f) {
      for (const int64_t up : {0, 1}) {
        const int64_t row = up * intermediate + f;
        if (layout_->gate_up.empty()) {
          CheckRow(up != 0 ? layout_->up : layout_->gate, expert, intermediate, f, weights.gate_up,
                   row);
          continue;
        }
        const int64_t in_file = layout_->order == GateUpOrder::kGateFirst ? row
                                : layout_->order == GateUpOrder::kUpFirst
                                    ? (1 - up) * intermediate + f
                                    : 2 * f + up;
        CheckRow(layout_->gate_up, expert, 2 * intermediate, in_file, weights.gate_up, row);
      }
    }
    for (int64_t d = 0; d < hidden; ++d)
      CheckRow(layout_->down, expert, hidden, d, weights.down, d);
    CheckFinite(weights.gate_up);
    CheckFinite(weights.down);
  }

 private:
  const uint8_t* At(const std::string& name) const {
    return bytes_.data() + file_.tensors().at(block_ + name).file_offset;
  }

  void CheckVector(const std::vector<std::string>& names, const Tensor& vector) const {
    FUZZ_CHECK(vector.num_elements() == (names.empty() ? 0 : model_.layer.router.num_experts));
    if (names.empty()) return;
    const DType dtype = file_.tensors().at(block_ + names[0]).dtype;
    std::vector<uint8_t> stored(static_cast<size_t>(vector.num_elements() * BytesOf(dtype)));
    std::memcpy(stored.data(), At(names[0]), stored.size());
    for (int64_t i = 0; i < vector.num_elements(); ++i) {
      FUZZ_CHECK(vector.as<float>()[i] == LoadFloat(dtype, stored.data(), i));
    }
    CheckFinite(vector);
  }

  // Row `row` of `matrix` is row `file_row` of `rows` of the expert in the file.
  void CheckRow(const std::string& name, int32_t expert, int64_t rows, int64_t file_row,
                const Tensor& matrix, int64_t row) const {
    const int64_t size = BytesOf(matrix.dtype());
    const int64_t cols = matrix.dim(1);
    const bool stacked = name.find("{expert}") == std::string::npos;
    const uint8_t* stored = At(absl::StrReplaceAll(name, {{"{expert}", absl::StrCat(expert)}})) +
                            (stacked ? expert * rows * cols * size : 0);
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t from = layout_->transposed ? c * rows + file_row : file_row * cols + c;
      FUZZ_CHECK(std::memcmp(matrix.data() + (row * cols + c) * size, stored + from * size,
                             static_cast<size_t>(size)) == 0);
    }
  }

  const TinyModel& model_;
  const SafetensorsFile& file_;
  const Bytes bytes_;
  const ExpertLayout* layout_ = nullptr;
  std::string block_;
};

// Whose matrices are in the file as they are read, or in another order.
bool IsPlain(const TinyModel& model) {
  const LayerDescription& layer = model.layer;
  return model.quantization.none() && model.family->router_weight.size() == 1 &&
         layer.shared.count == 0 && layer.experts.gated && !layer.experts.has_bias &&
         layer.router.identity_experts == 0 && !model.family->layouts[0].joined;
}

// True if the file has the gate of that model, without which there is nothing to see.
bool HasGate(const TinyModel& model, const SafetensorsFile& file) {
  for (const std::string& prefix : model.family->layer_prefixes) {
    for (const std::string& block : model.family->blocks) {
      for (const std::string& name : model.family->router_weight) {
        const std::string path = prefix + block + name;
        if (file.tensors().count(
                absl::StrReplaceAll(path, {{"{layer}", absl::StrCat(model.layer.layer)}})) != 0) {
          return true;
        }
      }
    }
  }
  return false;
}

// The file as the weights of a model: what opens is read as it is in the file, and served.
void CheckModel(const TinyModel& model, const std::string& folder, const SafetensorsFile& file,
                Bytes bytes) {
  const auto checkpoint = Checkpoint::Open(folder, Families());
  if (!checkpoint.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(checkpoint.status()) ||
               absl::IsUnimplemented(checkpoint.status()));
    return;
  }
  std::optional<Expected> expected;
  if (IsPlain(model)) expected.emplace(model, (*checkpoint)->layout(), file, bytes);
  const int32_t layer = model.layer.layer;
  const int32_t experts = model.layer.num_held();
  bool finite = true;
  const auto read = [&finite](const absl::Status& status) {
    FUZZ_CHECK(status.ok() || absl::IsInvalidArgument(status));
    finite &= status.ok();
    return status.ok();
  };
  const auto router = (*checkpoint)->ReadRouter(layer);
  if (read(router.status()) && expected) expected->CheckRouter(*router);
  for (int32_t expert = 0; expert < experts; ++expert) {
    const auto weights = (*checkpoint)->ReadExpert(layer, expert);
    if (read(weights.status()) && expected) expected->CheckExpert(expert, *weights);
  }
  FUZZ_CHECK(absl::IsNotFound((*checkpoint)->ReadExpert(layer, experts).status()));
  FUZZ_CHECK(absl::IsNotFound((*checkpoint)->ReadRouter(layer + 1).status()));
  FUZZ_CHECK(ServeAndCompare(*checkpoint).ok() == finite);
}

// A folder for each model, all with the same file of weights.
struct Folders {
  Folders() : configs(TinyModels().size()), folders(TinyModels().size()) {
    for (size_t i = 0; i < folders.size(); ++i) {
      configs[i].Set(TinyModels()[i].config.dump());
      folders[i].Link("config.json", configs[i]);
      folders[i].Link("model.safetensors", weights);
    }
  }
  MemoryFile weights;
  std::vector<MemoryFile> configs;
  std::vector<MemoryFolder> folders;
};

}  // namespace

void Safetensors(Bytes bytes) {
  static Folders folders;
  folders.weights.Set(bytes);
  const auto file = SafetensorsFile::Open(folders.weights.path());
  if (!file.ok()) return;
  CheckFile(**file, bytes);
  for (size_t i = 0; i < TinyModels().size(); ++i) {
    if (i > 0 && !HasGate(TinyModels()[i], **file)) continue;
    CheckModel(TinyModels()[i], folders.folders[i].path(), **file, bytes);
  }
}

}  // namespace expertmesh::fuzz
