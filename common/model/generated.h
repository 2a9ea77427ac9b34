// Models of random weights that need no files: every weight is a function of its place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

// Which tensor of a layer a sequence of weights is for; part of the generator's contract.
enum class GeneratedTensor : uint32_t {
  kGateUp = 0,
  kDown = 1,
  kGateUpBias = 2,
  kDownBias = 3,
  kRouter = 4,
  kLogitsBias = 5,
  kSelectionBias = 6,
  kSharedGate = 7,
};

// Normally distributed BF16 values of the deviation 1 / sqrt(fan_in), the same on every machine.
//
// The sequence of a tensor is that of the 32-bit words of Philox4x32-10 (common/numerics/philox.h)
// with the key {seed, layer} and the counters {b, 0, expert, tensor}, b = 0, 1, ... (its upper half
// in the second word), four words each. Element i, row-major in the arrangement of ExpertWeights or
// RouterWeights, takes the words 6 i to 6 i + 5. With S the sum of their twelve 16-bit halves,
//
//   z = (2 S - 12 * 65535) / 2^17
//
// has mean 0 and deviation 1 and is exact in fp32; the element is z * fl32(1 / sqrt(fan_in)),
// rounded to fp32 and then to BF16, both to nearest even.
struct GeneratedSequence {
  uint32_t seed = 0;
  uint32_t layer = 0;
  uint32_t expert = 0;  // 0 where the tensor is not an expert's
  GeneratedTensor tensor = GeneratedTensor::kGateUp;
};

// Elements [0, shape) of a sequence, as BF16 or widened to F32.
Tensor GenerateTensor(const GeneratedSequence& sequence, std::vector<int64_t> shape, int64_t fan_in,
                      DType dtype = DType::kBF16);

// A checkpoint of such weights: matrices in BF16, fan_in their columns; biases with the fan_in of
// the matrix that they belong to; a per-expert scale and the weights of norms are 1. `identity`
// tells it apart from others. INVALID_ARGUMENT if the description is none of plain BF16 weights.
absl::StatusOr<std::shared_ptr<const Checkpoint>> GenerateCheckpoint(const ModelDescription& model,
                                                                     const std::string& identity,
                                                                     uint32_t seed);

}  // namespace expertmesh
