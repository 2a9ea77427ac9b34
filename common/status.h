// Error plumbing: absl::Status inside the project, converted to grpc::Status in common/rpc/status.h
// only.
//
// Debian's Abseil has its own absl::string_view (not std::string_view), so text crosses Abseil
// calls as std::string or absl::string_view.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define EXPERTMESH_CONCAT_INNER(a, b) a##b
#define EXPERTMESH_CONCAT(a, b) EXPERTMESH_CONCAT_INNER(a, b)

// Returns the status of `expr` from the enclosing function unless it is OK.
#define RETURN_IF_ERROR(expr)                                         \
  do {                                                                \
    if (absl::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

// Assigns the value of the StatusOr `expr` to `lhs`, or returns its status from the enclosing
// function.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL(EXPERTMESH_CONCAT(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                          \
  if (!result.ok()) return result.status();      \
  lhs = std::move(result).value()
