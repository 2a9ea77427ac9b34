// The experts of one layer that one server holds, over a buffer grouped by expert. Every
// implementation gives the bits of ForLoopExperts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/checkpoint.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

// Input of one forward pass. P positions = sum of m_sizes, R rows.
struct ExpertBatch {
  TensorView rows;                    // [R, D] F32, BF16 or F16; codes where there is a row_format
  absl::Span<const int32_t> experts;  // local index of each group's expert
  absl::Span<const int64_t> m_sizes;  // positions of each group, padding included
  absl::Span<const int32_t> gather;   // [P]: row of each position; -1 is padding and skipped
  // [P] or empty: the expert of a position reads round(weight * row), rounded as h is. Empty where
  // there is a row_format: the weights are in the rows.
  absl::Span<const float> input_weights = {};
  // Asked every few positions; once true the computation is given up.
  std::function<bool()> stop = [] { return false; };
  // If set, the nanoseconds that Forward takes to bring rows to where they are computed are added
  // here by those implementations that do so.
  int64_t* gather_ns = nullptr;
  // The descriptor's row_format, and then: the scales of the rows, as ExpertRows has them, and the
  // dtype that they were quantised from.
  std::optional<QuantizedFormat> row_format = {};
  TensorView row_scales = {};
  DType quantized_from = DType::kF32;

  // A, the dtype of the request.
  DType dtype() const { return row_format ? quantized_from : rows.dtype; }
};

// SetWeights() for every expert, Prepare() once, then Forward() from any number of threads at once.
class Experts {
 public:
  virtual ~Experts() = default;

  // Takes the weights of local expert `expert`, which fit the descriptor (CheckWeights), arranged
  // for the computation: what is not needed of them is freed here, so that memory holds a layer
  // once. Before Prepare; one thread at a time.
  virtual void SetWeights(int64_t expert, ExpertWeights weights) = 0;

  // Says that all weights are there; idempotent. Not concurrently with Forward.
  virtual absl::Status Prepare() = 0;

  // Of memory that the weights take.
  virtual int64_t bytes() const = 0;

  // y = down(activation(gate(x), up(x))) for every position that is not padding, in their order:
  // writes [P without padding, D] unweighted rows of ReplyDType to `output`. With a row_format the
  // activations are quantised, too, row by row, once they are rounded to the dtype of the request
  // (not at all to F16, which is computed as F32); where one of a row is not finite, the result is
  // NaN. The batch has passed
  // ValidateBatch. FAILED_PRECONDITION before Prepare; CANCELLED when batch.stop said so.
  virtual absl::Status Forward(const ExpertBatch& batch, void* output) const = 0;
};

// Checks that a batch fits together and to the layer: rank, width and dtype of rows, sizes, ranges
// of experts and gather. INVALID_ARGUMENT naming the field, the expected and the given value.
absl::Status ValidateBatch(const ExpertBatch& batch, int64_t hidden_size,
                           int64_t num_local_experts);

// Rows of an expert's gate_up: 2 F, or F where there is no gate.
int64_t GateUpRows(const ExpertDescriptor& descriptor);

// INVALID_ARGUMENT, naming it, for what is no expert: weights in another format than the rows, a
// gate that does not fit the activation, a limit that is not positive where the activation has one,
// factors that are not finite.
absl::Status CheckComputed(const ExpertDescriptor& descriptor);

// INVALID_ARGUMENT naming the tensor of `weights` that does not fit the descriptor.
absl::Status CheckWeights(const ExpertDescriptor& descriptor, const ExpertWeights& weights);

}  // namespace expertmesh
