#include "expert_server/engine/experts.h"

#include <cmath>
#include <utility>

#include "common/numerics/activation.h"
#include "common/status.h"

namespace expertmesh {

absl::Status ValidateBatch(const ExpertBatch& batch, int64_t hidden_size,
                           int64_t num_local_experts) {
  if (!batch.row_format && !IsActivationDType(batch.rows.dtype)) {
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

int64_t GateUpRows(const ExpertDescriptor& descriptor) {
  return (descriptor.gated ? 2 : 1) * descriptor.intermediate_size;
}

absl::Status CheckComputed(const ExpertDescriptor& descriptor) {
  const bool odd = descriptor.hidden_size % 2 == 1 || descriptor.intermediate_size % 2 == 1;
  if (descriptor.weight_format == WeightFormat::kMxfp4 && odd) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: expected even sizes for weights in mxfp4, got ",
                     descriptor.hidden_size, " and ", descriptor.intermediate_size));
  }
  if (descriptor.row_format && descriptor.weight_format != WeightFormatOf(*descriptor.row_format)) {
    return absl::InvalidArgumentError(absl::StrCat("experts: expected weights in ",
                                                   NameOf(WeightFormatOf(*descriptor.row_format)),
                                                   " for rows in ", NameOf(*descriptor.row_format),
                                                   ", got ", NameOf(descriptor.weight_format)));
  }
  if (descriptor.gated != IsGated(descriptor.activation)) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: gated: expected ", IsGated(descriptor.activation) ? "true" : "false",
                     " for this activation, got ", descriptor.gated ? "true" : "false"));
  }
  if (HasLimit(descriptor.activation) && !(descriptor.activation_limit > 0.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: activation_limit: expected more than 0 for this activation, got ",
                     descriptor.activation_limit));
  }
  if (!std::isfinite(descriptor.activation_limit) || !std::isfinite(descriptor.activation_alpha)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "experts: activation_alpha and activation_limit: expected finite numbers, got ",
        descriptor.activation_alpha, " and ", descriptor.activation_limit));
  }
  return absl::OkStatus();
}

absl::Status CheckWeights(const ExpertDescriptor& descriptor, const ExpertWeights& weights) {
  const auto check = [](const char* name, const Tensor& tensor, DType dtype,
                        const std::vector<int64_t>& shape) {
    if (tensor.dtype() == dtype && tensor.shape() == shape) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": expected ", NameOf(dtype), " ", ShapeToString(shape), ", got ",
                     NameOf(tensor.dtype()), " ", ShapeToString(tensor.shape())));
  };
  const int64_t rows = GateUpRows(descriptor);
  const int64_t hidden_size = descriptor.hidden_size;
  const auto check_matrix = [&](const char* name, const Tensor& values, const char* scales_name,
                                const Tensor& scales, int64_t n, int64_t k) -> absl::Status {
    const WeightFormat format = descriptor.weight_format;
    const int64_t width = format == WeightFormat::kMxfp4 ? k / 2 : k;
    RETURN_IF_ERROR(check(name, values, StorageDType(descriptor.weight_dtype), {n, width}));
    if (format == WeightFormat::kPlain) return absl::OkStatus();
    return check(scales_name, scales, ScaleDType(format), {n, ScalesPerRow(format, k)});
  };
  RETURN_IF_ERROR(check_matrix("gate_up", weights.gate_up, "gate_up_scales", weights.gate_up_scales,
                               rows, hidden_size));
  RETURN_IF_ERROR(check_matrix("down", weights.down, "down_scales", weights.down_scales,
                               hidden_size, descriptor.intermediate_size));
  if (!descriptor.has_bias) return absl::OkStatus();
  RETURN_IF_ERROR(check("gate_up_bias", weights.gate_up_bias, DType::kF32, {rows}));
  return check("down_bias", weights.down_bias, DType::kF32, {hidden_size});
}

}  // namespace expertmesh
