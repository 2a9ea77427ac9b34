// The one place where absl::Status and grpc::Status meet. Their codes are the same numbers.
#pragma once

#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertmesh {

// RESOURCE_EXHAUSTED, for a queue that is full: `what`, and when to try again, in the text and as a
// google.rpc.RetryInfo in the payload.
absl::Status RetryLater(const std::string& what, absl::Duration after);

// When to try again, where the status says so.
std::optional<absl::Duration> RetryAfter(const absl::Status& status);

// Messages are cut after 2 KiB. Payloads travel as the details of a google.rpc.Status
// (grpc-status-details-bin), where standard clients look for them.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace expertmesh
