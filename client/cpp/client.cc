#include "client/cpp/client.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
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
// Parts of one call that are under way at a time: the router has the next when it has computed one.
constexpr size_t kPartsUnderWay = 2;
// Between calls nobody but gRPC's timer looks, every 5 s, whether the router has answered a ping.
constexpr absl::Duration kPingTimeout = absl::Seconds(12);

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
    const int64_t limit = options_.max_message_bytes - kHeaderBytes;
    if (tokens > 0 && row_bytes > limit) {
      return absl::InvalidArgumentError(
          absl::StrCat("hidden_states: one row needs ", row_bytes + kHeaderBytes,
                       " bytes in a message, max_message_bytes is ", options_.max_message_bytes));
    }
    // The reply has ids and weights beside the output, 8 bytes a slot: half the limit leaves room
    // for as many of them as the row has bytes.
    const int64_t step = std::max<int64_t>(1, limit / 2 / std::max<int64_t>(row_bytes, 1));
    if (tokens <= step) {
      Part only;
      Start(layer, hidden_states, /*first_row=*/0, deadline, &only);
      return Finish(hidden_states, only);
    }
    return ForwardInParts(layer, hidden_states, step, deadline);
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

  // One message of a call. The thread that waits for it does gRPC's work meanwhile: one of gRPC's
  // own would have to wake it.
  struct Part {
    grpc::ClientContext context;
    grpc::ByteBuffer response;
    grpc::Status status;
    grpc::CompletionQueue queue;
    std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> call;

    void Wait() {
      void* tag = nullptr;
      bool ok = false;
      if (call != nullptr) queue.Next(&tag, &ok);
      call.reset();
    }
  };

  // `part` has to stay until it is done.
  void Start(int32_t layer, const Tensor& rows, int64_t first_row, absl::Time deadline,
             Part* part) {
    v1::ForwardRequest header;
    header.set_layer(layer);
    header.set_first_row(first_row);
    Prepare(&part->context, deadline, /*wait_for_ready=*/true);
    part->call = forward_stub_.PrepareUnaryCall(&part->context, kForward,
                                                EncodeWithTensor(header, rows), &part->queue);
    part->call->StartCall();
    part->call->Finish(&part->response, &part->status, /*tag=*/nullptr);
  }

  // Waits for the reply to `rows`.
  absl::StatusOr<MoeOutput> Finish(const Tensor& rows, Part& part) const {
    part.Wait();
    RETURN_IF_ERROR(Describe(part.status));
    absl::StatusOr<MoeOutput> output = Decode(part.response, rows);
    if (!output.ok()) {  // the router's fault, not the caller's
      return absl::InternalError(
          absl::StrCat("malformed reply of the router: ", std::string(output.status().message())));
    }
    return output;
  }

  // Sends `step` rows at a time. The first error in the order of the rows is that of the call; the
  // parts after it are cancelled.
  absl::StatusOr<MoeOutput> ForwardInParts(int32_t layer, const Tensor& hidden_states, int64_t step,
                                           absl::Time deadline) {
    struct UnderWay {
      int64_t begin;
      Tensor rows;
      Part part;
    };
    std::deque<std::unique_ptr<UnderWay>> under_way;
    const auto cancel_rest = absl::MakeCleanup([&under_way] {
      for (const auto& one : under_way) one->part.context.TryCancel();
      for (const auto& one : under_way) one->part.Wait();
    });
    const int64_t tokens = hidden_states.dim(0);
    const int64_t row_bytes = hidden_states.dim(1) * BytesOf(hidden_states.dtype());
    MoeOutput whole;
    whole.output = Tensor(hidden_states.dtype(), hidden_states.shape());
    for (int64_t next = 0; next < tokens || !under_way.empty();) {
      if (next < tokens && under_way.size() < kPartsUnderWay) {
        const int64_t count = std::min(step, tokens - next);
        auto one = std::make_unique<UnderWay>();
        one->begin = next;
        one->rows = Tensor(hidden_states.dtype(), {count, hidden_states.dim(1)});
        std::memcpy(one->rows.data(), hidden_states.data() + next * row_bytes,
                    one->rows.num_bytes());
        under_way.push_back(std::move(one));
        Start(layer, under_way.back()->rows, next, deadline, &under_way.back()->part);
        next += count;
        continue;
      }
      UnderWay& first = *under_way.front();
      ASSIGN_OR_RETURN(const MoeOutput one, Finish(first.rows, first.part));
      if (first.begin == 0) {
        whole.topk_ids = Tensor(DType::kI32, {tokens, one.topk_ids.dim(1)});
        whole.topk_weights = Tensor(DType::kF32, {tokens, one.topk_weights.dim(1)});
      }
      if (one.topk_ids.dim(1) != whole.topk_ids.dim(1)) {
        return absl::InternalError(
            "malformed reply of the router: top_k changes from part to part");
      }
      PutRows(one.output, first.begin, &whole.output);
      PutRows(one.topk_ids, first.begin, &whole.topk_ids);
      PutRows(one.topk_weights, first.begin, &whole.topk_weights);
      under_way.pop_front();
    }
    return whole;
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
                   MakeChannel(routers, {.max_message_bytes = options.max_message_bytes,
                                         .ping_timeout = kPingTimeout}));
  return std::make_unique<GrpcClient>(std::move(channel), routers, options);
}

}  // namespace expertmesh
