// A forward call as it travels: what a router makes of a request's bytes, and the bytes of its
// answer.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "expertmesh/v1/moe.pb.h"
#include "router/dispatch/router.h"

namespace expertmesh {

// The call that a ForwardRequest asks for, without deadline; `*request` gets everything but the
// hidden states. Believes nothing: INVALID_ARGUMENT (no such message), UNIMPLEMENTED naming a field
// that is reserved for later, FAILED_PRECONDITION where it is meant for another model or placement.
absl::StatusOr<ForwardCall> DecodeForward(const Router& router, const grpc::ByteBuffer& bytes,
                                          v1::ForwardRequest* request);

// The ForwardResponse; with the gate's logits where they were asked for.
grpc::ByteBuffer EncodeForward(const ForwardResult& result, bool with_logits);

}  // namespace expertmesh
