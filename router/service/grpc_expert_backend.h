// An expert server over one long-lived Dispatch stream.
#pragma once

#include <grpcpp/generic/generic_stub.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_identity.h"
#include "expertmesh/v1/expert.pb.h"
#include "router/dispatch/expert_backend.h"

namespace expertmesh {

// What a server's reply comes to: its rows, whatever they are, or why there are none. `decoded` is
// what DecodeWithTensor said of it.
absl::StatusOr<Tensor> ReplyRows(const absl::Status& decoded, const v1::DispatchResponse& header,
                                 Tensor rows);

// Connects to `address`, where `expected` must answer. Exactly one of the two is called first, on
// gRPC's threads: `on_ready` when the server has accepted the stream; `on_gone`, once, when the
// stream has ended for whatever reason. Until ready and after gone, Dispatch answers UNAVAILABLE.
// Slices under way when the stream breaks are answered UNAVAILABLE at once. The stream stays open
// until Close.
class GrpcExpertBackend : public ExpertBackend {
 public:
  struct Events {
    std::function<void()> on_ready;
    std::function<void(const absl::Status&)> on_gone;  // with the reason
  };
  static absl::StatusOr<std::shared_ptr<GrpcExpertBackend>> Connect(const std::string& address,
                                                                    const ServerIdentity& expected,
                                                                    const ChannelOptions& options,
                                                                    Events events);
  ~GrpcExpertBackend() override;

  // Slices wait here while the server does not read, until they are cancelled.
  uint64_t Dispatch(ExpertSlice slice, Done done) override;
  void Cancel(uint64_t id) override;

  // Takes no more slices, lets those under way finish, then ends the stream. Idempotent; does not
  // block.
  void Close();

 private:
  class Stream;
  explicit GrpcExpertBackend(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}
  const std::shared_ptr<Stream> stream_;
};

}  // namespace expertmesh
