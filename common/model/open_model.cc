#include "common/model/open_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/precision.h"
#include "common/model/presets.h"
#include "common/status.h"

namespace expertmesh {

std::string NameOf(const ModelSource& source) {
  return source.preset.empty() ? source.folder : absl::StrCat("preset ", source.preset);
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenModel(const ModelSource& source) {
  if (source.folder.empty() == source.preset.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("expected a model folder or --preset, got ",
                                                   source.folder.empty() ? "neither" : "both"));
  }
  std::string precision_text = source.precision;
  std::shared_ptr<const Checkpoint> checkpoint;
  if (source.preset.empty()) {
    ASSIGN_OR_RETURN(checkpoint, Checkpoint::Open(source.folder));
  } else {
    ASSIGN_OR_RETURN(const Preset* const preset, FindPreset(source.preset));
    ASSIGN_OR_RETURN(checkpoint, OpenPreset(*preset));
    if (precision_text.empty()) precision_text = preset->precision;
  }
  if (precision_text.empty()) precision_text = "native";
  ASSIGN_OR_RETURN(const Precision precision, ParsePrecision(precision_text));
  return WithPrecision(std::move(checkpoint), precision, source.pad_multiple);
}

}  // namespace expertmesh
