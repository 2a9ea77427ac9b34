#include "expert_server/service/expert_service.h"

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/rpc/tensor_codec.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// A slice as it came in.
struct Work {
  v1::DispatchRequest header;
  Tensor rows;
  absl::Time deadline = absl::InfiniteFuture();
};

absl::StatusOr<Tensor> Compute(const ExpertStore* store, const Work& work) {
  if (store == nullptr) return absl::UnavailableError("the experts are still being loaded");
  if (work.header.phase() != v1::PHASE_FORWARD) {
    return absl::UnimplementedError(absl::StrCat("phase: only PHASE_FORWARD is computed, got ",
                                                 static_cast<int>(work.header.phase())));
  }
  if (absl::Now() >= work.deadline) {
    return absl::DeadlineExceededError("the deadline passed before the slice was computed");
  }
  return store->Forward(work.header.layer(), work.header.expert_ids(), work.header.m_sizes(),
                        work.header.gather(), work.rows);
}

grpc::ByteBuffer Answer(uint64_t round_id, const absl::StatusOr<Tensor>& rows) {
  v1::DispatchResponse response;
  response.set_round_id(round_id);
  if (rows.ok()) return EncodeWithTensor(response, *rows);
  response.set_code(static_cast<int32_t>(rows.status().code()));
  response.set_message(std::string(rows.status().message()));
  return Encode(response);
}

// One stream. Shared by gRPC (until OnDone) and the slices under way.
class DispatchStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public std::enable_shared_from_this<DispatchStream> {
 public:
  DispatchStream(const std::atomic<const ExpertStore*>& store, Executor* executor)
      : store_(store), executor_(executor) {}

  void Start() {
    absl::MutexLock lock(&mutex_);
    self_ = shared_from_this();
    StartSendInitialMetadata();  // tells the router that it is connected
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
    auto work = std::make_shared<Work>();
    absl::Status status = DecodeWithTensor(bytes, "rows", &work->header, &work->rows);
    const uint64_t round_id = work->header.round_id();
    if (work->header.timeout_us() > 0) {
      work->deadline = absl::Now() + absl::Microseconds(work->header.timeout_us());
    }
    if (status.ok() && !executor_->TryRun([self = shared_from_this(), work] {
          self->Send(Answer(work->header.round_id(), Compute(self->store_.load(), *work)));
        })) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("the server's queue of ", executor_->max_queued(), " slices is full"));
    }
    if (!status.ok()) Send(Answer(round_id, status));
    absl::MutexLock lock(&mutex_);
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) broken_ = true;
    outgoing_.pop_front();
    WriteNext();
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
  // Answers one slice; on any thread.
  void Send(grpc::ByteBuffer answer) {
    absl::MutexLock lock(&mutex_);
    --under_way_;
    if (!finished_) {
      outgoing_.push_back(std::move(answer));
      WriteNext();
    }
    MaybeFinish();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    if (broken_) outgoing_.clear();
    if (outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  // Once the router has stopped and every slice has been answered.
  void MaybeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || !reads_done_ || under_way_ > 0 || writing_ || !outgoing_.empty()) return;
    finished_ = true;
    Finish(grpc::Status::OK);
  }

  const std::atomic<const ExpertStore*>& store_;
  Executor* const executor_;

  // gRPC runs the reactions one after the other, but on different threads, and the executor's
  // beside them.
  absl::Mutex mutex_;
  std::shared_ptr<DispatchStream> self_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);  // the first is being written
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ExpertServiceImpl::Dispatch(
    grpc::CallbackServerContext*) {
  auto stream = std::make_shared<DispatchStream>(store_, executor_);
  stream->Start();
  return stream.get();
}

}  // namespace expertmesh
