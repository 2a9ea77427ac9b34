#include "expert_server/service/slice.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// Left for the header of a message whose rows fill the limit.
constexpr int64_t kHeaderBytes = 4096;

absl::StatusOr<QuantizedFormat> QuantizedFormatOf(v1::RowFormat format) {
  switch (format) {
    case v1::ROW_FORMAT_FP8_ROWWISE:
      return QuantizedFormat::kFp8Rowwise;
    case v1::ROW_FORMAT_FP8_BLOCK128:
      return QuantizedFormat::kFp8Block128;
    case v1::ROW_FORMAT_MXFP8:
      return QuantizedFormat::kMxfp8;
    case v1::ROW_FORMAT_MXFP8_RCEIL:
      return QuantizedFormat::kMxfp8Rceil;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("row_format: expected a format of rows, got ", static_cast<int>(format)));
  }
}

absl::StatusOr<ExpertRows> RowsOf(const Slice& slice) {
  ExpertRows rows(slice.rows);
  if (slice.header.row_format() == v1::ROW_FORMAT_UNSPECIFIED) {
    if (slice.header.has_row_scales()) {
      return absl::InvalidArgumentError("row_scales: expected none without a row_format");
    }
    return rows;
  }
  ASSIGN_OR_RETURN(rows.format, QuantizedFormatOf(slice.header.row_format()));
  ASSIGN_OR_RETURN(rows.dtype, FromProto(slice.header.activation_dtype(), "activation_dtype"));
  ASSIGN_OR_RETURN(rows.scales, FromProto(slice.header.row_scales(), "row_scales"));
  return rows;
}

}  // namespace

DType ReplyDTypeOf(const Slice& slice) {
  if (slice.header.row_format() == v1::ROW_FORMAT_UNSPECIFIED) {
    return ReplyDType(slice.rows.dtype());
  }
  return ReplyDType(slice.header.activation_dtype() == v1::DATA_TYPE_BF16 ? DType::kBF16
                                                                          : DType::kF32);
}

int64_t NumReplyRows(const Slice& slice) {
  const auto& gather = slice.header.gather();
  return std::count_if(gather.begin(), gather.end(), [](int32_t row) { return row >= 0; });
}

absl::StatusOr<Tensor> ComputeSlice(const ExpertStore& store, const Slice& slice,
                                    int64_t max_message_bytes, const std::function<bool()>& stop) {
  if (slice.header.phase() != v1::PHASE_FORWARD) {
    return absl::UnimplementedError(absl::StrCat("phase: only PHASE_FORWARD is computed, got ",
                                                 static_cast<int>(slice.header.phase())));
  }
  // Before the reply is allocated: its size is what the sender says, not what it sent.
  if (slice.rows.shape().size() == 2) {
    const int64_t width = slice.rows.dim(1);  // anything, where there are no rows
    const int64_t most = (max_message_bytes - kHeaderBytes) / BytesOf(ReplyDTypeOf(slice));
    const int64_t pairs = NumReplyRows(slice);
    if (width > 0 && pairs > most / width) {
      return absl::ResourceExhaustedError(absl::StrCat("gather: ", pairs, " rows of ", width,
                                                       " elements do not fit in a reply of ",
                                                       max_message_bytes, " bytes"));
    }
  }
  ASSIGN_OR_RETURN(const ExpertRows given, RowsOf(slice));
  absl::StatusOr<Tensor> rows =
      store.Forward(slice.header.layer(), slice.header.expert_ids(), slice.header.m_sizes(),
                    slice.header.gather(), slice.header.input_weights(), given,
                    [&] { return stop() || absl::Now() >= slice.deadline; });
  if (absl::IsCancelled(rows.status()) && absl::Now() >= slice.deadline) {
    return absl::DeadlineExceededError("the deadline passed before the slice was computed");
  }
  return rows;
}

}  // namespace expertmesh
