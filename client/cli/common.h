// What several verbs share.
#pragma once

#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"

namespace expertmesh {

inline constexpr char kDefaultRouter[] = "127.0.0.1:7070";

// Prints "expertmesh: MESSAGE" to standard error and returns kFailed.
int Fail(const absl::Status& status);

// Adds --router and --timeout (seconds).
void AddRouterOptions(CLI::App& app, std::string* router, double* timeout_seconds);

}  // namespace expertmesh
