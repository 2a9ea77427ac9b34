// Weight matrices in the layout that the kernels read, the same for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/dtype.h"
#include "common/kernels/kernels.h"
#include "common/weight_format.h"

namespace expertmesh {

// `num` matrices [N, K] of one format, each as panels of 16 columns n. A panel is a head of scales
// and then lines of 64 bytes:
//   F32            [16 columns], one k
//   BF16           [16 columns][2 k]
//   F16            [2 k][16 columns]
//   kFp8Block128,  [4 groups][2 pairs][4 columns][2 k], so that the low and the high bytes of their
//   kFp8Row,       BF16 interleave to BF16 lines
//   kMxfp8
//   kMxfp4         the same of the codes of k 0-3 in the low nibbles and of k 4-7 in the high ones;
//                  codes of +-0.5 at scale 0 are cleared
// and the heads, which take whole lines:
//   kFp8Block128   fp32 [ceil(K / 128)][16 columns]
//   kFp8Row        fp32 [16 columns]
//   kMxfp4,        e8m0 [ceil(K / 32)][16 columns]
//   kMxfp8
// K is padded with zeros to a whole line, N to blocks of 4 panels. Pack from one thread a matrix;
// reading is thread-safe.
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
  PackedWeights(DType dtype, int64_t num, int64_t n, int64_t k, Columns columns = Columns::kPlain)
      : PackedWeights(WeightFormat::kPlain, dtype, num, n, k, columns) {}
  // The same for every format; dtype is that of an element (F4 for kMxfp4).
  PackedWeights(WeightFormat format, DType dtype, int64_t num, int64_t n, int64_t k,
                Columns columns = Columns::kPlain);

  // Stores matrix `index`; weights: [N, K] of format() and dtype(). NaN codes and scales above
  // kMaxMxfp4Scale and kMaxMxfp8Scale have been refused before.
  void Pack(int64_t index, const WeightView& weights);

  WeightFormat format() const { return format_; }
  DType dtype() const { return dtype_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  // k per line, and lines per panel.
  int64_t k_per_line() const { return KPerLine(format_, dtype_); }
  int64_t lines() const { return (k_ + k_per_line() - 1) / k_per_line(); }
  int64_t head_bytes() const { return head_bytes_; }
  int64_t panel_bytes() const { return head_bytes_ + lines() * kLineBytes; }
  // Blocks of 4 panels per matrix.
  int64_t blocks() const { return blocks_; }
  const std::byte* Block(int64_t index, int64_t block) const {
    return data_.get() + (index * blocks_ + block) * kBlockPanels * panel_bytes();
  }
  // Of all matrices, padding included.
  int64_t bytes() const { return num_ * blocks_ * kBlockPanels * panel_bytes(); }

 private:
  void PackScales(const WeightView& weights, int64_t first, int64_t rows, std::byte* head) const;

  WeightFormat format_ = WeightFormat::kPlain;
  DType dtype_ = DType::kF32;
  int64_t num_ = 0;
  int64_t n_ = 0;
  int64_t k_ = 0;
  int64_t head_bytes_ = 0;
  Columns columns_ = Columns::kPlain;
  int64_t blocks_ = 0;
  std::shared_ptr<std::byte> data_;
};

}  // namespace expertmesh
