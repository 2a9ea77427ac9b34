#include "expert_server/engine/cpu/grouped_experts.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

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
             (end == begin || rows + context.groups[end].rows <= MaxRows(batch.rows.dtype))) {
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
    return GemmRowDType(context_->isa, gate_up_.dtype(), activations);
  }
  int64_t XBytes(DType activations) const {
    return GemmRowBytes(RowDType(activations), hidden_size_);
  }
  int64_t HBytes(DType activations) const {
    return GemmRowBytes(RowDType(activations), intermediate_size_);
  }
  int64_t MaxRows(DType activations) const {
    return std::max(int64_t{1},
                    context_->portion_bytes / (XBytes(activations) + HBytes(activations)));
  }

  // Gather, gate and up, activation, down for the positions [first_row, first_row + rows); false
  // when batch.stop said so.
  bool Compute(const ExpertBatch& batch, absl::Span<const GemmGroup> groups, int64_t first_row,
               int64_t rows, void* output, GroupedContext& context) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(context.mutex) {
    const Isa isa = context.isa;
    const DType activations = batch.rows.dtype;
    const DType reply = ReplyDType(activations);
    const DType row_dtype = RowDType(activations);
    const int64_t x_bytes = XBytes(activations);
    const int64_t h_bytes = HBytes(activations);
    std::byte* const x = context.x.Get(static_cast<size_t>(rows * x_bytes));
    std::byte* const h = context.h.Get(static_cast<size_t>(rows * h_bytes));
    // h is rounded to the request's dtype, and stored as the next GEMM reads it.
    const RowFormat h_format = GemmRowFormat(activations, row_dtype);
    const RowFormat y_format = reply == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kF32;
    std::byte* const y =
        static_cast<std::byte*>(output) + first_row * hidden_size_ * BytesOf(reply);
    const auto address = [](const std::optional<PackedBias>& bias) {
      return bias ? &*bias : nullptr;
    };
    GroupedGemm up({isa, &gate_up_, groups, x, row_dtype, GemmOutput::kActivated, h_format, h,
                    h_bytes / BytesOf(row_dtype), activation_, address(gate_up_bias_)});
    GroupedGemm down({isa,
                      &down_,
                      groups,
                      h,
                      row_dtype,
                      GemmOutput::kRows,
                      y_format,
                      y,
                      hidden_size_,
                      {},
                      address(down_bias_)});
    const absl::Span<const int32_t> source =
        absl::MakeConstSpan(context.source).subspan(first_row, rows);
    absl::Span<const float> weights = context.weights;
    if (!weights.empty()) weights = weights.subspan(first_row, rows);
    const auto* const from = static_cast<const std::byte*>(batch.rows.data);
    const int64_t from_bytes = hidden_size_ * BytesOf(activations);
    const std::function<bool()> go_on = [] { return false; };
    const int64_t threads = context.pool.threads();
    std::vector<Workspace>& scratch = context.scratch;
    // Here, where a lack of memory can still be reported: work must not throw.
    for (Workspace& memory : scratch) memory.Get(kGemmScratchBytes);
    const auto start = std::chrono::steady_clock::now();
    context.pool.Run([&](int thread) {
      for (int64_t r = rows * thread / threads; r < rows * (thread + 1) / threads; ++r) {
        const std::byte* const row = from + source[r] * from_bytes;
        if (weights.empty()) {
          LoadGemmRow(isa, activations, row, hidden_size_, row_dtype, x + r * x_bytes);
        } else {
          LoadWeighedGemmRow(isa, activations, row, hidden_size_, weights[r], row_dtype,
                             x + r * x_bytes);
        }
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
      if (!up.stopped()) down.Run(scratch[thread], stop);
    });
    return !up.stopped() && !down.stopped();
  }

  const int64_t hidden_size_;
  const int64_t intermediate_size_;
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
