// Weight matrices in the layout that the kernels read, the same for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/dtype.h"
#include "common/kernels/kernels.h"
#include "common/tensor.h"

namespace expertmesh {

// `num` matrices [N, K] of one dtype, each as panels of 16 columns n, a panel as lines of 64 bytes:
// one k of fp32; for BF16 [16 columns][2 k]; for F16 [2 k][16 columns]. K is padded with zeros to a
// whole line, N to blocks of 4 panels. Pack from one thread a matrix; reading is thread-safe.
class PackedWeights {
 public:
  enum class Columns {
    kPlain,
    // The first half of the rows (gate) and the second (up) take turns, a panel each, so that one
    // block has both factors of an activation. N is even.
    kInterleavedHalves,
  };

  PackedWeights() = default;
  // Allocates. dtype: F32, BF16 or F16. Zeroed: a matrix that is never packed computes zeros.
  PackedWeights(DType dtype, int64_t num, int64_t n, int64_t k, Columns columns = Columns::kPlain);

  // Stores matrix `index`; weights: [N, K] of dtype().
  void Pack(int64_t index, const TensorView& weights);

  DType dtype() const { return dtype_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // k per line, and lines per panel.
  int64_t k_per_line() const { return dtype_ == DType::kF32 ? 1 : 2; }
  int64_t lines() const { return (k_ + k_per_line() - 1) / k_per_line(); }
  int64_t panel_bytes() const { return lines() * kLineBytes; }
  // Blocks of 4 panels per matrix.
  int64_t blocks() const { return blocks_; }
  const std::byte* Block(int64_t index, int64_t block) const {
    return data_.get() + (index * blocks_ + block) * kBlockPanels * panel_bytes();
  }

 private:
  DType dtype_ = DType::kF32;
  int64_t n_ = 0;
  int64_t k_ = 0;
  Columns columns_ = Columns::kPlain;
  int64_t blocks_ = 0;
  std::shared_ptr<std::byte> data_;
};

}  // namespace expertmesh
