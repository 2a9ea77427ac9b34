// What every daemon and command does first and last.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace expertmesh {

// Version of the project, for example "0.1.0".
extern const char kVersion[];

// Version of the arithmetic (the bit contract): processes with different ones do not mix.
extern const char kNumerics[];

// "0.1.0 (gRPC 1.51.1, protobuf 3.21.12)".
std::string VersionText();

// To be called once, before any gRPC object exists: memory allocator and lock settings for tensor
// traffic, logs to standard error under `name`, broken pipes ignored. FAILED_PRECONDITION on a
// processor without FMA.
absl::Status InitProcess(const std::string& name);

// Blocks SIGTERM and SIGINT in this and all later threads, so that WaitForStopSignal gets them. To
// be called before threads are started.
void BlockStopSignals();

// Waits for SIGTERM or SIGINT and returns its number.
int WaitForStopSignal();

}  // namespace expertmesh
