// The plain reference of the experts: what every other implementation must equal bit for bit. It
// shares nothing with them but the elementary functions, and is written to be read.
#include <cmath>
#include <utility>

#include "common/numerics/flush_denormals.h"
#include "common/numerics/math.h"
#include "common/status.h"
#include "expert_server/engine/experts.h"

namespace expertmesh {
namespace {

// Chains that run side by side, so that the processor need not wait for one addition before the
// next. Each chain keeps its own order, so this changes no bit.
constexpr int64_t kChains = 8;

// Positions between two questions whether anybody still waits: seldom enough to cost nothing, often
// enough to answer within seconds however wide the layer and however many rows one expert has.
constexpr int64_t kStopInterval = 8;

// y[n] = sum over k of x[k] * w[n, k] for n in [0, rows): one chain of fused multiply-adds from +0
// for each n. fp32 weights: k ascending. 16-bit weights: pairs of neighbouring k, the odd one
// first; an odd number of k is padded with a zero product, which turns -0 into +0.
template <DType kWeights>
KERNEL_NOINLINE KERNEL_FMA void MatVec(const float* x, const void* weights, int64_t rows,
                                       int64_t columns, float* y) {
  for (int64_t n0 = 0; n0 < rows; n0 += kChains) {
    const int64_t chains = rows - n0 < kChains ? rows - n0 : kChains;
    float sum[kChains] = {};
    if constexpr (kWeights == DType::kF32) {
      for (int64_t k = 0; k < columns; ++k) {
        for (int64_t c = 0; c < chains; ++c) {
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, (n0 + c) * columns + k), sum[c]);
        }
      }
    } else {
      for (int64_t k = 0; k + 1 < columns; k += 2) {
        for (int64_t c = 0; c < chains; ++c) {
          const int64_t at = (n0 + c) * columns + k;
          sum[c] = std::fma(x[k + 1], LoadFloat(kWeights, weights, at + 1), sum[c]);
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, at), sum[c]);
        }
      }
      if (columns % 2 == 1) {
        const int64_t k = columns - 1;
        for (int64_t c = 0; c < chains; ++c) {
          sum[c] = std::fma(0.0f, 0.0f, sum[c]);
          sum[c] = std::fma(x[k], LoadFloat(kWeights, weights, (n0 + c) * columns + k), sum[c]);
        }
      }
    }
    for (int64_t c = 0; c < chains; ++c) y[n0 + c] = sum[c];
  }
}

void MatVec(const float* x, const Tensor& weights, float* y) {
  const int64_t rows = weights.dim(0);
  const int64_t columns = weights.dim(1);
  switch (weights.dtype()) {
    case DType::kBF16:
      return MatVec<DType::kBF16>(x, weights.data(), rows, columns, y);
    case DType::kF16:
      return MatVec<DType::kF16>(x, weights.data(), rows, columns, y);
    default:
      return MatVec<DType::kF32>(x, weights.data(), rows, columns, y);
  }
}

// h = silu(g) * u, each operation rounded in fp32.
KERNEL_NOINLINE KERNEL_FMA void SiluGlu(const float* gate_up, int64_t n, float* h) {
  for (int64_t f = 0; f < n; ++f) h[f] = Silu(gate_up[f]) * gate_up[n + f];
}

// Rounds to the dtype that rows and h have between the steps.
void Round(DType dtype, int64_t n, float* values) {
  if (dtype != DType::kBF16) return;
  for (int64_t i = 0; i < n; ++i) values[i] = FloatFromBF16(BF16FromFloat(values[i]));
}

class ForLoopExperts : public Experts {
 public:
  ForLoopExperts(const ExpertDescriptor& descriptor, std::vector<ExpertWeights> experts)
      : descriptor_(descriptor), experts_(std::move(experts)) {}

  // The loops read the weights as they are stored: there is nothing to arrange.
  absl::Status Prepare() override {
    prepared_ = true;
    return absl::OkStatus();
  }

  absl::Status Forward(const ExpertBatch& batch, void* output) const override {
    if (!prepared_) return absl::FailedPreconditionError("the layer has not been prepared");
    const int64_t hidden_size = descriptor_.hidden_size;
    const int64_t intermediate_size = descriptor_.intermediate_size;
    const ScopedFlushDenormals flush;
    const DType reply = ReplyDType(batch.rows.dtype);
    std::vector<float> x(hidden_size), gate_up(2 * intermediate_size), h(intermediate_size),
        y(hidden_size);
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
        for (int64_t d = 0; d < hidden_size; ++d) {
          x[d] = LoadFloat(batch.rows.dtype, batch.rows.data, row * hidden_size + d);
        }
        MatVec(x.data(), expert.gate_up, gate_up.data());
        SiluGlu(gate_up.data(), intermediate_size, h.data());
        Round(reply, intermediate_size, h.data());
        MatVec(h.data(), expert.down, y.data());
        for (int64_t d = 0; d < hidden_size; ++d) {
          StoreFloat(reply, output, reply_row * hidden_size + d, y[d]);
        }
        ++reply_row;
      }
    }
    return absl::OkStatus();
  }

 private:
  const ExpertDescriptor descriptor_;
  const std::vector<ExpertWeights> experts_;
  bool prepared_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Experts>> MakeForLoopExperts(const ExpertDescriptor& descriptor,
                                                            std::vector<ExpertWeights> experts) {
  if (descriptor.activation != Activation::kSiluGlu || !descriptor.gated) {
    return absl::UnimplementedError("experts: only silu-gated linear units are computed");
  }
  if (descriptor.has_bias) return absl::UnimplementedError("experts: biases are not computed");
  return std::make_unique<ForLoopExperts>(descriptor, std::move(experts));
}

}  // namespace expertmesh
