// What command lines say of a model, opened.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"

namespace expertmesh {

struct ModelSource {
  std::string folder = {};     // Hugging Face model folder
  std::string precision = {};  // as ParsePrecision reads it; empty: native
  int64_t pad_multiple = 0;    // as WithPrecision has it
};

// Errors of Checkpoint::Open, ParsePrecision and WithPrecision.
absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenModel(const ModelSource& source);

}  // namespace expertmesh
