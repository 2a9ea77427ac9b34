#include "expert_server/service/slice.h"

#include "absl/time/clock.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// Left for the header of a message whose rows fill the limit.
constexpr int64_t kHeaderBytes = 4096;

}  // namespace

absl::StatusOr<Tensor> ComputeSlice(const ExpertStore& store, const Slice& slice,
                                    int64_t max_message_bytes, const std::function<bool()>& stop) {
  if (slice.header.phase() != v1::PHASE_FORWARD) {
    return absl::UnimplementedError(absl::StrCat("phase: only PHASE_FORWARD is computed, got ",
                                                 static_cast<int>(slice.header.phase())));
  }
  // Before the reply is allocated: its size is what the sender says, not what it sent.
  if (slice.rows.shape().size() == 2) {
    const int64_t width = slice.rows.dim(1);  // anything, where there are no rows
    const int64_t most =
        (max_message_bytes - kHeaderBytes) / BytesOf(ReplyDType(slice.rows.dtype()));
    int64_t pairs = 0;  // padding is not answered
    for (const int32_t row : slice.header.gather()) pairs += row >= 0;
    if (width > 0 && pairs > most / width) {
      return absl::ResourceExhaustedError(absl::StrCat("gather: ", pairs, " rows of ", width,
                                                       " elements do not fit in a reply of ",
                                                       max_message_bytes, " bytes"));
    }
  }
  absl::StatusOr<Tensor> rows =
      store.Forward(slice.header.layer(), slice.header.expert_ids(), slice.header.m_sizes(),
                    slice.header.gather(), slice.header.input_weights(), slice.rows,
                    [&] { return stop() || absl::Now() >= slice.deadline; });
  if (absl::IsCancelled(rows.status()) && absl::Now() >= slice.deadline) {
    return absl::DeadlineExceededError("the deadline passed before the slice was computed");
  }
  return rows;
}

}  // namespace expertmesh
