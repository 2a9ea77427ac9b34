// Biases of packed matrices.
#pragma once

#include <cstdint>
#include <vector>

#include "common/kernels/packed_weights.h"

namespace expertmesh {

// `num` vectors of fp32 [N], each in the order of the columns of PackedWeights' blocks, zeros where
// there is no column. Pack from one thread; reading is thread-safe.
class PackedBias {
 public:
  using Columns = PackedWeights::Columns;

  PackedBias(int64_t num, int64_t n, Columns columns)
      : parts_(columns == Columns::kInterleavedHalves ? 2 : 1),
        part_(n / parts_),
        blocks_((part_ * parts_ + kBlockColumns - 1) / kBlockColumns),
        values_(num * blocks_ * kBlockColumns) {}

  // bias: [N].
  void Pack(int64_t index, const float* bias) {
    float* const to = values_.data() + index * blocks_ * kBlockColumns;
    for (int64_t i = 0; i < parts_ * part_; ++i) {
      const int64_t column = i % part_;
      const int64_t panel = column / kPanelColumns * parts_ + i / part_;
      to[panel * kPanelColumns + column % kPanelColumns] = bias[i];
    }
  }

  // Of all vectors, padding included.
  int64_t bytes() const { return static_cast<int64_t>(values_.size() * sizeof(float)); }
  // Of the 64 columns of a block.
  const float* Block(int64_t index, int64_t block) const {
    return values_.data() + (index * blocks_ + block) * kBlockColumns;
  }

 private:
  int64_t parts_;  // gate and up take turns, a panel each
  int64_t part_;   // columns of each
  int64_t blocks_;
  std::vector<float> values_;
};

}  // namespace expertmesh
