#include "common/kernels/packed_weights.h"

#include <algorithm>
#include <cassert>

#include "common/kernels/memory.h"

namespace expertmesh {
namespace {

// Elements of k that are transposed at a time: 16 columns of them stay in the first-level cache.
constexpr int64_t kPackChunk = 64;

// panel[i][j] = rows[j][i] for elements i of `rows` rows at most 16.
template <typename Word>
void Transpose(const Word* rows, int64_t num_rows, int64_t row_stride, int64_t length,
               Word* panel) {
  for (int64_t begin = 0; begin < length; begin += kPackChunk) {
    const int64_t end = std::min(begin + kPackChunk, length);
    for (int64_t j = 0; j < num_rows; ++j) {
      const Word* row = rows + j * row_stride;
      for (int64_t i = begin; i < end; ++i) panel[i * kPanelColumns + j] = row[i];
    }
  }
}

// The same for rows of an odd number of 16-bit elements, or not: pairs become words.
void TransposePairs(const uint16_t* rows, int64_t num_rows, int64_t k, uint32_t* panel) {
  for (int64_t begin = 0; begin < k; begin += kPackChunk) {
    const int64_t end = std::min(begin + kPackChunk, k);
    for (int64_t j = 0; j < num_rows; ++j) {
      const uint16_t* row = rows + j * k;
      int64_t i = begin;
      for (; i + 1 < end; i += 2) {
        panel[i / 2 * kPanelColumns + j] = row[i] | static_cast<uint32_t>(row[i + 1]) << 16;
      }
      if (i < end) panel[i / 2 * kPanelColumns + j] = row[i];
    }
  }
}

}  // namespace

PackedWeights::PackedWeights(DType dtype, int64_t num, int64_t n, int64_t k, Columns columns)
    : dtype_(dtype), n_(n), k_(k), columns_(columns) {
  assert(IsActivationDType(dtype) && (columns == Columns::kPlain || n % 2 == 0));
  const int64_t per_block = columns == Columns::kPlain ? kBlockColumns : kBlockColumns / 2;
  const int64_t columns_of_outputs = columns == Columns::kPlain ? n : n / 2;
  blocks_ = (columns_of_outputs + per_block - 1) / per_block;
  data_ = AllocateLarge(static_cast<size_t>(num * blocks_ * kBlockPanels * panel_bytes()));
}

void PackedWeights::Pack(int64_t index, const TensorView& weights) {
  assert(weights.dtype == dtype_ && weights.shape[0] == n_ && weights.shape[1] == k_);
  const bool halves = columns_ == Columns::kInterleavedHalves;
  const int64_t end_of_part = halves ? n_ / 2 : n_;
  for (int64_t panel = 0; panel < blocks_ * kBlockPanels; ++panel) {
    const int64_t begin = (halves ? panel / 2 : panel) * kPanelColumns;
    const int64_t rows = std::min<int64_t>(kPanelColumns, end_of_part - begin);
    if (rows <= 0) continue;  // stays zero
    const int64_t first = begin + (halves && panel % 2 == 1 ? n_ / 2 : 0);
    std::byte* const to = data_.get() + (index * blocks_ * kBlockPanels + panel) * panel_bytes();
    if (dtype_ == DType::kF32) {
      Transpose(static_cast<const uint32_t*>(weights.data) + first * k_, rows, k_, k_,
                reinterpret_cast<uint32_t*>(to));
    } else if (dtype_ == DType::kF16) {
      Transpose(static_cast<const uint16_t*>(weights.data) + first * k_, rows, k_, k_,
                reinterpret_cast<uint16_t*>(to));
    } else {
      TransposePairs(static_cast<const uint16_t*>(weights.data) + first * k_, rows, k_,
                     reinterpret_cast<uint32_t*>(to));
    }
  }
}

}  // namespace expertmesh
