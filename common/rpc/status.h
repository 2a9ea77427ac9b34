// The one place where absl::Status and grpc::Status meet. Their codes are the same numbers.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace expertmesh {

// Messages are cut after 2 KiB.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace expertmesh
