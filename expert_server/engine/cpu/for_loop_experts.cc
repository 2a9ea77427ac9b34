// The plain reference of the experts: what every other implementation must equal bit for bit. It
// shares nothing with them but the elementary functions, and is written to be read.
#include <algorithm>
#include <cmath>
#include <utility>

#include "common/kernels/for_loop_gemm.h"
#include "common/kernels/for_loop_quantize.h"
#include "common/numerics/activation.h"
#include "common/numerics/flush_denormals.h"
#include "common/status.h"
#include "expert_server/engine/cpu/for_loop_experts.h"

namespace expertmesh {
namespace {

// Positions between two questions whether anybody still waits: seldom enough to cost nothing, often
// enough to answer within seconds however wide the layer and however many rows one expert has.
constexpr int64_t kStopInterval = 8;

// h of the gate row and, where there is one, the up row.
KERNEL_NOINLINE KERNEL_FMA void ActivateRow(const ActivationFunction& function,
                                            const float* gate_up, int64_t n, float* h) {
  const float* up = gate_up + (IsGated(function.kind) ? n : 0);
  for (int64_t f = 0; f < n; ++f) h[f] = Activate(function, gate_up[f], up[f]);
}

// Adds a bias, or none if it is empty.
KERNEL_NOINLINE void AddBias(const Tensor& bias, float* values) {
  for (int64_t i = 0; i < bias.num_elements(); ++i) values[i] += bias.as<float>()[i];
}

KERNEL_NOINLINE void Multiply(float factor, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}

// Rounds to the dtype that rows and h have between the steps.
void Round(DType dtype, int64_t n, float* values) {
  if (dtype != DType::kBF16) return;
  for (int64_t i = 0; i < n; ++i) values[i] = FloatFromBF16(BF16FromFloat(values[i]));
}

class ForLoopExperts : public Experts {
 public:
  ForLoopExperts(const ExpertDescriptor& descriptor, int64_t num_experts)
      : descriptor_(descriptor), experts_(num_experts) {}

  // The loops read the weights as they are stored: there is nothing to arrange.
  void SetWeights(int64_t expert, ExpertWeights weights) override {
    if (!descriptor_.has_bias) weights.gate_up_bias = weights.down_bias = Tensor(DType::kF32, {0});
    experts_[expert] = std::move(weights);
  }

  absl::Status Prepare() override {
    prepared_ = true;
    return absl::OkStatus();
  }

  int64_t bytes() const override {
    size_t bytes = 0;
    for (const ExpertWeights& weights : experts_) {
      for (const Tensor* tensor :
           {&weights.gate_up, &weights.down, &weights.gate_up_bias, &weights.down_bias,
            &weights.gate_up_scales, &weights.down_scales}) {
        bytes += tensor->num_bytes();
      }
    }
    return static_cast<int64_t>(bytes);
  }

  absl::Status Forward(const ExpertBatch& batch, void* output) const override {
    if (!prepared_) return absl::FailedPreconditionError("the layer has not been prepared");
    const int64_t hidden_size = descriptor_.hidden_size;
    const int64_t intermediate_size = descriptor_.intermediate_size;
    const ScopedFlushDenormals flush;
    const DType reply = ReplyDType(batch.dtype());
    const ActivationFunction activation = ActivationOf(descriptor_);
    std::vector<float> x(hidden_size), gate_up(GateUpRows(descriptor_)), h(intermediate_size),
        y(hidden_size);
    std::vector<uint8_t> codes(intermediate_size);
    std::vector<float> scales(intermediate_size);  // more than there can be, of either kind
    int64_t position = 0;
    int64_t reply_row = 0;
    for (size_t group = 0; group < batch.experts.size(); ++group) {
      const ExpertWeights& expert = experts_[batch.experts[group]];
      for (int64_t i = 0; i < batch.m_sizes[group]; ++i, ++position) {
        if (i % kStopInterval == 0 && batch.stop()) {
          return absl::CancelledError("nobody waits for the result any more");
        }
        const int64_t row = batch.gather[position];
        if (row < 0) continue;
        const float* x_scales = nullptr;
        if (descriptor_.row_format) {
          x_scales = LoadQuantized(static_cast<const uint8_t*>(batch.rows.data) + row * hidden_size,
                                   ScalesOf(batch.row_scales, row), hidden_size, x.data());
        } else {
          for (int64_t d = 0; d < hidden_size; ++d) {
            x[d] = LoadFloat(batch.rows.dtype, batch.rows.data, row * hidden_size + d);
          }
        }
        if (!batch.input_weights.empty()) {
          Multiply(batch.input_weights[position], hidden_size, x.data());
          Round(reply, hidden_size, x.data());
        }
        Project(x.data(), x_scales, expert.gate_up, expert.gate_up_scales, expert.gate_up_bias,
                gate_up.data());
        ActivateRow(activation, gate_up.data(), intermediate_size, h.data());
        Round(reply, intermediate_size, h.data());
        const float* h_scales = nullptr;
        if (descriptor_.row_format) {
          if (std::all_of(h.begin(), h.end(), [](float value) { return std::isfinite(value); })) {
            ForLoopQuantizeRows({*descriptor_.row_format, DType::kF32, h.data(), /*rows=*/1,
                                 intermediate_size, codes.data(), scales.data()});
            h_scales = LoadQuantized(codes.data(), scales.data(), intermediate_size, h.data());
          } else {
            std::fill(h.begin(), h.end(), NAN);
          }
        }
        Project(h.data(), h_scales, expert.down, expert.down_scales, expert.down_bias, y.data());
        for (int64_t d = 0; d < hidden_size; ++d) {
          StoreFloat(reply, output, reply_row * hidden_size + d, y[d]);
        }
        ++reply_row;
      }
    }
    return absl::OkStatus();
  }

 private:
  // The scales of one row.
  static const void* ScalesOf(const TensorView& scales, int64_t row) {
    return static_cast<const std::byte*>(scales.data) +
           row * scales.shape[1] * BytesOf(scales.dtype);
  }

  // A quantised row as it is multiplied; returns the scales that are left to be applied, or null.
  const float* LoadQuantized(const uint8_t* codes, const void* scales, int64_t k,
                             float* values) const {
    const QuantizedFormat format = *descriptor_.row_format;
    ForLoopDequantizeRow(format, codes, scales, k, values);
    return ScaleDType(format) == DType::kF32 ? static_cast<const float*>(scales) : nullptr;
  }

  // y = W x + bias.
  void Project(const float* x, const float* x_scales, const Tensor& weights,
               const Tensor& weight_scales, const Tensor& bias, float* y) const {
    ForLoopMatVec(x, {descriptor_.weight_format, weights, weight_scales}, y, x_scales);
    AddBias(bias, y);
  }

  const ExpertDescriptor descriptor_;
  std::vector<ExpertWeights> experts_;
  bool prepared_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Experts>> MakeForLoopExperts(const ExpertDescriptor& descriptor,
                                                            int64_t num_experts) {
  RETURN_IF_ERROR(CheckComputed(descriptor));
  return std::make_unique<ForLoopExperts>(descriptor, num_experts);
}

}  // namespace expertmesh
