// What tells two checkpoints apart.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/model/description.h"
#include "common/model/shards.h"

namespace expertmesh {

// SHA-256, as 64 hex digits, of: the configuration; name, dtype, shape and a sample (the first and
// the last 2 KiB) of every tensor, by name; number format and pad multiple of every served layer.
// How the tensors are spread over files does not matter. Errors are those of reading.
absl::StatusOr<std::string> Fingerprint(const std::string& canonical_config, const Shards& shards,
                                        const ModelDescription& model);

// The same of a checkpoint with that fingerprint and the number formats and pad multiples of
// `model`.
std::string FingerprintIn(const std::string& fingerprint, const ModelDescription& model);

}  // namespace expertmesh
