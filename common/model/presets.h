// Models by name that need no files: random weights (common/model/generated.h) in shapes that are
// worth a name. A new one is a new entry.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/checkpoint.h"

namespace expertmesh {

struct Preset {
  std::string name;
  std::string summary;
  std::string config;     // as config.json has it
  std::string precision;  // as ParsePrecision reads it
};

absl::Span<const Preset> Presets();

// NOT_FOUND, naming all presets, if there is none of that name.
absl::StatusOr<const Preset*> FindPreset(const std::string& name);

// The model in its native format. Errors are those of the entry.
absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenPreset(const Preset& preset);

}  // namespace expertmesh
