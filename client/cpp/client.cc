#include "client/cpp/client.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"
#include "expertmesh/v1/moe.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace expertmesh {
namespace {

constexpr char kForward[] = "/expertmesh.v1.MoeService/Forward";
// Left for headers of a message whose tensors fill the limit.
constexpr int64_t kHeaderBytes = 4096;

// Copies `part` to rows [begin, ...) of `whole`.
void PutRows(const Tensor& part, int64_t begin, Tensor* whole) {
  if (part.num_bytes() == 0) return;
  const size_t row_bytes = part.num_bytes() / static_cast<size_t>(part.dim(0));
  std::memcpy(whole->data() + begin * row_bytes, part.data(), part.num_bytes());
}

class GrpcClient final : public Client {
 public:
  GrpcClient(std::shared_ptr<grpc::Channel> channel, std::string routers,
             const ClientOptions& options)
      : routers_(std::move(routers)),
        options_(options),
        channel_(std::move(channel)),
        forward_stub_(channel_),
        stub_(v1::MoeService::NewStub(channel_)),
        health_stub_(grpc::health::v1::Health::NewStub(channel_)) {}

  absl::StatusOr<MoeOutput> Forward(int32_t layer, const Tensor& hidden_states) override {
    const absl::Time deadline = absl::Now() + options_.timeout;
    if (!IsActivationDType(hidden_states.dtype())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "hidden_states.dtype: expected F32, BF16 or F16, got ", NameOf(hidden_states.dtype())));
    }
    if (hidden_states.shape().size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat("hidden_states.shape: expected [T, D], got ",
                                                     ShapeToString(hidden_states.shape())));
    }
    const int64_t tokens = hidden_states.dim(0);
    const int64_t row_bytes = hidden_states.dim(1) * BytesOf(hidden_states.dtype());
    if (tokens == 0 || tokens * row_bytes + kHeaderBytes <= options_.max_message_bytes / 2) {
      return ForwardOnce(layer, hidden_states, /*first_row=*/0, deadline);
    }
    // The reply has ids and weights beside the output; half the limit leaves room for any top_k up
    // to D.
    const int64_t rows =
        std::max<int64_t>(1, (options_.max_message_bytes / 2 - kHeaderBytes) / row_bytes);
    MoeOutput whole;
    whole.output = Tensor(hidden_states.dtype(), hidden_states.shape());
    for (int64_t begin = 0; begin < tokens; begin += rows) {
      const int64_t count = std::min(rows, tokens - begin);
      Tensor part(hidden_states.dtype(), {count, hidden_states.dim(1)});
      std::memcpy(part.data(), hidden_states.data() + begin * row_bytes, part.num_bytes());
      ASSIGN_OR_RETURN(const MoeOutput one, ForwardOnce(layer, part, begin, deadline));
      if (begin == 0) {
        whole.topk_ids = Tensor(DType::kI32, {tokens, one.topk_ids.dim(1)});
        whole.topk_weights = Tensor(DType::kF32, {tokens, one.topk_weights.dim(1)});
      }
      if (one.topk_ids.dim(1) != whole.topk_ids.dim(1)) {
        return absl::InternalError(
            "malformed reply of the router: top_k changes from part to part");
      }
      PutRows(one.output, begin, &whole.output);
      PutRows(one.topk_ids, begin, &whole.topk_ids);
      PutRows(one.topk_weights, begin, &whole.topk_weights);
    }
    return whole;
  }

  absl::StatusOr<v1::GetModelResponse> GetModel() override {
    v1::GetModelResponse response;
    grpc::ClientContext context;
    Prepare(&context, absl::Now() + options_.timeout, /*wait_for_ready=*/true);
    RETURN_IF_ERROR(Describe(stub_->GetModel(&context, {}, &response)));
    return response;
  }

  absl::StatusOr<v1::GetClusterResponse> GetCluster() override {
    v1::GetClusterResponse response;
    grpc::ClientContext context;
    Prepare(&context, absl::Now() + options_.timeout, /*wait_for_ready=*/true);
    RETURN_IF_ERROR(Describe(stub_->GetCluster(&context, {}, &response)));
    return response;
  }

  absl::StatusOr<bool> IsServing() override {
    grpc::health::v1::HealthCheckResponse response;
    grpc::ClientContext context;
    Prepare(&context, absl::Now() + options_.timeout, /*wait_for_ready=*/false);
    RETURN_IF_ERROR(Describe(health_stub_->Check(&context, {}, &response)));
    return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  }

 private:
  static void Prepare(grpc::ClientContext* context, absl::Time deadline, bool wait_for_ready) {
    context->set_deadline(absl::ToChronoTime(deadline));
    context->set_wait_for_ready(wait_for_ready);
  }

  // Says so when it was the router that could not be reached.
  absl::Status Describe(const grpc::Status& status) const {
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
        channel_->GetState(false) != GRPC_CHANNEL_READY) {
      return absl::DeadlineExceededError(absl::StrCat("no router could be reached at ", routers_,
                                                      " within ",
                                                      absl::FormatDuration(options_.timeout)));
    }
    return FromGrpcStatus(status);
  }

  absl::StatusOr<MoeOutput> ForwardOnce(int32_t layer, const Tensor& hidden_states,
                                        int64_t first_row, absl::Time deadline) {
    v1::ForwardRequest request;
    request.set_layer(layer);
    request.set_first_row(first_row);
    grpc::ClientContext context;
    Prepare(&context, deadline, /*wait_for_ready=*/true);
    const grpc::ByteBuffer request_bytes = EncodeWithTensor(request, hidden_states);
    grpc::ByteBuffer response_bytes;
    grpc::Status status;
    absl::Notification done;
    forward_stub_.UnaryCall(&context, kForward, {}, &request_bytes, &response_bytes,
                            [&](grpc::Status result) {
                              status = std::move(result);
                              done.Notify();
                            });
    done.WaitForNotification();
    RETURN_IF_ERROR(Describe(status));
    absl::StatusOr<MoeOutput> output = Decode(response_bytes, hidden_states);
    if (!output.ok()) {  // the router's fault, not the caller's
      return absl::InternalError(
          absl::StrCat("malformed reply of the router: ", std::string(output.status().message())));
    }
    return output;
  }

  static absl::StatusOr<MoeOutput> Decode(const grpc::ByteBuffer& bytes,
                                          const Tensor& hidden_states) {
    v1::ForwardResponse response;
    MoeOutput output;
    RETURN_IF_ERROR(DecodeWithTensor(bytes, "output", &response, &output.output));
    ASSIGN_OR_RETURN(output.topk_ids, FromProto(response.topk_ids(), "topk_ids"));
    ASSIGN_OR_RETURN(output.topk_weights, FromProto(response.topk_weights(), "topk_weights"));
    const auto check = [](const char* field, const Tensor& tensor, DType dtype,
                          const std::vector<int64_t>& shape) {
      if (tensor.dtype() == dtype && tensor.shape() == shape) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat(field, ": expected ", NameOf(dtype), " ", ShapeToString(shape), ", got ",
                       NameOf(tensor.dtype()), " ", ShapeToString(tensor.shape())));
    };
    RETURN_IF_ERROR(check("output", output.output, hidden_states.dtype(), hidden_states.shape()));
    const int64_t top_k = output.topk_ids.shape().size() == 2 ? output.topk_ids.dim(1) : 0;
    const std::vector<int64_t> slots = {hidden_states.dim(0), top_k};
    RETURN_IF_ERROR(check("topk_ids", output.topk_ids, DType::kI32, slots));
    RETURN_IF_ERROR(check("topk_weights", output.topk_weights, DType::kF32, slots));
    return output;
  }

  const std::string routers_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> forward_stub_;
  const std::unique_ptr<v1::MoeService::Stub> stub_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_stub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const std::string& routers,
                                                       const ClientOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                   MakeChannel(routers, {.max_message_bytes = options.max_message_bytes}));
  return std::make_unique<GrpcClient>(std::move(channel), routers, options);
}

}  // namespace expertmesh
