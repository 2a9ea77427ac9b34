#include "common/kernels/packed_weights.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "common/kernels/memory.h"

namespace expertmesh {
namespace {

int64_t HeadBytes(WeightFormat format, int64_t k) {
  const int64_t bytes = ScalesPerRow(format, k) * kPanelColumns * (BitsOf(ScaleDType(format)) / 8);
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// Clears the codes of +-0.5 of a row where the scale is 0.
void ClearHalves(const uint8_t* scales, int64_t k, uint8_t* codes) {
  for (int64_t i = 0; i < k; ++i) {
    if (scales[i / kMxBlockK] != 0) continue;
    const int shift = i % 2 == 0 ? 0 : 4;
    if ((codes[i / 2] >> shift & 7) == 1) {
      codes[i / 2] = static_cast<uint8_t>(codes[i / 2] & ~(15 << shift));
    }
  }
}

}  // namespace

PackedWeights::PackedWeights(WeightFormat format, DType dtype, int64_t num, int64_t n, int64_t k,
                             Columns columns)
    : format_(format),
      dtype_(dtype),
      num_(num),
      n_(n),
      k_(k),
      head_bytes_(HeadBytes(format, k)),
      columns_(columns) {
  assert(columns == Columns::kPlain || n % 2 == 0);
  const int64_t per_block = columns == Columns::kPlain ? kBlockColumns : kBlockColumns / 2;
  const int64_t columns_of_outputs = columns == Columns::kPlain ? n : n / 2;
  blocks_ = (columns_of_outputs + per_block - 1) / per_block;
  data_ = AllocateLarge(static_cast<size_t>(bytes()));
}

void PackedWeights::Pack(int64_t index, const WeightView& weights) {
  assert(weights.format == format_ && weights.values.dtype == StorageDType(dtype_) &&
         weights.n() == n_ && weights.k() == k_);
  const auto pack_lines = KernelsOf(BestIsa()).pack_lines;
  const bool halves = columns_ == Columns::kInterleavedHalves;
  const int64_t end_of_part = halves ? n_ / 2 : n_;
  const int64_t row_bytes = k_ * BitsOf(dtype_) / 8;
  std::vector<std::byte> cleared;
  for (int64_t panel = 0; panel < blocks_ * kBlockPanels; ++panel) {
    const int64_t begin = (halves ? panel / 2 : panel) * kPanelColumns;
    const int64_t rows = std::min<int64_t>(kPanelColumns, end_of_part - begin);
    if (rows <= 0) continue;  // stays zero
    const int64_t first = begin + (halves && panel % 2 == 1 ? n_ / 2 : 0);
    std::byte* const to = data_.get() + (index * blocks_ * kBlockPanels + panel) * panel_bytes();
    const auto* from = static_cast<const std::byte*>(weights.values.data) + first * row_bytes;
    PackScales(weights, first, rows, to);
    if (format_ == WeightFormat::kMxfp4) {
      const int64_t per_row = ScalesPerRow(format_, k_);
      const auto* const scales = static_cast<const uint8_t*>(weights.scales.data) + first * per_row;
      if (std::memchr(scales, 0, static_cast<size_t>(rows * per_row)) != nullptr) {
        cleared.assign(from, from + rows * row_bytes);
        for (int64_t r = 0; r < rows; ++r) {
          ClearHalves(scales + r * per_row, k_,
                      reinterpret_cast<uint8_t*>(cleared.data()) + r * row_bytes);
        }
        from = cleared.data();
      }
    }
    pack_lines(format_, dtype_, from, rows, row_bytes, to + head_bytes_);
  }
}

void PackedWeights::PackScales(const WeightView& weights, int64_t first, int64_t rows,
                               std::byte* head) const {
  const int64_t per_row = ScalesPerRow(format_, k_);
  const auto transpose = [&](const auto* from, auto* to) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < per_row; ++i) {
        to[i * kPanelColumns + r] = from[(first + r) * per_row + i];
      }
    }
  };
  if (ScaleDType(format_) == DType::kU8) {
    transpose(static_cast<const uint8_t*>(weights.scales.data), reinterpret_cast<uint8_t*>(head));
  } else {
    transpose(static_cast<const float*>(weights.scales.data), reinterpret_cast<float*>(head));
  }
}

}  // namespace expertmesh
