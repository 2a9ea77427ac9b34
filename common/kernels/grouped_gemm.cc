#include "common/kernels/grouped_gemm.h"

#include <algorithm>
#include <cstring>

namespace expertmesh {
namespace {

// How far ahead of its own reads a single pass fetches each panel: the latency of memory times the
// rate at which one panel is read. Measured: plain weights lose by more, others by less.
int64_t PrefetchAhead(const TileKernels& tiles) { return tiles.widens ? 2048 : 1024; }

// Rows computed between two questions whether anybody still waits: a few milliseconds at most.
constexpr int64_t kStopInterval = 256;

const TileKernels& TilesFor(const Kernels& kernels, WeightFormat format, DType weights,
                            DType row_dtype) {
  const bool pairs = row_dtype == DType::kBF16;
  switch (format) {
    case WeightFormat::kFp8Block128:
      return pairs ? kernels.fp8_block_pairs : kernels.fp8_block;
    case WeightFormat::kFp8Row:
      return pairs ? kernels.fp8_pairs : kernels.fp8;
    case WeightFormat::kMxfp4:
      return pairs ? kernels.mxfp4_pairs : kernels.mxfp4;
    case WeightFormat::kMxfp8:
      return pairs ? kernels.mxfp8_pairs : kernels.mxfp8;
    case WeightFormat::kPlain:
      break;
  }
  if (weights == DType::kF32) return kernels.f32;
  if (weights == DType::kF16) return kernels.f16;
  return pairs ? kernels.bf16_pairs : kernels.bf16;
}

// Chunks of quantised weights begin where a scale does and fit in the scratch.
int64_t ChunkLines(const PackedWeights& weights, const TileKernels& tiles, int64_t wanted) {
  const int64_t lines = wanted < 0 ? tiles.chunk_lines : wanted;
  if (!tiles.widens) return lines;
  if (weights.format() == WeightFormat::kFp8Block128) return kFp8BlockK / weights.k_per_line();
  const int64_t multiple = kMxBlockK / weights.k_per_line();
  const int64_t most = kMaxWidenedK / weights.k_per_line();
  return std::clamp((lines + multiple - 1) / multiple * multiple, multiple, most);
}

// Where a single pass may be split: between scales, whatever the format.
constexpr int64_t kSplitLines = kFp8BlockK / KPerLine(WeightFormat::kFp8Block128, DType::kF8_E4M3);

// Fetches the scales of panels: each is read long after the one before it, so that no prefetcher of
// the processor helps.
void FetchHeads(const std::byte* panels, int count, int64_t panel_bytes, int64_t head) {
  for (int p = 0; p < count; ++p) {
    for (int64_t at = 0; at < head; at += kLineBytes) {
      __builtin_prefetch(panels + p * panel_bytes + at, 0, 2);
    }
  }
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
  if (activations != DType::kBF16) return DType::kF32;
  const Kernels& kernels = KernelsOf(isa);
  const bool pairs = (weights == DType::kBF16 && !kernels.bf16_pairs.empty()) ||
                     (weights == DType::kF8_E4M3 && !kernels.fp8_pairs.empty()) ||
                     (weights == DType::kF4 && !kernels.mxfp4_pairs.empty());
  return pairs ? DType::kBF16 : DType::kF32;
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

void LoadQuantizedGemmRow(Isa isa, QuantizedFormat format, const uint8_t* codes, const void* scales,
                          int64_t k, DType row_dtype, std::byte* to) {
  const bool exponents = ScaleDType(format) == DType::kF8_E8M0;
  const int64_t bytes = k * BytesOf(row_dtype);
  KernelsOf(isa).widen_codes(codes, exponents ? static_cast<const uint8_t*>(scales) : nullptr, k,
                             row_dtype, to);
  std::memset(to + bytes, 0, GemmRowBytes(row_dtype, k) - bytes);
}

RowFormat GemmRowFormat(DType activations, DType row_dtype) {
  if (row_dtype == DType::kBF16) return RowFormat::kBF16;
  return activations == DType::kBF16 ? RowFormat::kF32OfBF16 : RowFormat::kF32;
}

GroupedGemm::GroupedGemm(const Args& args, const Tuning& tuning)
    : args_(args),
      kernels_(KernelsOf(args.isa)),
      tiles_(TilesFor(kernels_, args.weights->format(), args.weights->dtype(), args.row_dtype)),
      row_bytes_(GemmRowBytes(args.row_dtype, args.weights->k())),
      max_tile_rows_(tuning.max_tile_rows),
      single_pass_rows_(
          std::min(tuning.single_pass_rows < 0 ? tiles_.single_pass_rows : tuning.single_pass_rows,
                   max_tile_rows_)),
      chunk_lines_(ChunkLines(*args.weights, tiles_, tuning.chunk_lines)),
      num_tasks_(static_cast<int64_t>(args.groups.size()) * args.weights->blocks()) {}

GroupedGemm::Task GroupedGemm::TaskAt(int64_t number) const {
  const int64_t blocks = args_.weights->blocks();
  const GemmGroup& group = args_.groups[number / blocks];
  return {&group, args_.weights->Block(group.index, number % blocks), number % blocks};
}

void GroupedGemm::Run(Workspace& scratch, const std::function<bool()>& stop) {
  std::byte* const memory = scratch.Get(kGemmScratchBytes);
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
    RunTiles(task, next < num_tasks_ ? TaskAt(next) : task, memory);
    auto* const c = reinterpret_cast<float*>(memory);
    if (args_.weights->format() == WeightFormat::kFp8Row) {
      kernels_.scale_columns(task.weights, args_.weights->panel_bytes(),
                             RowScales(task.group->first_row, 0), task.group->rows, c);
    }
    Store(task, c);
    number = next;
  }
}

void GroupedGemm::RunTiles(const Task& task, const Task& next, std::byte* scratch) const {
  const PackedWeights& weights = *args_.weights;
  const int64_t rows = task.group->rows;
  const int64_t lines = weights.lines();
  const int64_t panel_bytes = weights.panel_bytes();
  const int64_t head = weights.head_bytes();
  const int64_t line_of_x = weights.k_per_line() * BytesOf(args_.row_dtype);
  auto* const c = reinterpret_cast<float*>(scratch);
  TileArgs tile;
  tile.panel_bytes = panel_bytes;
  tile.scale_bytes = panel_bytes;
  tile.prefetch_bytes = panel_bytes;
  tile.x_stride = row_bytes_;
  tile.c_stride = rows * kPanelColumns;
  tile.x_scales_stride = ScalesPerRow(weights.format(), weights.k());
  const std::byte* const x = args_.x + task.group->first_row * row_bytes_;

  if (rows <= single_pass_rows_) {
    const int panels = tiles_.single_pass.panels[rows];
    // The last lines fetch the first ones of the panels that come next.
    const int64_t ahead = PrefetchAhead(tiles_);
    const int64_t end =
        std::max<int64_t>(0, lines - ahead / kLineBytes) / kSplitLines * kSplitLines;
    tile.prefetch_every = 1;
    for (int p = 0; p < kBlockPanels; p += panels) {
      const std::byte* const panel = task.weights + p * panel_bytes;
      const std::byte* const after =
          p + panels < kBlockPanels ? panel + panels * panel_bytes : next.weights;
      tile.c = c + p * tile.c_stride;
      tile.from_zero = true;
      if (end > 0) {
        tile.x = x;
        tile.scales = panel;
        tile.x_scales = RowScales(task.group->first_row, 0);
        tile.weights = panel + head;
        tile.prefetch = tile.weights + ahead;
        tile.lines = end;
        tiles_.single_pass.tile[rows](tile);
        tile.from_zero = false;
      }
      FetchHeads(after, panels, panel_bytes, head);
      tile.x = x + end * line_of_x;
      tile.scales = panel + ScaleOffset(end);
      tile.x_scales = RowScales(task.group->first_row, end);
      tile.weights = panel + head + end * kLineBytes;
      tile.prefetch = after + head;
      tile.lines = lines - end;
      tiles_.single_pass.tile[rows](tile);
    }
    return;
  }

  // BF16 lines that a line becomes.
  const int64_t widened = tiles_.widens ? weights.k_per_line() / 2 : 1;
  std::byte* const wide = scratch + kGemmSumBytes;
  const int64_t wide_bytes = chunk_lines_ * widened * kLineBytes;
  tile.wide_bytes = wide_bytes;
  // Tiles of about equal height: a lower one at the end would be less efficient.
  const int64_t num_tiles = (rows + max_tile_rows_ - 1) / max_tile_rows_;
  const int64_t height = rows / num_tiles;
  const int64_t lower = num_tiles - rows % num_tiles;  // tiles before those with one row more
  for (int64_t line = 0; line < lines; line += chunk_lines_) {
    const int64_t count = std::min(chunk_lines_, lines - line);
    const bool last = line + chunk_lines_ >= lines;
    const std::byte* const chunk = task.weights + head + line * kLineBytes;
    // While this chunk is computed, the next one is fetched, a share with every tile.
    const std::byte* const ahead = last ? next.weights + head : chunk + chunk_lines_ * kLineBytes;
    if (last) FetchHeads(next.weights, kBlockPanels, panel_bytes, head);
    const std::byte* const scales = task.weights + ScaleOffset(line);
    if (tiles_.widen != nullptr) {
      for (int p = 0; p < kBlockPanels; ++p) {
        tiles_.widen(chunk + p * panel_bytes, scales + p * panel_bytes, count,
                     wide + p * wide_bytes);
      }
    }
    int64_t fetched = 0;
    int64_t row = 0;
    tile.from_zero = line == 0;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t tile_rows = height + (t < lower ? 0 : 1);
      const bool widening = t == 0 && tiles_.widens && tiles_.widen == nullptr;
      const bool from_wide = tiles_.widens && !widening;
      const Tiles& tiles = widening ? tiles_.widening : tiles_.chunked;
      const std::byte* const source = from_wide ? wide : chunk;
      tile.panel_bytes = from_wide ? wide_bytes : panel_bytes;
      tile.lines = from_wide ? count * widened : count;
      // A tile that widens fetches all of the next chunk.
      const int64_t share = widening ? count : count * (t + 1) / num_tiles - fetched;
      tile.prefetch_every = share > 0 ? std::max<int64_t>(1, tile.lines / share) : -1;
      const int panels = tiles.panels[tile_rows];
      tile.x_scales = RowScales(task.group->first_row + row, line);
      for (int p = 0; p < kBlockPanels; p += panels) {
        tile.x = x + row * row_bytes_ + line * line_of_x;
        tile.weights = source + p * tile.panel_bytes;
        tile.scales = scales + p * panel_bytes;
        tile.wide = wide + p * wide_bytes;
        tile.prefetch = ahead + p * panel_bytes + fetched * kLineBytes;
        tile.c = c + row * kPanelColumns + p * tile.c_stride;
        tiles.tile[tile_rows](tile);
      }
      fetched += share;
      row += tile_rows;
    }
  }
}

int64_t GroupedGemm::ScaleOffset(int64_t line) const {
  const int64_t k = line * args_.weights->k_per_line();
  switch (args_.weights->format()) {
    case WeightFormat::kFp8Block128:
      return k / kFp8BlockK * kPanelColumns * static_cast<int64_t>(sizeof(float));
    case WeightFormat::kMxfp4:
    case WeightFormat::kMxfp8:
      return k / kMxBlockK * kPanelColumns;
    default:
      return 0;
  }
}

const float* GroupedGemm::RowScales(int64_t row, int64_t line) const {
  if (args_.x_scales == nullptr) return nullptr;
  const PackedWeights& weights = *args_.weights;
  const float* const scales = args_.x_scales + row * ScalesPerRow(weights.format(), weights.k());
  if (weights.format() == WeightFormat::kFp8Row) return scales;
  return scales + line * weights.k_per_line() / kFp8BlockK;
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
