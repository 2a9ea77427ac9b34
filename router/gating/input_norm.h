// The normalisation of what a gate or the experts of a layer see.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

// Immutable; all methods may be called concurrently. Sets the floating-point environment itself.
class RmsNorm {
 public:
  RmsNorm() = default;  // of a layer without one

  // weight: F32 [hidden_size] where there is a norm, else empty; `name` is what errors call it.
  // INVALID_ARGUMENT if it does not fit or is not finite, or if the norm's epsilon is not positive
  // or its factor not finite.
  static absl::StatusOr<RmsNorm> Create(const InputNorm& norm, const char* name,
                                        int64_t hidden_size, const Tensor& weight);

  bool present() const { return norm_.present; }

  // The first `rows` rows of x, F32, BF16 or F16 [T, hidden_size], normalised in fp32 and rounded
  // once to `out`: [T, hidden_size], zeros from row `rows` on.
  //
  // Per row: the sum of squares in 8 chains of fused multiply-adds from +0, chain j over ascending
  // k = j mod 8, added as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)); r = 1 / sqrt(sum / D +
  // epsilon); then x r weight factor from left to right, each product rounded.
  Tensor Apply(const TensorView& x, int64_t rows, DType out) const;

 private:
  InputNorm norm_;
  std::vector<float> weight_;
};

}  // namespace expertmesh
