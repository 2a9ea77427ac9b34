#include "expert_server/engine/cpu/grouped_experts.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "common/kernels/quantize.h"
#include "common/status.h"

namespace expertmesh {
namespace {

PackedWeights::Columns GateUpColumns(const ExpertDescriptor& descriptor) {
  return descriptor.gated ? PackedWeights::Columns::kInterleavedHalves
                          : PackedWeights::Columns::kPlain;
}

class GroupedExperts : public Experts {
 public:
  GroupedExperts(const ExpertDescriptor& descriptor, int64_t num_experts,
                 std::shared_ptr<GroupedContext> context)
      : hidden_size_(descriptor.hidden_size),
        intermediate_size_(descriptor.intermediate_size),
        row_format_(descriptor.row_format),
        activation_(ActivationOf(descriptor)),
        context_(std::move(context)),
        gate_up_(descriptor.weight_format, descriptor.weight_dtype, num_experts,
                 GateUpRows(descriptor), hidden_size_, GateUpColumns(descriptor)),
        down_(descriptor.weight_format, descriptor.weight_dtype, num_experts, hidden_size_,
              intermediate_size_) {
    if (!descriptor.has_bias) return;
    gate_up_bias_.emplace(num_experts, GateUpRows(descriptor), GateUpColumns(descriptor));
    down_bias_.emplace(num_experts, hidden_size_, PackedWeights::Columns::kPlain);
  }

  void SetWeights(int64_t expert, ExpertWeights weights) override {
    gate_up_.Pack(expert, {gate_up_.format(), weights.gate_up, weights.gate_up_scales});
    down_.Pack(expert, {down_.format(), weights.down, weights.down_scales});
    if (gate_up_bias_) gate_up_bias_->Pack(expert, weights.gate_up_bias.as<float>());
    if (down_bias_) down_bias_->Pack(expert, weights.down_bias.as<float>());
  }

  absl::Status Prepare() override {
    prepared_ = true;
    return absl::OkStatus();
  }

  int64_t bytes() const override {
    return gate_up_.bytes() + down_.bytes() + (gate_up_bias_ ? gate_up_bias_->bytes() : 0) +
           (down_bias_ ? down_bias_->bytes() : 0);
  }

  absl::Status Forward(const ExpertBatch& batch, void* output) const override {
    if (!prepared_) return absl::FailedPreconditionError("the layer has not been prepared");
    GroupedContext& context = *context_;
    absl::MutexLock lock(&context.mutex);
    Plan(batch, context);
    // Groups of one portion; their rows are numbered from its first one.
    size_t begin = 0;
    int64_t first_row = 0;
    while (begin < context.groups.size()) {
      size_t end = begin;
      int64_t rows = 0;
      while (end < context.groups.size() &&
             (end == begin || rows + context.groups[end].rows <= MaxRows(batch.dtype()))) {
        context.groups[end].first_row = rows;
        rows += context.groups[end].rows;
        ++end;
      }
      const auto groups = absl::MakeConstSpan(context.groups).subspan(begin, end - begin);
      if (batch.stop() || !Compute(batch, groups, first_row, rows, output, context)) {
        return absl::CancelledError("nobody waits for the result any more");
      }
      begin = end;
      first_row += rows;
    }
    return absl::OkStatus();
  }

 private:
  // Fills groups, source and weights: padding is left out, so that output row i is that of
  // source[i].
  static void Plan(const ExpertBatch& batch, GroupedContext& context)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(context.mutex) {
    context.groups.clear();
    context.source.clear();
    context.weights.clear();
    int64_t position = 0;
    for (size_t group = 0; group < batch.experts.size(); ++group) {
      const int64_t first_row = static_cast<int64_t>(context.source.size());
      for (int64_t i = 0; i < batch.m_sizes[group]; ++i, ++position) {
        if (batch.gather[position] < 0) continue;
        context.source.push_back(batch.gather[position]);
        if (!batch.input_weights.empty()) {
          context.weights.push_back(batch.input_weights[position]);
        }
      }
      AddGroups(batch.experts[group], first_row,
                static_cast<int64_t>(context.source.size()) - first_row, &context.groups);
    }
  }

  DType RowDType(DType activations) const {
    // Quantised rows are exact in BF16.
    return GemmRowDType(context_->isa, gate_up_.dtype(), row_format_ ? DType::kBF16 : activations);
  }
  int64_t XBytes(DType activations) const {
    return GemmRowBytes(RowDType(activations), hidden_size_);
  }
  int64_t HBytes(DType activations) const {
    return GemmRowBytes(RowDType(activations), intermediate_size_);
  }
  int64_t MaxRows(DType activations) const {
    int64_t bytes = XBytes(activations) + HBytes(activations);
    if (row_format_) bytes += QuantizedLayout(*this, activations, /*rows=*/1).bytes;
    return std::max(int64_t{1}, context_->portion_bytes / bytes);
  }

  // Where things are in the workspace `quantized`, of a portion of `rows` rows: offsets in bytes.
  struct QuantizedLayout {
    QuantizedLayout(const GroupedExperts& experts, DType activations, int64_t rows) {
      const QuantizedFormat format = *experts.row_format_;
      const auto take = [this](int64_t size) {
        constexpr int64_t kCacheLine = 64;
        const int64_t at = bytes;
        bytes += (size + kCacheLine - 1) / kCacheLine * kCacheLine;
        return at;
      };
      h_stride = (experts.intermediate_size_ + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
      if (ScaleDType(format) == DType::kF32) {
        x_scales_per_row = ScalesPerRow(format, experts.hidden_size_);
        h_scales_per_row = ScalesPerRow(format, experts.intermediate_size_);
      }
      h = take(rows * h_stride * BytesOf(ReplyDType(activations)));
      x_scales = take(rows * x_scales_per_row * BytesOf(DType::kF32));
      h_scales = take(rows * h_scales_per_row * BytesOf(DType::kF32));
    }

    // F32 scales of a row, which the GEMM applies; 0 where its rows have them already.
    int64_t x_scales_per_row = 0;
    int64_t h_scales_per_row = 0;
    int64_t h_stride = 0;  // elements from a row of h to the next
    int64_t h = 0;         // [rows, h_stride], before it is quantised
    int64_t x_scales = 0;
    int64_t h_scales = 0;
    int64_t bytes = 0;
  };

  // The memory of one portion.
  struct Portion {
    std::byte* x = nullptr;  // rows that the GEMMs read
    std::byte* h = nullptr;
    // In low precision.
    std::byte* plain_h = nullptr;
    int64_t plain_h_bytes = 0;  // from a row to the next
    float* x_scales = nullptr;  // null: there are none to apply
    float* h_scales = nullptr;
  };

  Portion MemoryOf(DType activations, int64_t rows, GroupedContext& context) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(context.mutex) {
    Portion portion;
    portion.x = context.x.Get(static_cast<size_t>(rows * XBytes(activations)));
    portion.h = context.h.Get(static_cast<size_t>(rows * HBytes(activations)));
    // Here, where a lack of memory can still be reported: the pool's work must not throw.
    size_t scratch = kGemmScratchBytes;
    if (row_format_) {
      const QuantizedLayout layout(*this, activations, rows);
      std::byte* const memory = context.quantized.Get(static_cast<size_t>(layout.bytes));
      portion.plain_h = memory + layout.h;
      portion.plain_h_bytes = layout.h_stride * BytesOf(ReplyDType(activations));
      if (layout.x_scales_per_row > 0) {
        portion.x_scales = reinterpret_cast<float*>(memory + layout.x_scales);
        portion.h_scales = reinterpret_cast<float*>(memory + layout.h_scales);
      }
      // Codes of one row and scales, which are fewer.
      scratch = std::max(scratch, static_cast<size_t>(2 * intermediate_size_));
    }
    for (Workspace& memory : context.scratch) memory.Get(scratch);
    return portion;
  }

  // Brings the input of row r of a portion, row `source` of the batch, to where it is multiplied.
  void LoadX(const ExpertBatch& batch, int64_t source, const float* weight, int64_t r,
             const Portion& portion) const {
    const Isa isa = context_->isa;
    const DType row_dtype = RowDType(batch.dtype());
    std::byte* const to = portion.x + r * XBytes(batch.dtype());
    const std::byte* const row = static_cast<const std::byte*>(batch.rows.data) +
                                 source * hidden_size_ * BytesOf(batch.rows.dtype);
    if (row_format_) {
      const int64_t per_row = ScalesPerRow(*row_format_, hidden_size_);
      const std::byte* const scales = static_cast<const std::byte*>(batch.row_scales.data) +
                                      source * per_row * BytesOf(batch.row_scales.dtype);
      LoadQuantizedGemmRow(isa, *row_format_, reinterpret_cast<const uint8_t*>(row), scales,
                           hidden_size_, row_dtype, to);
      if (portion.x_scales != nullptr) {
        std::memcpy(portion.x_scales + r * per_row, scales, per_row * sizeof(float));
      }
    } else if (weight != nullptr) {
      LoadWeighedGemmRow(isa, batch.dtype(), row, hidden_size_, *weight, row_dtype, to);
    } else {
      LoadGemmRow(isa, batch.dtype(), row, hidden_size_, row_dtype, to);
    }
  }

  // Quantises row r of the activations; one that is not finite becomes NaN. `scratch`: 2 F bytes.
  void QuantizeH(DType activations, int64_t r, const Portion& portion, std::byte* scratch) const {
    auto* const codes = reinterpret_cast<uint8_t*>(scratch);
    void* scales = scratch + intermediate_size_;
    if (portion.h_scales != nullptr) {
      scales = portion.h_scales + r * ScalesPerRow(*row_format_, intermediate_size_);
    }
    const Isa isa = context_->isa;
    const DType dtype = ReplyDType(activations);
    const std::byte* const plain = portion.plain_h + r * portion.plain_h_bytes;
    std::byte* const to = portion.h + r * HBytes(activations);
    if (KernelsOf(isa).find_not_finite(dtype, plain, intermediate_size_) < 0) {
      QuantizeRows(isa,
                   {*row_format_, dtype, plain, /*rows=*/1, intermediate_size_, codes, scales});
      LoadQuantizedGemmRow(isa, *row_format_, codes, scales, intermediate_size_,
                           RowDType(activations), to);
      return;
    }
    std::memset(to, 0, static_cast<size_t>(HBytes(activations)));
    for (int64_t f = 0; f < intermediate_size_; ++f) StoreFloat(RowDType(activations), to, f, NAN);
    if (portion.h_scales != nullptr) {
      std::fill_n(static_cast<float*>(scales), ScalesPerRow(*row_format_, intermediate_size_),
                  1.0f);
    }
  }

  // Gather, gate and up, activation, down for the positions [first_row, first_row + rows); false
  // when batch.stop said so.
  bool Compute(const ExpertBatch& batch, absl::Span<const GemmGroup> groups, int64_t first_row,
               int64_t rows, void* output, GroupedContext& context) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(context.mutex) {
    const DType activations = batch.dtype();
    const DType reply = ReplyDType(activations);
    const Portion portion = MemoryOf(activations, rows, context);
    const auto address = [](const std::optional<PackedBias>& bias) {
      return bias ? &*bias : nullptr;
    };
    GroupedGemm::Args args = {};
    args.isa = context.isa;
    args.groups = groups;
    args.row_dtype = RowDType(activations);

    args.weights = &gate_up_;
    args.x = portion.x;
    args.x_scales = portion.x_scales;
    args.bias = address(gate_up_bias_);
    args.output = GemmOutput::kActivated;
    args.activation = activation_;
    if (row_format_) {
      args.y = portion.plain_h;
      args.format = RowFormatOf(reply);
      args.y_stride = portion.plain_h_bytes / BytesOf(reply);
    } else {
      // h is rounded to the request's dtype, and stored as the next GEMM reads it.
      args.y = portion.h;
      args.format = GemmRowFormat(activations, args.row_dtype);
      args.y_stride = HBytes(activations) / BytesOf(args.row_dtype);
    }
    GroupedGemm up(args);

    args.weights = &down_;
    args.x = portion.h;
    args.x_scales = portion.h_scales;
    args.bias = address(down_bias_);
    args.output = GemmOutput::kRows;
    args.activation = {};
    args.y = static_cast<std::byte*>(output) + first_row * hidden_size_ * BytesOf(reply);
    args.format = RowFormatOf(reply);
    args.y_stride = hidden_size_;
    GroupedGemm down(args);

    const int32_t* const source = context.source.data() + first_row;
    const float* const weights = context.weights.empty() ? nullptr : &context.weights[first_row];
    const std::function<bool()> go_on = [] { return false; };
    const int64_t threads = context.pool.threads();
    std::vector<Workspace>& scratch = context.scratch;
    const auto start = std::chrono::steady_clock::now();
    context.pool.Run([&](int thread) {
      const int64_t begin = rows * thread / threads;
      const int64_t end = rows * (thread + 1) / threads;
      for (int64_t r = begin; r < end; ++r) {
        LoadX(batch, source[r], weights == nullptr ? nullptr : weights + r, r, portion);
      }
      context.pool.Barrier();
      if (thread == 0 && batch.gather_ns != nullptr) {
        const std::chrono::nanoseconds gathered = std::chrono::steady_clock::now() - start;
        *batch.gather_ns += gathered.count();
      }
      // The caller's thread asks; the others hear of it.
      const std::function<bool()>& stop = thread == 0 ? batch.stop : go_on;
      up.Run(scratch[thread], stop);
      context.pool.Barrier();
      if (up.stopped()) return;
      if (row_format_) {
        std::byte* const memory = scratch[thread].Get(2 * intermediate_size_);
        for (int64_t r = begin; r < end; ++r) QuantizeH(activations, r, portion, memory);
        context.pool.Barrier();
      }
      down.Run(scratch[thread], stop);
    });
    return !up.stopped() && !down.stopped();
  }

  static RowFormat RowFormatOf(DType reply) {
    return reply == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kF32;
  }

  const int64_t hidden_size_;
  const int64_t intermediate_size_;
  const std::optional<QuantizedFormat> row_format_;
  const ActivationFunction activation_;
  const std::shared_ptr<GroupedContext> context_;
  PackedWeights gate_up_;
  PackedWeights down_;
  std::optional<PackedBias> gate_up_bias_;
  std::optional<PackedBias> down_bias_;
  bool prepared_ = false;
};

}  // namespace

int64_t BytesOfGroupedExpert(const ExpertDescriptor& descriptor) {
  const auto matrix = [&descriptor](int64_t n, int64_t k, PackedWeights::Columns columns) {
    const PackedWeights none(descriptor.weight_format, descriptor.weight_dtype, /*num=*/0, n, k,
                             columns);
    return none.blocks() * kBlockPanels * none.panel_bytes() +
           (descriptor.has_bias ? PackedBias(1, n, columns).bytes() : 0);
  };
  return matrix(GateUpRows(descriptor), descriptor.hidden_size, GateUpColumns(descriptor)) +
         matrix(descriptor.hidden_size, descriptor.intermediate_size,
                PackedWeights::Columns::kPlain);
}

absl::StatusOr<std::unique_ptr<Experts>> MakeGroupedExperts(
    const ExpertDescriptor& descriptor, int64_t num_experts,
    std::shared_ptr<GroupedContext> context) {
  RETURN_IF_ERROR(CheckComputed(descriptor));
  return std::make_unique<GroupedExperts>(descriptor, num_experts, std::move(context));
}

}  // namespace expertmesh
