#include "expert_server/engine/experts.h"

#include "common/status.h"

namespace expertmesh {

absl::Status ValidateBatch(const ExpertBatch& batch, int64_t hidden_size,
                           int64_t num_local_experts) {
  if (!IsActivationDType(batch.rows.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows.dtype: expected F32, BF16 or F16, got ", NameOf(batch.rows.dtype)));
  }
  if (batch.rows.shape.size() != 2 || batch.rows.shape[1] != hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat("rows.shape: expected [R, ", hidden_size,
                                                   "], got ", ShapeToString(batch.rows.shape)));
  }
  if (batch.experts.size() != batch.m_sizes.size()) {
    return absl::InvalidArgumentError(absl::StrCat("m_sizes: expected one entry for each of ",
                                                   batch.experts.size(), " experts, got ",
                                                   batch.m_sizes.size()));
  }
  for (const int32_t expert : batch.experts) {
    if (expert < 0 || expert >= num_local_experts) {
      return absl::InvalidArgumentError(absl::StrCat("experts: expected local indices in [0, ",
                                                     num_local_experts, "), got ", expert));
    }
  }
  int64_t positions = 0;
  for (const int64_t size : batch.m_sizes) {
    if (size < 0 || __builtin_add_overflow(positions, size, &positions)) {
      return absl::InvalidArgumentError(
          absl::StrCat("m_sizes: expected counts of at least 0 with a 63-bit sum, got ", size));
    }
  }
  if (positions != static_cast<int64_t>(batch.gather.size())) {
    return absl::InvalidArgumentError(absl::StrCat("gather: expected ", positions,
                                                   " entries (the sum of m_sizes), got ",
                                                   batch.gather.size()));
  }
  for (const int32_t row : batch.gather) {
    if (row < -1 || row >= batch.rows.shape[0]) {
      return absl::InvalidArgumentError(
          absl::StrCat("gather: expected -1 or a row below ", batch.rows.shape[0], ", got ", row));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckComputed(const ExpertDescriptor& descriptor) {
  if (descriptor.activation != Activation::kSiluGlu || !descriptor.gated) {
    return absl::UnimplementedError("experts: only silu-gated linear units are computed");
  }
  if (descriptor.has_bias) return absl::UnimplementedError("experts: biases are not computed");
  return absl::OkStatus();
}

}  // namespace expertmesh
