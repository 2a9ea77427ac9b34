// Normalisation of the rows that a layer's gate or its experts see, where that is part of the
// block.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

// Immutable; Apply may be called concurrently.
class RowNorm {
 public:
  // weight: F32 [hidden_size]. INVALID_ARGUMENT naming what does not fit.
  static absl::StatusOr<RowNorm> Create(const InputNorm& norm, const Tensor& weight,
                                        int64_t hidden_size);

  // rows: F32, BF16 or F16 [T, hidden_size]. The normalised rows in `dtype`, one of the same:
  // y = x (1 / sqrt(S / D + epsilon)) weight factor, multiplied from left to right in fp32, rounded
  // once; S is one chain of fused multiply-adds x^2 from +0 over ascending columns. A row with a
  // value that is not finite gives one that is not, either.
  Tensor Apply(const TensorView& rows, DType dtype) const;

 private:
  RowNorm() = default;

  InputNorm norm_;
  std::vector<float> weight_;
};

}  // namespace expertmesh
