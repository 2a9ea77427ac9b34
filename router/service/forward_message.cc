#include "router/service/forward_message.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// Refuses what the contract reserves for later, by name.
absl::Status CheckSupported(const v1::ForwardRequest& request) {
  const auto refuse = [](const char* field) {
    return absl::UnimplementedError(absl::StrCat(field, ": not supported by this version"));
  };
  if (request.save_for_backward()) return refuse("save_for_backward");
  if (!request.context_id().empty()) return refuse("context_id");
  if (request.has_topk_ids()) return refuse("topk_ids");
  if (request.has_topk_weights()) return refuse("topk_weights");
  if (request.has_input_ids()) return refuse("input_ids");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ForwardCall> DecodeForward(const Router& router, const grpc::ByteBuffer& bytes,
                                          v1::ForwardRequest* request) {
  ForwardCall call;
  RETURN_IF_ERROR(DecodeWithTensor(bytes, "hidden_states", request, &call.hidden_states));
  RETURN_IF_ERROR(CheckSupported(*request));
  const std::string& fingerprint = router.checkpoint().fingerprint();
  if (!request->model_fingerprint().empty() && request->model_fingerprint() != fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat("model_fingerprint: expected ", fingerprint,
                                                      ", got ", request->model_fingerprint()));
  }
  if (const uint64_t epoch = router.membership()->epoch();
      request->placement_epoch() != 0 && request->placement_epoch() != epoch) {
    return absl::FailedPreconditionError(
        absl::StrCat("placement_epoch: expected ", epoch, ", got ", request->placement_epoch()));
  }
  call.layer = request->layer();
  call.first_row = request->first_row();
  return call;
}

grpc::ByteBuffer EncodeForward(const ForwardResult& result, bool with_logits) {
  v1::ForwardResponse response;
  ToProto(result.routing.topk_ids, response.mutable_topk_ids());
  ToProto(result.routing.topk_weights, response.mutable_topk_weights());
  if (with_logits) ToProto(result.routing.logits, response.mutable_router_logits());
  return EncodeWithTensor(response, result.output);
}

}  // namespace expertmesh
