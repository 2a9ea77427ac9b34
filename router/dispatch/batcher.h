// Dynamic batching: concurrent calls of one layer share rounds.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/alarm_clock.h"
#include "common/executor.h"
#include "common/model/description.h"
#include "router/dispatch/round.h"
#include "router/placement/membership.h"

namespace expertmesh {

struct BatchingOptions {
  // Rounds of a layer in flight at a time; what comes meanwhile waits and is merged into the next
  // one. 0: calls are never merged, and every call has rounds of its own.
  int rounds_per_layer = 1;
  // A round that could start waits this long for company.
  absl::Duration wait = absl::ZeroDuration();
  // Rounds of a layer in flight while full ones are waiting, if that is more: one is sent while
  // another is computed. Also the rounds of one call in flight.
  int overlapping_rounds = 2;
  // A full round: this many tokens, or as many as give max_reply_bytes from a server that holds all
  // experts; at least one. Larger calls are cut, so that memory is bounded whatever T is, and
  // small ones come between their rounds.
  int64_t max_tokens = 4096;
  int64_t max_reply_bytes = 32 << 20;
  // A server that is asked and says nothing for this long is a suspect until it replies: calls that
  // need it then have rounds of their own, one at a time, and hold nobody else back.
  absl::Duration patience = absl::Seconds(1);
  // More elements of hidden states (T * D) than these are heavy work: some 0.2 ms of gathering and
  // combining, at which handing it to another thread no longer counts.
  int64_t light_elements = 64 << 10;
};

// INVALID_ARGUMENT naming the option that cannot work.
absl::Status Validate(const BatchingOptions& options);

// What a layer has done since the start.
struct RoundCounters {
  std::atomic<uint64_t> rounds = 0;
  std::atomic<uint64_t> requests = 0;  // in these rounds; a call counts in each that it has part in
  std::atomic<uint64_t> tokens = 0;
  // Sums of the rounds' DispatchCounts.
  std::atomic<int64_t> pairs = 0;
  std::atomic<int64_t> unique_rows = 0;
  std::atomic<int64_t> padded_positions = 0;
  std::atomic<int64_t> row_bytes = 0;
  std::atomic<int64_t> saturated_values = 0;
  std::atomic<int64_t> saturated_rows = 0;
  std::atomic<int64_t> zero_rows = 0;
  // Nanoseconds spent on the requests' gates, and on the rounds' stages.
  std::atomic<int64_t> gate_ns = 0;
  std::atomic<int64_t> plan_ns = 0;
  std::atomic<int64_t> gather_ns = 0;
  std::atomic<int64_t> servers_ns = 0;  // from handing the slices out to the last reply
  std::atomic<int64_t> combine_ns = 0;
};

// The rounds of one layer. Any dtypes; calls of one dtype share a round. The answer to a call does
// not depend on the others that it was merged with, neither its bits nor whether it fails: that
// depends on the servers that its own tokens need.
//
// There are no threads of its own. The thread that brings a call, a reply or an alarm goes on with
// whatever can be done then (starts rounds, combines, answers) unless another thread is at it: that
// one does it. Light work is done where it arises, so that small calls do not wait for a thread;
// more than that goes to the executor, so that the threads of the replies are free again soon.
// Nothing ever blocks. Thread-safe. Shared with the replies that are under way, which may outlive
// everything else.
class Batcher : public std::enable_shared_from_this<Batcher> {
 public:
  // `layer`, `executor` and `clock` outlive the calls: none is used after the last answer.
  Batcher(const LayerDescription& layer, std::shared_ptr<Membership> membership,
          const BatchingOptions& options, const DispatchOptions& dispatch, Executor* executor,
          AlarmClock* clock, std::shared_ptr<RoundCounters> counters);

  // Answers the call (call, result and done are filled in) as soon as its rounds are over, its
  // deadline has passed (DEADLINE_EXCEEDED), its caller has given up (CANCELLED) or a server that
  // it needs has failed. What a server that has gone was asked for is asked of others if they hold
  // all that is needed, until three have gone.
  void Submit(std::shared_ptr<BatchedCall> call);

 private:
  using Backends = std::set<const ExpertBackend*>;
  // What is done without the lock.
  struct Steps {
    std::vector<std::pair<ForwardDone, absl::Status>> failed;
    std::vector<std::pair<std::shared_ptr<ExpertBackend>, uint64_t>> cancelled;
    std::vector<std::shared_ptr<Round>> start;
    std::vector<std::pair<std::shared_ptr<Round>, size_t>> ready;  // parts to combine
    bool empty() const {
      return failed.empty() && cancelled.empty() && start.empty() && ready.empty();
    }
  };

  // True for the caller who has to call Advance() next, without the lock.
  bool BeginAdvance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !std::exchange(advancing_, true);
  }
  // Does everything that can be done now. `may_take_long`: on a thread that may be kept.
  void Advance(bool may_take_long = false);
  // Is work for a thread that may be kept.
  bool IsHeavy(const Steps& steps) const;
  void OnAlarm(absl::Time time);
  void SetAlarm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Steps NextSteps(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckCallers(absl::Time now, Steps* steps) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The failures of the round's slices: parts that others can compute go on in another round, which
  // is returned (else null), the calls of the rest fail.
  std::shared_ptr<Round> TakeOver(Round& round, absl::Time now, Steps* steps)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True when the round is over.
  bool Review(const std::shared_ptr<Round>& round, Steps* steps)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FindSuspects(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A reply is missing of a server that is a suspect, or of one that is none.
  bool WaitsFor(bool suspect, const Round& round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the calls in the queue: whether what is left of each needs a suspect.
  std::vector<bool> NeedSuspect() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next round if it is time for one; else null.
  std::shared_ptr<Round> TakeRound(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(Steps steps);
  void Start(const std::shared_ptr<Round>& round);
  void Count(const DispatchCounts& counts);
  void OnReply(Round& round, size_t slice, absl::StatusOr<Tensor> rows);
  int64_t Capacity(DType dtype) const;

  const LayerDescription& layer_;
  const std::shared_ptr<Membership> membership_;
  const BatchingOptions options_;
  const DispatchOptions dispatch_;
  Executor* const executor_;
  AlarmClock* const clock_;
  const std::shared_ptr<RoundCounters> counters_;
  const int64_t light_tokens_;  // more of them are heavy work

  // Guards also, of every round, the replies, `missing` of its parts, and `over` and `failure` of
  // its slices. Everything else of rounds and calls belongs to the thread in Advance().
  absl::Mutex mutex_;
  bool advancing_ ABSL_GUARDED_BY(mutex_) = false;  // a thread is in Advance(), or will be
  std::deque<std::shared_ptr<BatchedCall>> queue_ ABSL_GUARDED_BY(mutex_);  // with tokens to plan
  int64_t queued_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::list<std::shared_ptr<Round>> rounds_ ABSL_GUARDED_BY(mutex_);  // in flight
  int young_rounds_ ABSL_GUARDED_BY(mutex_) = 0;  // of which others wait for the end
  absl::Time next_check_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();    // of the callers
  absl::Time next_round_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // company is awaited
  std::set<absl::Time> alarms_ ABSL_GUARDED_BY(mutex_);                     // that are set
  std::map<const ExpertBackend*, absl::Time> last_reply_ ABSL_GUARDED_BY(mutex_);
  Backends suspects_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace expertmesh
