#include "common/rpc/status.h"

#include <string>

namespace expertmesh {

namespace {

// Status messages travel as metadata, which peers limit to 8 KiB in all: a longer one would lose
// the status itself.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  std::string message(status.message());
  if (message.size() > kMaxMessageBytes) message = message.substr(0, kMaxMessageBytes) + "...";
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace expertmesh
