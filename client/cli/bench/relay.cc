#include "client/cli/bench/relay.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/executor.h"
#include "common/rpc/channel.h"
#include "common/rpc/process.h"
#include "common/rpc/status.h"
#include "common/status.h"
#include "expertmesh/v1/expert.grpc.pb.h"
#include "expertmesh/v1/moe.grpc.pb.h"

namespace expertmesh {
namespace {

using grpc::ByteBuffer;
using RawStub = grpc::TemplatedGenericStub<ByteBuffer, ByteBuffer>;

constexpr char kForward[] = "/expertmesh.v1.MoeService/Forward";
constexpr char kDispatch[] = "/expertmesh.v1.ExpertService/Dispatch";
constexpr size_t kServers = 2;
constexpr absl::Duration kCallTimeout = absl::Seconds(30);

// A place in the slices of a message.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) {}

  // Copies the next bytes to `destination`, or only skips them where it is null. False when there
  // are not as many.
  bool Take(size_t bytes, void* destination) {
    auto* out = static_cast<std::byte*>(destination);
    while (bytes > 0) {
      if (!SkipEmpty()) return false;
      const size_t count = std::min(bytes, slices_[slice_].size() - offset_);
      if (out != nullptr) {
        std::memcpy(out, slices_[slice_].begin() + offset_, count);
        out += count;
      }
      offset_ += count;
      bytes -= count;
    }
    return true;
  }

  // The next bytes where they are, or null when they lie in more than one slice.
  const std::byte* InPlace(size_t bytes) {
    if (!SkipEmpty() || slices_[slice_].size() - offset_ < bytes) return nullptr;
    const auto* data = reinterpret_cast<const std::byte*>(slices_[slice_].begin()) + offset_;
    offset_ += bytes;
    return data;
  }

  // Everything that is left, sharing the memory.
  void AppendRest(std::vector<grpc::Slice>* out) const {
    size_t offset = offset_;
    for (size_t i = slice_; i < slices_.size(); ++i, offset = 0) {
      if (offset < slices_[i].size()) out->push_back(slices_[i].sub(offset, slices_[i].size()));
    }
  }

 private:
  bool SkipEmpty() {
    while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
    return slice_ < slices_.size();
  }

  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
};

// A message whose rows are read in place, but for those that lie in two slices.
struct Message {
  RelayHeader header;
  std::vector<grpc::Slice> slices;
  std::vector<const std::byte*> rows;
  std::deque<std::vector<std::byte>> copies;

  // Reads the header and finds `rows_per_token` rows a token.
  absl::Status Read(const ByteBuffer& buffer, int64_t rows_per_token) {
    const absl::Status malformed = absl::InternalError("malformed message in the relay");
    if (!buffer.Dump(&slices).ok()) return malformed;
    Cursor cursor(slices);
    if (!cursor.Take(sizeof(header), &header) || !cursor.Take(header.extra_bytes, nullptr)) {
      return malformed;
    }
    const size_t row_bytes = header.hidden_size * sizeof(uint16_t);
    for (int64_t i = 0; i < header.tokens * rows_per_token; ++i) {
      const std::byte* row = cursor.InPlace(row_bytes);
      if (row == nullptr) {
        row = copies.emplace_back(row_bytes).data();
        if (!cursor.Take(row_bytes, copies.back().data())) return malformed;
      }
      rows.push_back(row);
    }
    return absl::OkStatus();
  }
};

// Header and extra bytes in one slice, then rows.
ByteBuffer MakeMessage(RelayHeader header, int64_t extra_bytes, std::vector<grpc::Slice> rows) {
  header.extra_bytes = static_cast<int32_t>(extra_bytes);
  std::vector<std::byte> head(sizeof(header) + extra_bytes);
  std::memcpy(head.data(), &header, sizeof(header));
  std::vector<grpc::Slice> slices = {grpc::Slice(head.data(), head.size())};
  slices.insert(slices.end(), rows.begin(), rows.end());
  return ByteBuffer(slices.data(), slices.size());
}

// A slice that keeps the tensor alive.
grpc::Slice Share(const Tensor& tensor) {
  auto* kept = new Tensor(tensor);
  return grpc::Slice(
      kept->data(), kept->num_bytes(), [](void* p) { delete static_cast<Tensor*>(p); }, kept);
}

// Reads a row as a kernel would: every cache line.
void Touch(const std::byte* row, size_t bytes) {
  std::byte sum{0};
  for (size_t i = 0; i < bytes; i += 64) sum ^= row[i];
  asm volatile("" : : "r"(static_cast<int>(sum)));
}

// One token's rows, weighed alike and added in fp32, rounded once.
__attribute__((target("avx2,fma"))) void AddRows(const std::byte* const* rows, int32_t top_k,
                                                 int64_t hidden_size, uint16_t* output) {
  const float weight = 1.0f / static_cast<float>(top_k);
  for (int64_t begin = 0; begin < hidden_size; begin += kRelayBlock) {
    float sum[kRelayBlock] = {};
    for (int32_t k = 0; k < top_k; ++k) {
      uint16_t row[kRelayBlock];
      std::memcpy(row, rows[k] + begin * sizeof(uint16_t), sizeof(row));
      for (int64_t i = 0; i < kRelayBlock; ++i) {
        sum[i] = std::fma(weight, FloatFromBF16(row[i]), sum[i]);
      }
    }
    for (int64_t i = 0; i < kRelayBlock; ++i) output[begin + i] = BF16FromFloat(sum[i]);
  }
}

// The compute thread's work: reads every row once, writes every row of the answer.
absl::StatusOr<ByteBuffer> Compute(const ByteBuffer& request) {
  Message message;
  RETURN_IF_ERROR(message.Read(request, /*rows_per_token=*/1));
  const RelayHeader& header = message.header;
  for (const std::byte* row : message.rows) Touch(row, header.hidden_size * sizeof(uint16_t));
  Tensor rows(DType::kBF16, {header.tokens * header.top_k / int64_t{kServers}, header.hidden_size});
  std::memset(rows.data(), kRelayFill, rows.num_bytes());
  return MakeMessage(header, 0, {Share(rows)});
}

// One stream of the router; lives as long as the process.
class ServerStream final : public grpc::ServerBidiReactor<ByteBuffer, ByteBuffer> {
 public:
  explicit ServerStream(Executor* executor) : executor_(executor) {
    StartSendInitialMetadata();
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    auto request = std::make_shared<ByteBuffer>();
    request->Swap(&incoming_);
    const bool queued = executor_->TryRun([this, request] {
      absl::StatusOr<ByteBuffer> answer = Compute(*request);
      absl::MutexLock lock(&mutex_);
      outgoing_.push_back(answer.ok() ? *std::move(answer) : ByteBuffer());
      if (outgoing_.size() == 1) StartWrite(&outgoing_.front());
    });
    (void)queued;  // one call at a time
    StartRead(&incoming_);
  }

  void OnWriteDone(bool) override {
    absl::MutexLock lock(&mutex_);
    outgoing_.pop_front();
    if (!outgoing_.empty()) StartWrite(&outgoing_.front());
  }

  void OnDone() override { delete this; }

 private:
  Executor* const executor_;
  ByteBuffer incoming_;
  absl::Mutex mutex_;
  std::deque<ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
};

class RelayServer final
    : public v1::ExpertService::WithRawCallbackMethod_Dispatch<v1::ExpertService::Service> {
 public:
  grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* Dispatch(grpc::CallbackServerContext*) override {
    return new ServerStream(&executor_);
  }

 private:
  Executor executor_{"relay", /*max_threads=*/1, /*max_queued=*/16};
};

// The router's side of the stream to one server; lives as long as the process.
class ClientStream final : public grpc::ClientBidiReactor<ByteBuffer, ByteBuffer> {
 public:
  ClientStream(std::shared_ptr<grpc::Channel> channel, std::function<void(ByteBuffer)> on_reply)
      : stub_(std::move(channel)), on_reply_(std::move(on_reply)) {
    stub_.PrepareBidiStreamingCall(&context_, kDispatch, {}, this);
    context_.set_wait_for_ready(true);
    AddHold();  // for writes, which start outside reactions
    StartRead(&incoming_);
    StartCall();
  }

  void Write(ByteBuffer buffer) {
    absl::MutexLock lock(&mutex_);
    outgoing_.push_back(std::move(buffer));
    if (outgoing_.size() == 1) StartWrite(&outgoing_.front());
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      std::fprintf(stderr, "relay: a server is gone\n");
      std::_Exit(1);
    }
    ByteBuffer reply;
    reply.Swap(&incoming_);
    StartRead(&incoming_);
    on_reply_(std::move(reply));
  }

  void OnWriteDone(bool) override {
    absl::MutexLock lock(&mutex_);
    outgoing_.pop_front();
    if (!outgoing_.empty()) StartWrite(&outgoing_.front());
  }

 private:
  RawStub stub_;
  grpc::ClientContext context_;
  const std::function<void(ByteBuffer)> on_reply_;
  ByteBuffer incoming_;
  absl::Mutex mutex_;
  std::deque<ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
};

class RelayRouter final
    : public v1::MoeService::WithRawCallbackMethod_Forward<v1::MoeService::Service> {
 public:
  absl::Status Connect(const std::string& servers) {
    const std::vector<std::string> addresses = absl::StrSplit(servers, ',');
    if (addresses.size() != kServers) {
      return absl::InvalidArgumentError(
          absl::StrCat("servers: expected two addresses, got \"", servers, "\""));
    }
    for (size_t i = 0; i < kServers; ++i) {
      ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, MakeChannel(addresses[i]));
      streams_[i] = std::make_unique<ClientStream>(
          std::move(channel), [this, i](ByteBuffer reply) { OnReply(i, std::move(reply)); });
    }
    return absl::OkStatus();
  }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context, const ByteBuffer* request,
                                    ByteBuffer* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    RelayHeader header;
    std::vector<grpc::Slice> slices, rows;
    Cursor cursor(slices);
    if (!request->Dump(&slices).ok() || !cursor.Take(sizeof(header), &header) ||
        !cursor.Take(header.extra_bytes, nullptr)) {
      reactor->Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "malformed message"));
      return reactor;
    }
    cursor.AppendRest(&rows);
    {
      absl::MutexLock lock(&mutex_);
      call_ = {header, reactor, response, {}};
      missing_ = kServers;
    }
    // As the gather indices of the real thing: four bytes a row of the answer.
    const int64_t indices = header.tokens * header.top_k / int64_t{kServers} * 4;
    for (auto& stream : streams_) stream->Write(MakeMessage(header, indices, rows));
    return reactor;
  }

 private:
  struct Call {
    RelayHeader header;
    grpc::ServerUnaryReactor* reactor = nullptr;
    ByteBuffer* response = nullptr;
    std::array<ByteBuffer, kServers> replies;
  };

  void OnReply(size_t server, ByteBuffer reply) {
    Call call;
    {
      absl::MutexLock lock(&mutex_);
      call_.replies[server].Swap(&reply);
      if (--missing_ > 0) return;
      call = std::move(call_);
    }
    call.reactor->Finish(ToGrpcStatus(Combine(call)));
  }

  // The last reply's thread adds the rows up.
  static absl::Status Combine(Call& call) {
    const RelayHeader& header = call.header;
    const int64_t per_server = header.top_k / int64_t{kServers};
    std::array<Message, kServers> messages;
    for (size_t s = 0; s < kServers; ++s) {
      RETURN_IF_ERROR(messages[s].Read(call.replies[s], per_server));
    }
    Tensor output(DType::kBF16, {header.tokens, header.hidden_size});
    // Rows come back grouped by expert, not by token: a stride stands for that.
    const int64_t rows = header.tokens * per_server;
    const int64_t stride = rows % 7 == 0 ? 1 : 7;
    std::vector<const std::byte*> slots(header.top_k);
    for (int64_t t = 0, row = 0; t < header.tokens; ++t) {
      for (int64_t k = 0; k < per_server; ++k, row = (row + stride) % rows) {
        for (size_t s = 0; s < kServers; ++s) slots[s * per_server + k] = messages[s].rows[row];
      }
      AddRows(slots.data(), header.top_k, header.hidden_size,
              output.as<uint16_t>() + t * header.hidden_size);
    }
    // As topk_ids and topk_weights.
    *call.response = MakeMessage(header, header.tokens * header.top_k * 8, {Share(output)});
    return absl::OkStatus();
  }

  std::array<std::unique_ptr<ClientStream>, kServers> streams_;
  absl::Mutex mutex_;
  Call call_ ABSL_GUARDED_BY(mutex_);
  size_t missing_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Client final : public RelayClient {
 public:
  explicit Client(std::shared_ptr<grpc::Channel> channel) : stub_(std::move(channel)) {}

  absl::StatusOr<Tensor> Forward(const Tensor& hidden_states, int32_t top_k) override {
    const RelayHeader header = {hidden_states.dim(0), hidden_states.dim(1), top_k, 0};
    const ByteBuffer request = MakeMessage(header, 0, {Share(hidden_states)});
    ByteBuffer response;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
    context.set_wait_for_ready(true);
    grpc::Status status;
    absl::Notification done;
    stub_.UnaryCall(&context, kForward, {}, &request, &response, [&](grpc::Status result) {
      status = std::move(result);
      done.Notify();
    });
    done.WaitForNotification();
    RETURN_IF_ERROR(FromGrpcStatus(status));
    std::vector<grpc::Slice> slices;
    Cursor cursor(slices);
    RelayHeader answer;
    Tensor output(DType::kBF16, hidden_states.shape());
    if (!response.Dump(&slices).ok() || !cursor.Take(sizeof(answer), &answer) ||
        !cursor.Take(answer.extra_bytes, nullptr) ||
        !cursor.Take(output.num_bytes(), output.data())) {
      return absl::InternalError("malformed message in the relay");
    }
    return output;
  }

 private:
  RawStub stub_;
};

// Says where `service` listens, and serves until SIGTERM.
absl::Status Serve(grpc::Service* service, StopSignals& stop) {
  ASSIGN_OR_RETURN(const ListeningServer server, StartServer("127.0.0.1:0", {service}));
  std::printf("listening %s\n", server.address.c_str());
  std::fflush(stdout);
  stop.Ready();
  std::_Exit(stop.Wait());  // streams are open: nothing to take down in order
}

}  // namespace

absl::Status RunRelayServer() {
  StopSignals stop;
  RelayServer service;
  return Serve(&service, stop);
}

absl::Status RunRelayRouter(const std::string& servers) {
  StopSignals stop;
  RelayRouter service;
  RETURN_IF_ERROR(service.Connect(servers));
  return Serve(&service, stop);
}

absl::StatusOr<std::unique_ptr<RelayClient>> RelayClient::Create(const std::string& router) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, MakeChannel(router));
  return std::make_unique<Client>(std::move(channel));
}

}  // namespace expertmesh
