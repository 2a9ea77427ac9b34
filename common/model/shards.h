// The safetensors files of a model folder, as one set of tensors.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/safetensors/safetensors.h"

namespace expertmesh {

// Where a tensor is; valid while the Shards live.
struct TensorLocation {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

// Immutable after OpenShards().
struct Shards {
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  std::map<std::string, TensorLocation> tensors;
};

// Opens model.safetensors or, where there is none, the files of model.safetensors.index.json (the
// order of transformers), following symbolic links. The index and the files must name the same
// tensors, each once; its total_size is information only, and ignored. NOT_FOUND (no such file) or
// INVALID_ARGUMENT (malformed, or no regular file), naming file and tensor.
absl::StatusOr<Shards> OpenShards(const std::string& directory);

// The content of a regular file of at most 256 MiB. Errors of OpenRegularFile.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path);

}  // namespace expertmesh
