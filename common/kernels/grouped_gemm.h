// Grouped GEMM: y = x W_e^T for groups of rows, each with its own matrix W_e. The bits of every
// output are those of the chain that kernels.h describes, whatever the groups, the tiles, the
// threads and the instruction set.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "common/kernels/isa.h"
#include "common/kernels/memory.h"
#include "common/kernels/packed_bias.h"
#include "common/kernels/packed_weights.h"
#include "common/quantized_format.h"

namespace expertmesh {

// Rows [first_row, first_row + rows) of x and y, which matrix `index` multiplies; 1 to
// kMaxGroupRows of them.
struct GemmGroup {
  int64_t index = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};
constexpr int64_t kMaxGroupRows = 512;

// Quantised weights are widened at most this many k at a time.
constexpr int64_t kMaxWidenedK = 512;

// What GroupedGemm::Run takes of its scratch: the sums of one block, and widened weights.
constexpr size_t kGemmSumBytes = sizeof(float) * kBlockColumns * kMaxGroupRows;
constexpr size_t kGemmScratchBytes =
    kGemmSumBytes + sizeof(uint16_t) * kBlockColumns * static_cast<size_t>(kMaxWidenedK);

// Appends the rows of one matrix as groups of about equal size.
void AddGroups(int64_t index, int64_t first_row, int64_t rows, std::vector<GemmGroup>* groups);

// What becomes of a block of results.
enum class GemmOutput {
  kRows,       // stored
  kActivated,  // Args::activation of it is; weights of Columns::kInterleavedHalves where it is
               // gated
};

// Which rows a GEMM reads: bf16 where the instruction set multiplies bf16 pairs, activations are
// BF16 and weights (dtype of an element) exact in it, else fp32.
DType GemmRowDType(Isa isa, DType weights, DType activations);

// Bytes from a row to the next of what a GEMM reads: k elements, zeros up to a whole line of the
// weights, and a distance that keeps rows out of the same sets of the first-level cache.
int64_t GemmRowBytes(DType row_dtype, int64_t k);

// Copies a row of k elements to `to` as GemmRowDType says, zeros behind it. activations: F32, BF16
// or F16.
void LoadGemmRow(Isa isa, DType activations, const void* row, int64_t k, DType row_dtype,
                 std::byte* to);

// The same of weight * row, rounded once: to BF16 where the activations are, else not at all.
void LoadWeighedGemmRow(Isa isa, DType activations, const void* row, int64_t k, float weight,
                        DType row_dtype, std::byte* to);

// The same of a quantised row of k codes. scales: what the row has of ScaleDType(format); exponents
// are part of what is stored, which is FloatFromMxfp8, while scales of the fp8 formats are not
// touched, and go to GroupedGemm::Args::x_scales. Exact. row_dtype: GemmRowDType(isa, F8_E4M3,
// BF16), or F32.
void LoadQuantizedGemmRow(Isa isa, QuantizedFormat format, const uint8_t* codes, const void* scales,
                          int64_t k, DType row_dtype, std::byte* to);

// How rows between two GEMMs are stored: rounded to BF16 where the activations are, and as
// row_dtype.
RowFormat GemmRowFormat(DType activations, DType row_dtype);

// One grouped GEMM. Run() is called by every thread that takes part, with memory of its own; each
// takes blocks until none is left.
class GroupedGemm {
 public:
  // Knobs that change no bit; tests turn them.
  struct Tuning {
    int64_t max_tile_rows = kMaxTileRows;
    int64_t single_pass_rows = -1;  // -1: what suits the instruction set
    int64_t chunk_lines = -1;       // the same; whole scales of quantised weights, one of blocks
  };

  struct Args {
    Isa isa;
    const PackedWeights* weights;
    absl::Span<const GemmGroup> groups;
    const std::byte* x;  // rows of row_dtype, GemmRowBytes apart
    DType row_dtype;     // of GemmRowDType
    GemmOutput output;
    RowFormat format;
    void* y;  // rows of `format`
    // Elements from a row of y to the next. For kActivated whole vectors of 16 columns are stored,
    // so it is at least the activation's width rounded up to 16.
    int64_t y_stride;
    ActivationFunction activation = {};
    const PackedBias* bias = nullptr;  // added to the chains; null: none
    // Scales of rows, by which those of the weights are multiplied, for weights of kFp8Row, [rows],
    // and of kFp8Block128, [rows][ceil(K / 128)]. Null: none.
    const float* x_scales = nullptr;
  };

  // What `args` refers to outlives the object.
  explicit GroupedGemm(const Args& args) : GroupedGemm(args, Tuning()) {}
  GroupedGemm(const Args& args, const Tuning& tuning);

  // Under ScopedFlushDenormals. `scratch` is the thread's own. `stop` is asked now and then by this
  // thread; once it said so the work is given up by all threads.
  void Run(Workspace& scratch, const std::function<bool()>& stop);

  // True once the work was given up. After all threads have returned from Run.
  bool stopped() const { return stopped_; }

 private:
  // One block of columns of one group.
  struct Task {
    const GemmGroup* group = nullptr;
    const std::byte* weights = nullptr;
    int64_t block = 0;
  };

  Task TaskAt(int64_t number) const;
  // The chains of a task to c, [4][rows][16], in the scratch; weights that `next` reads first are
  // fetched meanwhile.
  void RunTiles(const Task& task, const Task& next, std::byte* scratch) const;
  // Where the scales that apply from `line` on are in a panel.
  int64_t ScaleOffset(int64_t line) const;
  // The same of a row of x; null where it has none.
  const float* RowScales(int64_t row, int64_t line) const;
  void Store(const Task& task, float* c) const;

  const Args args_;
  const Kernels& kernels_;
  const TileKernels& tiles_;
  const int64_t row_bytes_;
  const int64_t max_tile_rows_;
  const int64_t single_pass_rows_;
  const int64_t chunk_lines_;
  const int64_t num_tasks_;
  std::atomic<int64_t> next_task_ = 0;
  std::atomic<bool> stopped_ = false;
};

}  // namespace expertmesh
