// The vector kernels, one set per instruction set with the same bits: small loops over rows and
// columns, with nothing of experts or threads in them. Everything here runs under
// ScopedFlushDenormals.
//
// Every output element of a GEMM is one chain of fp32 fused multiply-adds from +0, k ascending for
// F32 weights, for all others over pairs of neighbouring k, the odd one first, which is what
// AVX512_BF16's dot product does; for_loop_gemm.h has the whole contract. Vector lanes run along
// the columns, never along k, so that neither the vector's width nor the tile can change a bit.
//
// Weights of fewer than 16 bits are exact in BF16. Few rows widen them in registers, line by line;
// more rows have a chunk of k widened once to BF16 lines, which the tiles of BF16 then read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/kernels/isa.h"
#include "common/numerics/activation.h"
#include "common/weight_format.h"

namespace expertmesh {

// Columns of one panel of packed weights (see PackedWeights), and panels that are computed
// together.
constexpr int kPanelColumns = 16;
constexpr int kBlockPanels = 4;
constexpr int kBlockColumns = kPanelColumns * kBlockPanels;
// Bytes of one line of a panel: kPanelColumns columns of KPerLine() neighbouring k.
constexpr int kLineBytes = 64;
constexpr int64_t KPerLine(WeightFormat format, DType dtype) {
  if (format == WeightFormat::kMxfp4) return 8;
  if (format != WeightFormat::kPlain) return 4;
  return dtype == DType::kF32 ? 1 : 2;
}
// From the scales of a block of kFp8Block128 to the next, in the head of a panel.
constexpr int64_t kFp8BlockScaleBytes = kPanelColumns * sizeof(float);
// Rows of a tile: of what one kernel call computes.
constexpr int kMaxTileRows = 6;

// One tile: rows x panels, over some lines. x: rows of fp32, or of bf16 for the kernels that read
// pairs, from the first k of the first line on. c: [panels][rows of the block][16] fp32.
struct TileArgs {
  const std::byte* weights = nullptr;  // first line of the first panel; 64-byte aligned
  int64_t panel_bytes = 0;             // from a panel to the next
  const void* x = nullptr;
  int64_t x_stride = 0;  // bytes from a row to the next
  float* c = nullptr;
  int64_t c_stride = 0;  // floats from a panel to the next
  int64_t lines = 0;
  bool from_zero = true;  // the chains start here; else they go on from c
  // Quantised weights: the scales of the first line of the first panel; scale_bytes from a panel to
  // the next.
  const std::byte* scales = nullptr;
  int64_t scale_bytes = 0;
  // kFp8Block128: scales of the first row, from the first line's block on, by which those of the
  // weights are multiplied; x_scales_stride from a row to the next. Null: none.
  const float* x_scales = nullptr;
  int64_t x_scales_stride = 0;
  // Where tiles that widen for others store BF16 lines; wide_bytes from a panel to the next.
  std::byte* wide = nullptr;
  int64_t wide_bytes = 0;
  // One line of each panel is fetched into the cache every prefetch_every lines (-1: never); tiles
  // of quantised lines always do so with every line.
  const std::byte* prefetch = nullptr;
  int64_t prefetch_bytes = 0;  // from a panel to the next
  int64_t prefetch_every = -1;
};

// Tiles by number of rows, 1 to kMaxTileRows.
struct Tiles {
  void (*tile[kMaxTileRows + 1])(const TileArgs&) = {};
  int panels[kMaxTileRows + 1] = {};  // that one call computes: 1, 2 or 4
};

// The kernels of one format of weights and rows.
struct TileKernels {
  // Up to this many rows, a block runs through all of k in one go, straight from memory.
  Tiles single_pass;
  int single_pass_rows = 0;
  // Otherwise k is cut into chunks of this many lines, so that a block's chunk and the next one
  // stay in the second-level cache while all tiles run over it: the larger, the less often the sums
  // go through memory. A multiple of the lines of a scale.
  Tiles chunked;
  int64_t chunk_lines = 0;
  // Quantised weights: the chunked tiles read BF16 lines, which either `widen` makes beforehand of
  // `lines` lines of one panel from the first of a scale on, or the first tile of a chunk, one of
  // `widening`, on its way. A chunk of kFp8Block128 is one block.
  bool widens = false;
  void (*widen)(const std::byte* from, const std::byte* scales, int64_t lines,
                std::byte* to) = nullptr;
  Tiles widening;

  bool empty() const { return single_pass.tile[1] == nullptr; }
};

// What a row of results is stored as.
enum class RowFormat {
  kF32,
  kF32OfBF16,  // fp32 that was rounded to BF16
  kBF16,
};

// The rows of one token that are combined.
struct CombineRows {
  DType dtype;              // of the rows: F32 or BF16
  const void* const* rows;  // the routed ones, then the shared ones
  const float* weights;     // of each
  int64_t num_routed;
  float routed_scale;
  int64_t num_shared;
  float scale;
};

struct Kernels {
  TileKernels f32;        // F32 weights, fp32 rows
  TileKernels bf16;       // BF16 weights, fp32 rows
  TileKernels f16;        // F16 weights, fp32 rows
  TileKernels fp8_block;  // kFp8Block128, fp32 rows
  TileKernels fp8;        // the chains of kFp8Row, fp32 rows
  TileKernels mxfp4;      // kMxfp4, fp32 rows
  TileKernels mxfp8;      // kMxfp8, fp32 rows
  // The same for bf16 rows; empty where there are no such instructions.
  TileKernels bf16_pairs;
  TileKernels fp8_block_pairs;
  TileKernels fp8_pairs;
  TileKernels mxfp4_pairs;
  TileKernels mxfp8_pairs;

  // c[p][r] *= scales of panel p, fp32 [16] each, scale_bytes apart, times x_scales[r] (null: 1).
  // c: [4][rows][16].
  void (*scale_columns)(const std::byte* scales, int64_t scale_bytes, const float* x_scales,
                        int64_t rows, float* c);

  // Lays out `rows` (1 to 16) rows of row_bytes each, one after the other, as the lines of a panel,
  // zeros behind the rows' ends; of columns that do not exist nothing is read, and zeros are
  // written.
  void (*pack_lines)(WeightFormat format, DType dtype, const std::byte* from, int64_t rows,
                     int64_t row_bytes, std::byte* lines);

  // Widens n elements of F32, BF16 or F16.
  void (*widen)(DType dtype, const void* from, int64_t n, float* to);

  // The e4m3 values of n codes as F32 or BF16, exact; with exponents (e8m0, one for kMxBlockK
  // codes; null: none) FloatFromMxfp8 of both. With denormals flushed or not.
  void (*widen_codes)(const uint8_t* codes, const uint8_t* exponents, int64_t n, DType dtype,
                      void* to);

  // to = weight * from for n elements of F32, BF16 or F16, rounded once to `format`.
  void (*weigh)(DType dtype, const void* from, int64_t n, float weight, RowFormat format, void* to);

  // Adds to every row of a block, c: [4][rows][16], the biases [4][16] of its columns.
  void (*add_bias)(float* c, int64_t rows, const float* bias);

  // h = Activate(function, g, u) with the same bits, for a block whose panels alternate g and u, or
  // are all g where the function is not gated. c: [4][rows][16]; columns: those of h in the block
  // that exist (0 to 32, or 64); h: the block's first column of the first row; whole vectors of 16
  // are stored. stride in elements.
  void (*activate)(const ActivationFunction& function, const float* c, int64_t rows,
                   int64_t columns, RowFormat format, void* h, int64_t stride);

  // Stores a block, as kF32 or kBF16. c: [4][rows][16]; columns: those that exist (0 to 64);
  // nothing else is written.
  void (*store)(const float* c, int64_t rows, int64_t columns, RowFormat format, void* y,
                int64_t stride);

  // One token of the combine: out = round(acc), acc = fma(weight, row, acc) from +0 over the routed
  // rows in their order; then acc *= routed_scale; then the chain over the shared rows; then acc *=
  // scale. Scales of 1 are left out. out: F32, BF16 or F16 [n], as each of the rows is.
  void (*combine)(const CombineRows& token, DType out_dtype, int64_t n, void* out);

  // The first element of n of F32, BF16, F16 or F8_E4M3 that is not finite, or -1.
  int64_t (*find_not_finite)(DType dtype, const void* values, int64_t n);
};

// `isa` is one of SupportedIsas().
const Kernels& KernelsOf(Isa isa);

}  // namespace expertmesh
