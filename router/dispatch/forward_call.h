// One forward call of a router: what comes in and what goes out.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/tensor.h"
#include "router/gating/gate.h"

namespace expertmesh {

struct ForwardCall {
  int32_t layer = 0;
  // [T, D]. The router reads it, from several threads, until it drops its reference, which may be
  // after the answer: nobody may write there before.
  Tensor hidden_states;
  int64_t first_row = 0;  // what row 0 is called in error texts
  absl::Time deadline = absl::InfiniteFuture();
  // True once the caller has given up. Asked now and then on any thread, also while other calls
  // are: must not block, and stays valid until the answer.
  std::function<bool()> cancelled = [] { return false; };
};

struct ForwardResult {
  Routing routing;
  Tensor output;  // [T, D] in the dtype of hidden_states
};

// Gets the answer: called exactly once, on any thread; must not block.
using ForwardDone = absl::AnyInvocable<void(absl::StatusOr<ForwardResult>) &&>;

}  // namespace expertmesh
