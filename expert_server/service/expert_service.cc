#include "expert_server/service/expert_service.h"

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/rpc/status.h"
#include "common/rpc/tensor_codec.h"
#include "expert_server/service/slice.h"

namespace expertmesh {
namespace {

// Told to a router whose slice found the queue full.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

// A stream on which more than so many messages' bytes wait is not read from.
constexpr int64_t kWindowMessages = 4;

// A slice on its way through the stream.
struct Job {
  Slice slice;
  int64_t bytes = 0;  // its share of the stream's held_; guarded by the stream's mutex
  std::atomic<bool> cancelled = false;  // nobody waits for it any more
  bool started = false;                 // guarded by the stream's mutex
};

grpc::ByteBuffer QueueFull(uint64_t round_id, size_t limit) {
  v1::DispatchResponse response;
  response.set_round_id(round_id);
  response.set_code(static_cast<int32_t>(absl::StatusCode::kResourceExhausted));
  response.set_message(absl::StrCat("the server's queue of ", limit, " slices is full"));
  response.set_retry_after_ms(absl::ToInt64Milliseconds(kRetryAfter));
  return Encode(response);
}

absl::Status OutOfMemory() {
  return absl::ResourceExhaustedError("the server is out of memory for this slice");
}

grpc::ByteBuffer Answer(uint64_t round_id, const absl::StatusOr<Tensor>& rows) {
  v1::DispatchResponse response;
  response.set_round_id(round_id);
  if (rows.ok()) return EncodeWithTensor(response, *rows);
  response.set_code(static_cast<int32_t>(rows.status().code()));
  response.set_message(std::string(rows.status().message()));
  return Encode(response);
}

// What the answer to a slice will take, more or less; at most `most`, as larger ones are refused.
int64_t ReplyBytes(const Slice& slice, int64_t most) {
  if (slice.rows.shape().size() != 2) return 0;
  const double bytes = static_cast<double>(NumReplyRows(slice)) *
                       static_cast<double>(slice.rows.dim(1)) * BytesOf(ReplyDTypeOf(slice));
  return bytes < static_cast<double>(most) ? static_cast<int64_t>(bytes) : most;
}

// One stream. Shared by gRPC (until OnDone) and the slices under way.
class DispatchStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public std::enable_shared_from_this<DispatchStream> {
 public:
  // Without a store the stream only says that there is none yet.
  DispatchStream(const ExpertStore* store, Executor* executor, int64_t max_message_bytes)
      : store_(store), executor_(executor), max_message_bytes_(max_message_bytes) {}

  void Start() {
    absl::MutexLock lock(&mutex_);
    self_ = shared_from_this();
    if (store_ == nullptr) {
      finished_ = true;
      Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the experts are still being loaded"));
      return;
    }
    StartSendInitialMetadata();  // tells the router that it is connected, and to whom
    reading_ = true;
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    grpc::ByteBuffer bytes;
    {
      absl::MutexLock lock(&mutex_);
      if (!ok) {  // the router has closed its side, or is gone
        reads_done_ = true;
        MaybeFinish();
        return;
      }
      bytes.Swap(&incoming_);
      ++under_way_;
    }
    auto job = std::make_shared<Job>();
    Slice& slice = job->slice;
    absl::Status status;
    try {
      status = DecodeWithTensor(bytes, "rows", &slice.header, &slice.rows);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
      slice.header.set_round_id(VarintField(bytes, v1::DispatchRequest::kRoundIdFieldNumber));
    }
    const uint64_t round_id = slice.header.round_id();
    if (slice.header.timeout_us() > 0) {
      slice.deadline = absl::Now() + absl::Microseconds(slice.header.timeout_us());
    }
    if (!status.ok() && round_id == 0) {  // nobody could tell which slice the error belongs to
      absl::MutexLock lock(&mutex_);
      --under_way_;
      reads_done_ = true;
      outcome_ = ToGrpcStatus(status);
      MaybeFinish();
      return;
    }
    if (!status.ok()) {
      Send(round_id, Answer(round_id, status));
    } else if (slice.header.phase() == v1::PHASE_CANCEL) {
      Cancel(round_id);
    } else {
      {
        absl::MutexLock lock(&mutex_);
        jobs_.emplace(round_id, job);
        job->bytes = static_cast<int64_t>(bytes.Length()) + ReplyBytes(slice, max_message_bytes_);
        held_ += job->bytes;
      }
      if (!executor_->TryRun([self = shared_from_this(), job] { self->Run(*job); })) {
        Send(round_id, QueueFull(round_id, executor_->max_queued()), job.get());
      }
    }
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    MaybeRead();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) broken_ = true;
    held_ -= static_cast<int64_t>(outgoing_.front().Length());
    outgoing_.pop_front();
    WriteNext();
    MaybeRead();
    MaybeFinish();
  }

  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }

  void OnDone() override {
    std::shared_ptr<DispatchStream> self;  // until the end of this function
    absl::MutexLock lock(&mutex_);
    self = std::move(self_);
  }

 private:
  // Computes and answers one slice; on a thread of the executor.
  void Run(Job& job) {
    const uint64_t round_id = job.slice.header.round_id();
    const auto stop = [this, &job] { return job.cancelled || Broken(); };
    absl::StatusOr<Tensor> rows = absl::CancelledError("nobody waits for the slice any more");
    try {
      if (Begin(job)) rows = ComputeSlice(*store_, job.slice, max_message_bytes_, stop);
      Send(round_id, Answer(round_id, rows), &job);
    } catch (const std::bad_alloc&) {
      Send(round_id, Answer(round_id, OutOfMemory()), &job);
    }
  }

  // False if nobody waits for it any more.
  bool Begin(Job& job) {
    absl::MutexLock lock(&mutex_);
    job.started = true;
    return !job.cancelled && !broken_;
  }

  void Cancel(uint64_t round_id) {
    absl::MutexLock lock(&mutex_);
    --under_way_;  // the request itself, which gets no answer
    const auto found = jobs_.find(round_id);
    if (found == jobs_.end()) return;  // answered already
    found->second->cancelled = true;
    if (found->second->started) return;
    found->second->slice.rows = Tensor();  // it may wait for long yet
    held_ -= std::exchange(found->second->bytes, 0);
  }

  bool Broken() {
    absl::MutexLock lock(&mutex_);
    return broken_;
  }

  // Answers one slice, or a message (null `job`) that never became one; on any thread.
  void Send(uint64_t round_id, grpc::ByteBuffer answer, const Job* job = nullptr) {
    absl::MutexLock lock(&mutex_);
    --under_way_;
    if (job != nullptr) held_ -= job->bytes;
    jobs_.erase(round_id);
    if (!finished_) {
      held_ += static_cast<int64_t>(answer.Length());
      outgoing_.push_back(std::move(answer));
      WriteNext();
    }
    MaybeRead();
    MaybeFinish();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    if (broken_) {
      for (const grpc::ByteBuffer& lost : outgoing_) held_ -= static_cast<int64_t>(lost.Length());
      outgoing_.clear();
    }
    if (outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  // Unless that is under way, or slices and answers for a router that does not read pile up: then
  // those who take them away come back here. With nothing held there is always room.
  void MaybeRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (reading_ || reads_done_ || held_ > kWindowMessages * max_message_bytes_) return;
    reading_ = true;
    StartRead(&incoming_);
  }

  // Once the router has stopped and every slice has been answered.
  void MaybeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || !reads_done_ || under_way_ > 0 || writing_ || !outgoing_.empty()) return;
    finished_ = true;
    Finish(outcome_);
  }

  const ExpertStore* const store_;
  Executor* const executor_;
  const int64_t max_message_bytes_;

  // gRPC runs the reactions one after the other, but on different threads, and the executor's
  // beside them.
  absl::Mutex mutex_;
  std::shared_ptr<DispatchStream> self_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // from StartRead until the message is dealt with
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;      // bytes of jobs_ and outgoing_
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;     // requests that have been read, without an answer
  std::map<uint64_t, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);  // the slices among them
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status outcome_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void ExpertServiceImpl::SetStore(const ExpertStore* store, ServerIdentity identity) {
  absl::MutexLock lock(&mutex_);
  store_ = store;
  identity_ = std::move(identity);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ExpertServiceImpl::Dispatch(
    grpc::CallbackServerContext* context) {
  const ExpertStore* store;
  {
    absl::MutexLock lock(&mutex_);
    store = store_;
    context->AddInitialMetadata(kServerNameKey, identity_.name);
    context->AddInitialMetadata(kFingerprintKey, identity_.model_fingerprint);
  }
  auto stream = std::make_shared<DispatchStream>(store, executor_, max_message_bytes_);
  stream->Start();
  return stream.get();
}

}  // namespace expertmesh
