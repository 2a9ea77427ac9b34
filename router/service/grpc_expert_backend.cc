#include "router/service/grpc_expert_backend.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/executor.h"
#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr char kMethod[] = "/expertmesh.v1.ExpertService/Dispatch";

v1::RowFormat ToProto(QuantizedFormat format) {
  switch (format) {
    case QuantizedFormat::kFp8Rowwise:
      return v1::ROW_FORMAT_FP8_ROWWISE;
    case QuantizedFormat::kFp8Block128:
      return v1::ROW_FORMAT_FP8_BLOCK128;
    case QuantizedFormat::kMxfp8:
      return v1::ROW_FORMAT_MXFP8;
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return v1::ROW_FORMAT_MXFP8_RCEIL;
}

v1::DispatchRequest Header(const ExpertSlice& slice, uint64_t round_id) {
  v1::DispatchRequest header;
  header.set_round_id(round_id);
  header.set_layer(slice.layer);
  header.set_phase(v1::PHASE_FORWARD);
  header.mutable_expert_ids()->Add(slice.expert_ids.begin(), slice.expert_ids.end());
  header.mutable_m_sizes()->Add(slice.m_sizes.begin(), slice.m_sizes.end());
  header.mutable_gather()->Add(slice.gather.begin(), slice.gather.end());
  header.mutable_input_weights()->Add(slice.input_weights.begin(), slice.input_weights.end());
  header.set_placement_epoch(slice.placement_epoch);
  if (slice.rows.format) {
    header.set_row_format(ToProto(*slice.rows.format));
    header.set_activation_dtype(ToProto(slice.rows.dtype));
    ToProto(slice.rows.scales, header.mutable_row_scales());
  }
  if (slice.deadline != absl::InfiniteFuture()) {
    header.set_timeout_us(
        std::max<int64_t>(1, absl::ToInt64Microseconds(slice.deadline - absl::Now())));
  }
  return header;
}

// The channel of a stream and what refers to it.
struct Connection {
  explicit Connection(std::shared_ptr<grpc::Channel> channel) : stub(std::move(channel)) {}
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub;
  grpc::ClientContext context;
};

// Destroys a connection on a thread that is not gRPC's: the last channel of a process takes gRPC's
// callback threads with it, and must not be dropped by one of them (as happens when a stream's last
// reference goes in OnDone).
void Release(std::unique_ptr<Connection> connection) {
  static Executor* const releaser = new Executor(
      "release", 1, std::numeric_limits<size_t>::max());  // lives as long as the process
  Connection* const dropped = connection.release();
  const bool queued = releaser->TryRun([dropped] { delete dropped; });
  (void)queued;  // the queue has no limit; if the system has no thread to spare, it is leaked
}

}  // namespace

// Shared by the backend and gRPC (until OnDone).
class GrpcExpertBackend::Stream final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<Stream> {
 public:
  Stream(std::unique_ptr<Connection> connection, ServerIdentity expected, Events events)
      : connection_(std::move(connection)),
        expected_(std::move(expected)),
        events_(std::move(events)) {}
  ~Stream() override { Release(std::move(connection_)); }

  void Start() {
    absl::MutexLock lock(&mutex_);
    self_ = shared_from_this();
    connection_->stub.PrepareBidiStreamingCall(&connection_->context, kMethod, {}, this);
    StartRead(&incoming_);
    AddHold();  // for writes, which start outside reactions
    StartCall();
  }

  uint64_t Dispatch(ExpertSlice slice, Done done) {
    absl::ReleasableMutexLock lock(&mutex_);
    const uint64_t round_id = next_round_++;
    if (!ready_ || closing_ || ended_) {
      lock.Release();
      std::move(done)(absl::UnavailableError("the server is not connected"));
      return round_id;
    }
    pending_.emplace(round_id, std::move(done));
    outgoing_.push_back({round_id, std::move(slice)});
    WriteNext();
    return round_id;
  }

  void Cancel(uint64_t round_id) {
    Done done;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = pending_.find(round_id);
      if (found == pending_.end()) return;
      done = std::move(found->second);
      pending_.erase(found);
      const auto unsent =
          std::find_if(outgoing_.begin(), outgoing_.end(),
                       [round_id](const Outgoing& one) { return one.round_id == round_id; });
      if (unsent != outgoing_.end()) {
        outgoing_.erase(unsent);
      } else if (!ended_ && !half_closed_) {
        outgoing_.push_front({round_id, std::nullopt});  // before what is still to be computed
        WriteNext();
      }
      MaybeHalfClose();
    }
    std::move(done)(absl::CancelledError("nobody waits for the slice any more"));
  }

  void Close() {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (!ready_) connection_->context.TryCancel();
    MaybeHalfClose();
  }

  void OnReadInitialMetadataDone(bool ok) override {
    if (!ok) return;
    {
      absl::MutexLock lock(&mutex_);
      refused_ = CheckIdentity();
      if (!refused_.ok()) {
        connection_->context.TryCancel();
        return;
      }
      ready_ = true;
      MaybeHalfClose();
    }
    events_.on_ready();
  }

  void OnReadDone(bool ok) override {
    grpc::ByteBuffer bytes;
    {
      absl::MutexLock lock(&mutex_);
      if (!ok) {
        ended_ = true;
        ReleaseHold();
        return;
      }
      bytes.Swap(&incoming_);
    }
    v1::DispatchResponse header;
    Tensor rows;
    absl::Status status;
    try {
      status = DecodeWithTensor(bytes, "rows", &header, &rows);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("the router is out of memory for the server's reply");
      header.set_round_id(VarintField(bytes, v1::DispatchResponse::kRoundIdFieldNumber));
    }
    Done done;
    {
      absl::MutexLock lock(&mutex_);
      // Nobody could tell which slice such a reply belongs to.
      if (header.round_id() == 0) connection_->context.TryCancel();
      const auto found = pending_.find(header.round_id());
      if (found != pending_.end()) {
        done = std::move(found->second);
        pending_.erase(found);
      }
      MaybeHalfClose();
      StartRead(&incoming_);  // others are not to wait for what this one sets off
    }
    if (done) std::move(done)(ReplyRows(status, header, std::move(rows)));
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    written_.Clear();
    if (!ok) {
      ended_ = true;
      outgoing_.clear();
      return;
    }
    WriteNext();
    MaybeHalfClose();
  }

  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<Stream> self;  // until the end of this function
    std::map<uint64_t, Done> pending;
    {
      absl::MutexLock lock(&mutex_);
      self = std::move(self_);
      ended_ = true;
      pending.swap(pending_);
    }
    absl::Status reason = absl::UnavailableError(absl::StrCat(
        "its stream broke", status.ok() ? std::string() : ": " + status.error_message()));
    {
      absl::MutexLock lock(&mutex_);
      if (!refused_.ok()) reason = refused_;
    }
    events_.on_gone(reason);  // first: who hears of a failure must not try this server again
    for (auto& [round_id, done] : pending) std::move(done)(reason);
  }

 private:
  // A slice, or word that nobody waits for it any more.
  struct Outgoing {
    uint64_t round_id;
    std::optional<ExpertSlice> slice;
  };

  // The process at the address must be the one that registered it.
  absl::Status CheckIdentity() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto& metadata = connection_->context.GetServerInitialMetadata();
    const auto check = [&metadata](const char* key, const std::string& expected) {
      const auto found = metadata.find(key);
      const std::string given =
          found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
      return given == expected ? absl::OkStatus()
                               : absl::FailedPreconditionError(absl::StrCat(
                                     "another server answers there: ", key, ": expected \"",
                                     expected, "\", got \"", given, "\""));
    };
    RETURN_IF_ERROR(check(kServerNameKey, expected_.name));
    return check(kFingerprintKey, expected_.model_fingerprint);
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || ended_ || outgoing_.empty()) return;
    writing_ = true;
    const Outgoing next = std::move(outgoing_.front());
    outgoing_.pop_front();
    if (next.slice) {
      written_ = EncodeWithTensor(Header(*next.slice, next.round_id), next.slice->rows.values);
    } else {
      v1::DispatchRequest cancel;
      cancel.set_round_id(next.round_id);
      cancel.set_phase(v1::PHASE_CANCEL);
      written_ = Encode(cancel);
    }
    StartWrite(&written_);
  }

  void MaybeHalfClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!closing_ || !ready_ || ended_ || half_closed_ || writing_ || !outgoing_.empty() ||
        !pending_.empty()) {
      return;
    }
    half_closed_ = true;
    StartWritesDone();
  }

  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(held_, false)) RemoveHold();
  }

  std::unique_ptr<Connection> connection_;
  const ServerIdentity expected_;
  const Events events_;

  // gRPC runs the reactions one after the other, but on different threads, and Dispatch beside
  // them.
  absl::Mutex mutex_;
  std::shared_ptr<Stream> self_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);  // while it is
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Done> pending_ ABSL_GUARDED_BY(mutex_);  // slices without an answer
  uint64_t next_round_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // why the server is not the expected one
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = true;
};

absl::StatusOr<Tensor> ReplyRows(const absl::Status& decoded, const v1::DispatchResponse& header,
                                 Tensor rows) {
  if (absl::IsResourceExhausted(decoded)) return decoded;
  if (!decoded.ok()) {
    return absl::InternalError(
        absl::StrCat("malformed reply of the server: ", std::string(decoded.message())));
  }
  if (header.retry_after_ms() > 0) {
    return RetryLater(header.message(), absl::Milliseconds(header.retry_after_ms()));
  }
  if (header.code() != 0) {
    return absl::Status(static_cast<absl::StatusCode>(header.code()), header.message());
  }
  return rows;
}

absl::StatusOr<std::shared_ptr<GrpcExpertBackend>> GrpcExpertBackend::Connect(
    const std::string& address, const ServerIdentity& expected, const ChannelOptions& options,
    Events events) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, MakeChannel(address, options));
  auto stream = std::make_shared<Stream>(std::make_unique<Connection>(std::move(channel)), expected,
                                         std::move(events));
  stream->Start();
  return std::shared_ptr<GrpcExpertBackend>(new GrpcExpertBackend(std::move(stream)));
}

GrpcExpertBackend::~GrpcExpertBackend() { stream_->Close(); }

uint64_t GrpcExpertBackend::Dispatch(ExpertSlice slice, Done done) {
  return stream_->Dispatch(std::move(slice), std::move(done));
}

void GrpcExpertBackend::Cancel(uint64_t id) { stream_->Cancel(id); }

void GrpcExpertBackend::Close() { stream_->Close(); }

}  // namespace expertmesh
