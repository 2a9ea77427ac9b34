// What an expert server does with one slice of a round, once it has been decoded.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/dtype.h"
#include "common/tensor.h"
#include "expert_server/engine/expert_store.h"
#include "expertmesh/v1/expert.pb.h"

namespace expertmesh {

// A slice as it came in.
struct Slice {
  v1::DispatchRequest header;
  Tensor rows;  // [R, D] if the sender is right; codes where the header has a row_format
  absl::Time deadline = absl::InfiniteFuture();
};

// Dtype of the answer's rows, and how many there are: padding is not answered.
DType ReplyDTypeOf(const Slice& slice);
int64_t NumReplyRows(const Slice& slice);

// The rows of the answer, [P without padding, D]. Believes nothing that the slice says; `stop` is
// asked every few positions. RESOURCE_EXHAUSTED if the answer would be longer than
// max_message_bytes, DEADLINE_EXCEEDED, UNIMPLEMENTED (another phase), or as ExpertStore::Forward.
// Thread-safe.
absl::StatusOr<Tensor> ComputeSlice(const ExpertStore& store, const Slice& slice,
                                    int64_t max_message_bytes, const std::function<bool()>& stop);

}  // namespace expertmesh
