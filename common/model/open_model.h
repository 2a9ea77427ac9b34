// What command lines say of a model, opened.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"

namespace expertmesh {

struct ModelSource {
  std::string folder = {};     // Hugging Face model folder, or
  std::string preset = {};     // the name of a preset
  std::string precision = {};  // as ParsePrecision reads it; empty: native, or what the preset says
  int64_t pad_multiple = 0;    // as WithPrecision has it
};

// What logs call it: its folder, or "preset NAME".
std::string NameOf(const ModelSource& source);

// INVALID_ARGUMENT unless there is a folder or a preset; errors of FindPreset, Checkpoint::Open,
// ParsePrecision and WithPrecision.
absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenModel(const ModelSource& source);

}  // namespace expertmesh
