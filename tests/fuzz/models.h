// Models so small that each input can be served as a part of one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/model/checkpoint.h"
#include "common/model/registry.h"
#include "nlohmann/json.hpp"

namespace expertmesh::fuzz {

// The built-in families, and one that has every key and every tensor that a family may have.
absl::Span<const Family> Families();

// A model of one family; no two have the same sizes.
struct TinyModel {
  const Family* family;
  nlohmann::json config;   // of its config.json
  LayerDescription layer;  // its only one
  Quantization quantization;
};

// Of some of Families(): all that gates, experts and their files may have.
const std::vector<TinyModel>& TinyModels();

using Shape = std::vector<int64_t>;

struct TinyTensor {
  std::string name;
  Shape shape;
  std::optional<DType> dtype = {};  // none: any that weights may have
};

// The tensors that a model has in a layout, the gate first.
std::vector<TinyTensor> TensorsOf(const TinyModel& model, const ExpertLayout& layout);

// A safetensors file of these tensors with random weights, in `dtype` where any will do.
std::string MakeWeights(const TinyModel& model, const ExpertLayout& layout, DType dtype);

// A checkpoint of no files, with random weights. Its fingerprint is "fingerprint".
std::shared_ptr<const Checkpoint> MakeCheckpoint(std::vector<LayerDescription> layers);

}  // namespace expertmesh::fuzz
