// Models so small that each input can be served as a part of one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
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
  LayerDescription layer;  // its only MoE layer
};

// One of each of a few of Families().
const std::vector<TinyModel>& TinyModels();

using Shape = std::vector<int64_t>;

// Names and shapes of the tensors that a model has in a layout, the gate first.
std::vector<std::pair<std::string, Shape>> TensorsOf(const TinyModel& model,
                                                     const ExpertLayout& layout);

// A safetensors file of these tensors with random weights. Layouts are numbered as the family's.
std::string MakeWeights(const TinyModel& model, const ExpertLayout& layout, DType dtype);

// A checkpoint of no files, with random weights. Its fingerprint is "fingerprint".
std::shared_ptr<const Checkpoint> MakeCheckpoint(std::vector<LayerDescription> layers);

}  // namespace expertmesh::fuzz
