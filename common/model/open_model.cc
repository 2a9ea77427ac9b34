#include "common/model/open_model.h"

#include "common/model/precision.h"
#include "common/status.h"

namespace expertmesh {

absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenModel(const ModelSource& source) {
  Precision precision;
  if (!source.precision.empty()) {
    ASSIGN_OR_RETURN(precision, ParsePrecision(source.precision));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(source.folder));
  return WithPrecision(std::move(checkpoint), precision, source.pad_multiple);
}

}  // namespace expertmesh
