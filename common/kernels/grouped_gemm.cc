#include "common/kernels/grouped_gemm.h"

#include <algorithm>
#include <cstring>

namespace expertmesh {
namespace {

// How far ahead of its own reads a single pass fetches each panel: the latency of memory times the
// rate at which one panel is read.
constexpr int64_t kPrefetchAhead = 1024;

// Rows computed between two questions whether anybody still waits: a few milliseconds at most.
constexpr int64_t kStopInterval = 256;

const TileKernels& TilesFor(const Kernels& kernels, DType weights, DType row_dtype) {
  if (weights == DType::kF32) return kernels.f32;
  if (weights == DType::kF16) return kernels.f16;
  return row_dtype == DType::kBF16 ? kernels.bf16_pairs : kernels.bf16;
}

}  // namespace

void AddGroups(int64_t index, int64_t first_row, int64_t rows, std::vector<GemmGroup>* groups) {
  const int64_t parts = (rows + kMaxGroupRows - 1) / kMaxGroupRows;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = rows * part / parts;
    groups->push_back({index, first_row + begin, rows * (part + 1) / parts - begin});
  }
}

DType GemmRowDType(Isa isa, DType weights, DType activations) {
  const bool pairs = isa == Isa::kAvx512Bf16 && weights == DType::kBF16;
  return pairs && activations == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

int64_t GemmRowBytes(DType row_dtype, int64_t k) {
  constexpr int64_t kCacheLine = 64;
  return (k * BytesOf(row_dtype) + kCacheLine - 1) / kCacheLine * kCacheLine + kCacheLine;
}

void LoadGemmRow(Isa isa, DType activations, const void* row, int64_t k, DType row_dtype,
                 std::byte* to) {
  const int64_t bytes = k * BytesOf(row_dtype);
  if (row_dtype == activations) {
    std::memcpy(to, row, bytes);
  } else {
    KernelsOf(isa).widen(activations, row, k, reinterpret_cast<float*>(to));
  }
  std::memset(to + bytes, 0, GemmRowBytes(row_dtype, k) - bytes);
}

void LoadWeighedGemmRow(Isa isa, DType activations, const void* row, int64_t k, float weight,
                        DType row_dtype, std::byte* to) {
  const int64_t bytes = k * BytesOf(row_dtype);
  KernelsOf(isa).weigh(activations, row, k, weight, GemmRowFormat(activations, row_dtype), to);
  std::memset(to + bytes, 0, GemmRowBytes(row_dtype, k) - bytes);
}

RowFormat GemmRowFormat(DType activations, DType row_dtype) {
  if (row_dtype == DType::kBF16) return RowFormat::kBF16;
  return activations == DType::kBF16 ? RowFormat::kF32OfBF16 : RowFormat::kF32;
}

GroupedGemm::GroupedGemm(const Args& args, const Tuning& tuning)
    : args_(args),
      kernels_(KernelsOf(args.isa)),
      tiles_(TilesFor(kernels_, args.weights->dtype(), args.row_dtype)),
      row_bytes_(GemmRowBytes(args.row_dtype, args.weights->k())),
      max_tile_rows_(tuning.max_tile_rows),
      single_pass_rows_(
          std::min(tuning.single_pass_rows < 0 ? tiles_.single_pass_rows : tuning.single_pass_rows,
                   max_tile_rows_)),
      chunk_lines_(tuning.chunk_lines < 0 ? tiles_.chunk_lines : tuning.chunk_lines),
      num_tasks_(static_cast<int64_t>(args.groups.size()) * args.weights->blocks()) {}

GroupedGemm::Task GroupedGemm::TaskAt(int64_t number) const {
  const int64_t blocks = args_.weights->blocks();
  const GemmGroup& group = args_.groups[number / blocks];
  return {&group, args_.weights->Block(group.index, number % blocks), number % blocks};
}

void GroupedGemm::Run(Workspace& scratch, const std::function<bool()>& stop) {
  auto* const c = reinterpret_cast<float*>(scratch.Get(kGemmScratchBytes));
  int64_t rows_until_question = kStopInterval;
  // A task is claimed before the one at hand is computed, so that its weights can be fetched.
  for (int64_t number = next_task_++; number < num_tasks_;) {
    const int64_t next = next_task_++;
    const Task task = TaskAt(number);
    rows_until_question -= task.group->rows;
    if (rows_until_question <= 0) {
      rows_until_question = kStopInterval;
      if (stop()) stopped_ = true;
    }
    if (stopped_) return;
    RunTiles(task, next < num_tasks_ ? TaskAt(next) : task, c);
    Store(task, c);
    number = next;
  }
}

void GroupedGemm::RunTiles(const Task& task, const Task& next, float* c) const {
  const int64_t rows = task.group->rows;
  const int64_t lines = args_.weights->lines();
  const int64_t line_of_x = args_.weights->k_per_line() * BytesOf(args_.row_dtype);
  TileArgs tile;
  tile.panel_bytes = args_.weights->panel_bytes();
  tile.x_stride = row_bytes_;
  tile.c_stride = rows * kPanelColumns;
  const std::byte* const x = args_.x + task.group->first_row * row_bytes_;

  if (rows <= single_pass_rows_) {
    const int panels = tiles_.panels[rows];
    tile.x = x;
    tile.lines = lines;
    tile.prefetch_every = 1;
    for (int p = 0; p < kBlockPanels; p += panels) {
      tile.weights = task.weights + p * tile.panel_bytes;
      tile.prefetch = tile.weights + kPrefetchAhead;
      tile.c = c + p * tile.c_stride;
      tiles_.tile[rows](tile);
    }
    return;
  }

  // Tiles of about equal height: a lower one at the end would be less efficient.
  const int64_t num_tiles = (rows + max_tile_rows_ - 1) / max_tile_rows_;
  const int64_t height = rows / num_tiles;
  const int64_t higher = rows % num_tiles;  // tiles with one row more
  for (int64_t line = 0; line < lines; line += chunk_lines_) {
    const int64_t count = std::min(chunk_lines_, lines - line);
    const bool last = line + chunk_lines_ >= lines;
    // While this chunk is computed, the next one is fetched, a share with every tile.
    const std::byte* const ahead =
        last ? next.weights : task.weights + (line + chunk_lines_) * kLineBytes;
    int64_t fetched = 0;
    int64_t row = 0;
    tile.lines = count;
    tile.from_zero = line == 0;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t tile_rows = height + (t < higher ? 1 : 0);
      const int panels = tiles_.panels[tile_rows];
      const int64_t share = count * (t + 1) / num_tiles - fetched;
      tile.x = x + row * row_bytes_ + line * line_of_x;
      tile.prefetch_every = share > 0 ? std::max<int64_t>(1, count / share) : -1;
      for (int p = 0; p < kBlockPanels; p += panels) {
        tile.weights = task.weights + p * tile.panel_bytes + line * kLineBytes;
        tile.prefetch = ahead + p * tile.panel_bytes + fetched * kLineBytes;
        tile.c = c + p * tile.c_stride + row * kPanelColumns;
        tiles_.tile[tile_rows](tile);
      }
      fetched += share;
      row += tile_rows;
    }
  }
}

void GroupedGemm::Store(const Task& task, float* c) const {
  const int64_t rows = task.group->rows;
  if (args_.bias != nullptr) {
    kernels_.add_bias(c, rows, args_.bias->Block(task.group->index, task.block));
  }
  const bool activated = args_.output == GemmOutput::kActivated;
  const int64_t per_column = activated && IsGated(args_.activation.kind) ? 2 : 1;  // columns of c
  const int64_t width = kBlockColumns / per_column;
  const int64_t begin = task.block * width;
  const int64_t columns = std::min(args_.weights->n() / per_column - begin, width);
  const int64_t element = args_.format == RowFormat::kBF16 ? 2 : 4;
  std::byte* const y =
      static_cast<std::byte*>(args_.y) + (task.group->first_row * args_.y_stride + begin) * element;
  if (activated) {
    kernels_.activate(args_.activation, c, rows, columns, args_.format, y, args_.y_stride);
  } else {
    kernels_.store(c, rows, columns, args_.format, y, args_.y_stride);
  }
}

}  // namespace expertmesh
