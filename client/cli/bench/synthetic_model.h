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
#include "common/weight_format.h"

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

// Weights, and the hidden states that go with them.
struct BenchFormat {
  const char* name;
  WeightFormat format;
  DType dtype;        // of a weight
  DType activations;  // BF16 where the weights are quantised, else their dtype
};

// "bf16", "fp32", "f16", "fp8" (scales of blocks of 128 x 128), "fp8_row", "mxfp4";
// INVALID_ARGUMENT naming the choices.
absl::StatusOr<BenchFormat> ParseBenchFormat(const std::string& option, const std::string& name);

// Bytes of the weights of one expert, as stored; scales of MXFP4 count, those of fp8 are too few.
int64_t ExpertBytes(const MoeShape& shape, const BenchFormat& format);

// A matrix [n, k] in a format.
struct BenchWeights {
  Tensor values;
  Tensor scales;
};

// Weights of that standard deviation. Codes of quantised formats are evenly distributed; fp8 has
// one scale for all blocks, MXFP4 and MXFP8 one that is nearly right.
BenchWeights RandomWeights(const BenchFormat& format, int64_t n, int64_t k, float deviation,
                           uint64_t seed);

// Normally distributed values (nearly: none beyond 3.5 deviations), the same for the same seed.
Tensor RandomNormal(DType dtype, std::vector<int64_t> shape, float deviation, uint64_t seed);

// Writes config.json and model.safetensors to `folder`, which is made if it is missing: layer 0
// alone, each matrix with standard deviation 1 / sqrt(fan-in). The experts are pieces of one random
// block, so they are not independent of each other, which no kernel notices. A folder that has the
// same model already is left as it is; ALREADY_EXISTS when it has another config.json. fp8 is
// written as DeepSeek-V3's files have it, fp8_row as compressed-tensors does, mxfp4 as gpt-oss'
// files have it: INVALID_ARGUMENT then where a size is no multiple of 32.
absl::Status WriteSyntheticModel(const std::string& folder, const MoeShape& shape,
                                 const BenchFormat& format);

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
