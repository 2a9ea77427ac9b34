// A model folder of one MoE layer with random weights, of any size, written in seconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/tensor.h"

namespace expertmesh {

// The sizes of one layer, and the family whose formulas apply.
struct MoeShape {
  std::string name;        // as it was given
  std::string model_type;  // of config.json
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  bool normalise = false;  // the selected weights
};

// "olmoe-1b-7b", "qwen3-30b-a3b", or DxFxExK, for example 64x32x8x2. INVALID_ARGUMENT naming the
// choices, or the size that is out of range.
absl::StatusOr<MoeShape> ParseMoeShape(const std::string& text);

// "bf16", "fp32", "f16"; INVALID_ARGUMENT naming the choices. The other way round: BenchName().
absl::StatusOr<DType> ParseBenchDType(const std::string& name);
const char* BenchName(DType dtype);

// Bytes of the weights of one expert.
int64_t ExpertBytes(const MoeShape& shape, DType dtype);

// Normally distributed values (nearly: none beyond 3.5 deviations), the same for the same seed.
Tensor RandomNormal(DType dtype, std::vector<int64_t> shape, float deviation, uint64_t seed);

// Writes config.json and model.safetensors to `folder`, which is made if it is missing: layer 0
// alone, each matrix with standard deviation 1 / sqrt(fan-in). The experts are pieces of one random
// block, so they are not independent of each other, which no kernel notices. A folder that has the
// same model already is left as it is; ALREADY_EXISTS when it has another config.json.
absl::Status WriteSyntheticModel(const std::string& folder, const MoeShape& shape, DType dtype);

// A folder that is deleted with this object, and also when SIGINT or SIGTERM end the process
// meanwhile. To be made before other threads: it blocks these signals. One at a time.
class TemporaryFolder {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryFolder>> Create();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path);

  const std::string path_;
  std::atomic<bool> done_ = false;
  std::thread signals_;  // waits for them
};

}  // namespace expertmesh
