#include "router/dispatch/batcher.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace expertmesh {
namespace {

// A part that so many servers have been lost by is not given to another one: it may be why.
constexpr size_t kMaxLost = 2;

absl::Status OutOfMemory() {
  return absl::ResourceExhaustedError("the router is out of memory for this call");
}

// Nothing more is to be done for the call: the rounds that refer to it may last long yet, and must
// not keep its rows until then.
void FreeRows(BatchedCall& call) {
  call.call = ForwardCall();
  call.result = ForwardResult();
  call.shared_weights = Tensor();
}

// Nothing more is to be done for the part.
void Close(Round::Part& part) {
  part.closed = true;
  BatchedCall& call = *part.call;
  if (--call.rounds == 0 && call.answered()) FreeRows(call);
}

// Answers the call, at the next opportunity, unless that has happened.
template <typename Failed>
void Fail(BatchedCall& call, const absl::Status& status, Failed* failed) {
  if (call.answered()) return;
  failed->emplace_back(std::move(call.done), status);
  call.done = nullptr;
}

}  // namespace

absl::Status Validate(const BatchingOptions& options) {
  const auto check = [](const char* name, int64_t least, int64_t value) {
    return value >= least ? absl::OkStatus()
                          : absl::InvalidArgumentError(
                                absl::StrCat(name, ": expected at least ", least, ", got ", value));
  };
  RETURN_IF_ERROR(check("rounds_per_layer", 0, options.rounds_per_layer));
  RETURN_IF_ERROR(check("overlapping_rounds", 1, options.overlapping_rounds));
  RETURN_IF_ERROR(check("max_tokens", 1, options.max_tokens));
  RETURN_IF_ERROR(check("light_elements", 0, options.light_elements));
  return check("max_reply_bytes", 1, options.max_reply_bytes);
}

Batcher::Batcher(const LayerDescription& layer, std::shared_ptr<Membership> membership,
                 const BatchingOptions& options, const DispatchOptions& dispatch,
                 Executor* executor, AlarmClock* clock, std::shared_ptr<RoundCounters> counters)
    : layer_(layer),
      membership_(std::move(membership)),
      options_(options),
      dispatch_(dispatch),
      executor_(executor),
      clock_(clock),
      counters_(std::move(counters)),
      light_tokens_(options.light_elements / layer.experts.hidden_size) {}

void Batcher::Submit(std::shared_ptr<BatchedCall> call) {
  {
    absl::MutexLock lock(&mutex_);
    call->arrival = absl::Now();
    queued_tokens_ += call->tokens();
    next_check_ = std::min(next_check_, call->call.deadline);
    const int64_t capacity = Capacity(call->call.hidden_states.dtype());
    queue_.push_back(std::move(call));
    if (young_rounds_ >= options_.rounds_per_layer && queued_tokens_ < capacity) {
      // It has to wait for the end of a round, in vain perhaps.
      if (!advancing_) SetAlarm();
      return;
    }
    if (!BeginAdvance()) return;
  }
  Advance();
}

void Batcher::Advance(bool may_take_long) {
  while (true) {
    Steps steps;
    {
      absl::MutexLock lock(&mutex_);
      steps = NextSteps(absl::Now());
      if (steps.empty()) {
        advancing_ = false;
        SetAlarm();
        return;
      }
    }
    if (!may_take_long && IsHeavy(steps)) {
      const auto handed_over = std::make_shared<Steps>(std::move(steps));
      if (executor_->TryRun([self = shared_from_this(), handed_over] {
            self->Run(std::move(*handed_over));
            self->Advance(/*may_take_long=*/true);
          })) {
        return;
      }
      steps = std::move(*handed_over);
      may_take_long = true;  // there is no other thread
    }
    Run(std::move(steps));
  }
}

bool Batcher::IsHeavy(const Steps& steps) const {
  int64_t tokens = 0;
  for (const std::shared_ptr<Round>& round : steps.start) {
    for (const Round::Part& part : round->parts) tokens += part.tokens;
  }
  for (const auto& [round, p] : steps.ready) tokens += round->parts[p].tokens;
  return tokens > light_tokens_;
}

void Batcher::SetAlarm() {
  if (queue_.empty() && rounds_.empty()) return;
  const absl::Time time = std::min(next_check_, next_round_);
  if (!alarms_.empty() && *alarms_.begin() <= time) return;
  alarms_.insert(time);
  clock_->At(time, [self = shared_from_this(), time] { self->OnAlarm(time); });
}

void Batcher::OnAlarm(absl::Time time) {
  {
    absl::MutexLock lock(&mutex_);
    alarms_.erase(time);
    if ((queue_.empty() && rounds_.empty()) || !BeginAdvance()) return;
  }
  Advance();
}

Batcher::Steps Batcher::NextSteps(absl::Time now) {
  Steps steps;
  if (now >= next_check_) CheckCallers(now, &steps);
  FindSuspects(now);  // before the rounds of those who have just given up are
  for (const std::shared_ptr<Round>& round : rounds_) {
    if (auto again = TakeOver(*round, now, &steps)) steps.start.push_back(std::move(again));
  }
  std::erase_if(rounds_, [&](const std::shared_ptr<Round>& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                             mutex_) { return Review(round, &steps); });
  rounds_.insert(rounds_.end(), steps.start.begin(), steps.start.end());
  if (rounds_.empty()) last_reply_.clear();
  young_rounds_ = static_cast<int>(std::count_if(
      rounds_.begin(), rounds_.end(),
      [this](const std::shared_ptr<Round>& round)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return WaitsFor(/*suspect=*/false, *round); }));
  young_rounds_ += static_cast<int>(steps.start.size());  // which have no slices yet
  const size_t left = std::erase_if(queue_, [](const auto& call) {
    if (call->answered() && call->rounds == 0) FreeRows(*call);
    return call->answered();
  });
  if (left > 0) CountQueued();
  if (auto next = TakeRound(now)) steps.start.push_back(std::move(next));
  return steps;
}

void Batcher::CheckCallers(absl::Time now, Steps* steps) {
  next_check_ = now + kCancelPoll;
  const auto check = [&](BatchedCall& call) {
    if (call.answered()) return;
    if (now >= call.call.deadline) {
      Fail(call,
           absl::DeadlineExceededError(
               call.rounds > 0 ? "the deadline passed while the experts were computing"
                               : "the deadline passed while the call waited for its round"),
           &steps->failed);
    } else if (call.call.cancelled()) {
      Fail(call, absl::CancelledError("the caller has given up"), &steps->failed);
    } else {
      next_check_ = std::min(next_check_, call.call.deadline);
    }
  };
  for (const std::shared_ptr<BatchedCall>& call : queue_) check(*call);
  for (const std::shared_ptr<Round>& round : rounds_) {
    for (const Round::Part& part : round->parts) check(*part.call);
  }
}

std::shared_ptr<Round> Batcher::TakeOver(Round& round, absl::Time now, Steps* steps) {
  const auto open = [&round](size_t p) {
    return !round.parts[p].closed && !round.parts[p].call->answered();
  };
  std::vector<const Round::Slice*> failed;
  std::vector<std::shared_ptr<ExpertBackend>> lost = round.lost;
  for (const Round::Slice& slice : round.slices) {
    if (absl::IsUnavailable(slice.failure)) lost.push_back(slice.backend);
    if (slice.failure.ok() || !std::any_of(slice.parts.begin(), slice.parts.end(), open)) continue;
    failed.push_back(&slice);
  }
  if (failed.empty()) return nullptr;
  const auto fail = [&](const Round::Slice& slice, size_t p) {
    const Round::Part& part = round.parts[p];
    Fail(*part.call, DescribeFailure(layer_, part, slice), &steps->failed);
  };
  // What would fail elsewhere too comes first.
  for (const Round::Slice* slice : failed) {
    if (absl::IsUnavailable(slice->failure) && round.lost.size() < kMaxLost) continue;
    for (const size_t p : slice->parts) fail(*slice, p);
  }
  const LayerPlacement others = membership_->Place(layer_.layer, lost);
  auto again = std::make_shared<Round>();
  again->dtype = round.dtype;
  again->start = now;
  again->suspects = suspects_;
  again->lost = std::move(lost);
  for (const Round::Slice* slice : failed) {
    for (const size_t p : slice->parts) {
      if (!open(p)) continue;
      Round::Part& part = round.parts[p];
      if (others.Missing(NeededExperts(layer_, part.topk_ids())).empty()) {
        again->parts.push_back({.call = part.call, .begin = part.begin, .tokens = part.tokens});
        ++part.call->rounds;
        Close(part);
      } else {
        fail(*slice, p);
      }
    }
  }
  return again->parts.empty() ? nullptr : again;
}

bool Batcher::Review(const std::shared_ptr<Round>& round, Steps* steps) {
  for (size_t p = 0; p < round->parts.size(); ++p) {
    Round::Part& part = round->parts[p];
    if (part.closed) continue;
    const bool ready = part.missing == 0;
    if (!part.call->answered() && !ready) continue;
    if (!part.call->answered()) steps->ready.emplace_back(round, p);
    Close(part);
  }
  bool over = true;
  for (Round::Slice& slice : round->slices) {
    if (slice.over) continue;
    const auto waits = [&round](size_t p) { return !round->parts[p].closed; };
    if (std::any_of(slice.parts.begin(), slice.parts.end(), waits)) {
      over = false;
    } else {
      slice.over = true;
      steps->cancelled.emplace_back(slice.backend, slice.id);
    }
  }
  return over;
}

void Batcher::FindSuspects(absl::Time now) {
  for (const std::shared_ptr<Round>& round : rounds_) {
    if (now < round->start + options_.patience) continue;
    for (const Round::Slice& slice : round->slices) {
      const auto last = last_reply_.find(slice.backend.get());
      if (slice.over || (last != last_reply_.end() && now < last->second + options_.patience)) {
        continue;
      }
      suspects_.insert(slice.backend.get());
    }
  }
}

bool Batcher::WaitsFor(bool suspect, const Round& round) const {
  return std::any_of(round.slices.begin(), round.slices.end(),
                     [&](const Round::Slice& slice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                       return !slice.over && suspects_.contains(slice.backend.get()) == suspect;
                     });
}

std::vector<bool> Batcher::NeedSuspect() const {
  std::vector<bool> need(queue_.size());
  if (suspects_.empty()) return need;
  const LayerPlacement placement = membership_->Place(layer_.layer);
  const auto suspected = [&](int32_t server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return server >= 0 && suspects_.contains(placement.backends[server].get());
  };
  // Other servers compute the shared experts where there are any.
  const auto& shared = placement.shared_servers;
  const bool all_shared = !shared.empty() && std::all_of(shared.begin(), shared.end(), suspected);
  for (size_t i = 0; i < queue_.size(); ++i) {
    const Tensor& ids = queue_[i]->result.routing.topk_ids;
    need[i] =
        all_shared || std::any_of(ids.as<int32_t>() + queue_[i]->planned * ids.dim(1),
                                  ids.as<int32_t>() + ids.num_elements(), [&](int32_t expert) {
                                    return expert < layer_.router.num_experts &&
                                           suspected(placement.server_of_expert[expert]);
                                  });
  }
  return need;
}

void Batcher::CountQueued() {
  queued_tokens_ = 0;
  for (const std::shared_ptr<BatchedCall>& call : queue_) {
    queued_tokens_ += call->tokens() - call->planned;
  }
}

std::shared_ptr<Round> Batcher::TakeRound(absl::Time now) {
  next_round_ = absl::InfiniteFuture();
  if (queue_.empty() ||
      young_rounds_ >= std::max(options_.rounds_per_layer, options_.overlapping_rounds)) {
    return nullptr;
  }
  const std::vector<bool> need_suspect = NeedSuspect();
  const bool suspect_busy = std::any_of(
      rounds_.begin(), rounds_.end(),
      [this](const std::shared_ptr<Round>& round)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return WaitsFor(/*suspect=*/true, *round); });
  // Calls with many rounds in flight have to wait for these.
  const auto may_go = [&](size_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return queue_[i]->rounds < options_.overlapping_rounds && !(need_suspect[i] && suspect_busy);
  };
  size_t first = 0;
  while (first < queue_.size() && !may_go(first)) ++first;
  if (first == queue_.size()) return nullptr;
  const DType dtype = queue_[first]->call.hidden_states.dtype();
  std::vector<bool> fits(queue_.size());
  for (size_t i = first; i < queue_.size(); ++i) {
    fits[i] = queue_[i]->call.hidden_states.dtype() == dtype &&
              need_suspect[i] == need_suspect[first] && may_go(i);
  }
  int64_t waiting = 0;
  absl::Time oldest = absl::InfiniteFuture();
  for (size_t i = first; i < queue_.size(); ++i) {
    if (!fits[i]) continue;
    waiting += queue_[i]->tokens() - queue_[i]->planned;
    oldest = std::min(oldest, queue_[i]->arrival);
  }
  const int64_t capacity = Capacity(dtype);
  const bool full = waiting >= capacity;
  const int limit = full ? std::max(options_.rounds_per_layer, options_.overlapping_rounds)
                         : options_.rounds_per_layer;
  if (young_rounds_ >= limit) return nullptr;
  if (!full && now < oldest + options_.wait) {
    next_round_ = oldest + options_.wait;
    return nullptr;
  }

  auto round = std::make_shared<Round>();
  round->start = now;
  round->dtype = dtype;
  round->suspects = suspects_;
  int64_t room = capacity;
  std::deque<std::shared_ptr<BatchedCall>> rest, cut;
  for (size_t i = 0; i < queue_.size(); ++i) {
    std::shared_ptr<BatchedCall>& call = queue_[i];
    const int64_t left = call->tokens() - call->planned;
    // Only what is larger than a whole round is cut.
    const bool taken = fits[i] && room > 0 && (left <= room || left > capacity);
    if (fits[i] && !taken) room = 0;  // nobody overtakes it
    if (!taken) {
      rest.push_back(std::move(call));
      continue;
    }
    const int64_t tokens = std::min(left, room);
    round->parts.push_back({.call = call, .begin = call->planned, .tokens = tokens});
    room -= tokens;
    call->planned += tokens;
    ++call->rounds;
    if (tokens < left) cut.push_back(std::move(call));
  }
  queue_ = std::move(rest);
  queue_.insert(queue_.end(), cut.begin(), cut.end());  // others take turns with the large ones
  CountQueued();
  ++young_rounds_;
  rounds_.push_back(round);
  return round;
}

void Batcher::Run(Steps steps) {
  for (auto& [done, status] : steps.failed) std::move(done)(status);
  for (const auto& [backend, id] : steps.cancelled) backend->Cancel(id);
  // First: the servers compute while this thread combines.
  for (const std::shared_ptr<Round>& round : steps.start) Start(round);
  for (const auto& [round, p] : steps.ready) {
    const Round::Part& part = round->parts[p];
    BatchedCall& call = *part.call;
    if (call.answered()) continue;  // by the failure of another of its rounds, and its rows freed
    const absl::Time combine = absl::Now();
    absl::Status combined;
    try {
      CombinePart(layer_, *round, part, dispatch_.isa);
    } catch (const std::bad_alloc&) {
      combined = OutOfMemory();
    }
    counters_->combine_ns += absl::ToInt64Nanoseconds(absl::Now() - combine);
    call.combined += part.tokens;
    if (combined.ok() && call.combined < call.tokens()) continue;
    ForwardDone done = std::move(call.done);
    call.done = nullptr;
    if (combined.ok()) {
      std::move(done)(std::move(call.result));
    } else {
      std::move(done)(combined);
    }
    if (call.rounds == 0) FreeRows(call);
  }
}

void Batcher::Start(const std::shared_ptr<Round>& round) {
  std::vector<std::pair<ForwardDone, absl::Status>> failed;
  LayerPlacement placement = membership_->Place(layer_.layer, round->lost);
  if (!round->suspects.empty()) {  // unless all are
    std::vector<int32_t> in_time = placement.shared_servers;
    std::erase_if(in_time, [&](int32_t server) {
      return round->suspects.contains(placement.backends[server].get());
    });
    if (!in_time.empty()) placement.shared_servers = std::move(in_time);
  }
  for (Round::Part& part : round->parts) {
    if (part.call->answered()) {  // by the failure of another of its rounds
      Close(part);
      continue;
    }
    const std::vector<int32_t> missing = placement.Missing(NeededExperts(layer_, part.topk_ids()));
    if (missing.empty()) continue;  // else a server went since the call looked
    Fail(*part.call, NoServer(layer_.layer, missing), &failed);
    Close(part);
  }
  const absl::Time plan = absl::Now();
  absl::StatusOr<std::vector<ExpertSlice>> planned = OutOfMemory();
  try {
    planned = PlanSlices(layer_, placement, dispatch_, round.get());
  } catch (const std::bad_alloc&) {  // what is there of the slices has not been sent
    round->slices.clear();
  }
  for (Round::Part& part : round->parts) {
    if (part.closed) continue;
    if (planned.ok()) {
      ++counters_->requests;
      counters_->tokens += static_cast<uint64_t>(part.tokens);
    } else {
      Fail(*part.call, planned.status(), &failed);
      Close(part);
    }
  }
  for (auto& [done, status] : failed) std::move(done)(status);
  if (!planned.ok() || planned->empty()) return;
  Count(round->counts);
  ++counters_->rounds;
  round->sent = absl::Now();
  counters_->plan_ns += absl::ToInt64Nanoseconds(round->planned - plan);
  counters_->gather_ns += absl::ToInt64Nanoseconds(round->sent - round->planned);
  for (size_t s = 0; s < planned->size(); ++s) {
    round->slices[s].id = round->slices[s].backend->Dispatch(
        std::move((*planned)[s]),
        [self = shared_from_this(), round, s](absl::StatusOr<Tensor> rows) {
          self->OnReply(*round, s, std::move(rows));
        });
  }
}

void Batcher::Count(const DispatchCounts& counts) {
  counters_->pairs += counts.pairs;
  counters_->unique_rows += counts.unique_rows;
  counters_->padded_positions += counts.padded_positions;
  counters_->row_bytes += counts.row_bytes;
  counters_->saturated_values += counts.quantized.saturated_values;
  counters_->saturated_rows += counts.quantized.saturated_rows;
  counters_->zero_rows += counts.quantized.zero_rows;
}

void Batcher::OnReply(Round& round, size_t s, absl::StatusOr<Tensor> rows) {
  // `slice` but for `over` and `failure` is as it was at the dispatch.
  Round::Slice& slice = round.slices[s];
  if (rows.ok()) {
    const DType expected = ReplyDType(round.dtype);
    if (rows->dtype() != expected || rows->shape() != slice.reply_shape) {
      rows = absl::InternalError(absl::StrCat(
          "expected reply rows ", NameOf(expected), " ", ShapeToString(slice.reply_shape), ", got ",
          NameOf(rows->dtype()), " ", ShapeToString(rows->shape())));
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    // It is alive, or known to be dead. What has been cancelled here says neither.
    bool trusted_again = false;
    if (!absl::IsCancelled(rows.status())) {
      last_reply_[slice.backend.get()] = absl::Now();
      trusted_again = suspects_.erase(slice.backend.get()) > 0;
    }
    bool advance = trusted_again;
    if (const bool given_up = std::exchange(slice.over, true); given_up) {
      // Nobody waits for it.
    } else if (rows.ok()) {
      round.replies[s] = *std::move(rows);
      if (std::all_of(round.slices.begin(), round.slices.end(),
                      [](const Round::Slice& one) { return one.over; })) {
        counters_->servers_ns += absl::ToInt64Nanoseconds(absl::Now() - round.sent);
      }
      for (const size_t p : slice.parts) advance |= --round.parts[p].missing == 0;
      advance |=
          !queue_.empty() && !WaitsFor(/*suspect=*/false, round);  // perhaps the next can start
    } else {
      slice.failure = rows.status();
      advance = true;
    }
    if (!advance || !BeginAdvance()) return;
  }
  Advance();
}

int64_t Batcher::Capacity(DType dtype) const {
  // A server that holds all experts returns a row for each slot of a token.
  const int64_t token_bytes = int64_t{layer_.router.top_k + layer_.shared.count} *
                              layer_.experts.hidden_size * BytesOf(ReplyDType(dtype));
  return std::max<int64_t>(1,
                           std::min(options_.max_tokens, options_.max_reply_bytes / token_bytes));
}

}  // namespace expertmesh
