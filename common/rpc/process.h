// What every daemon and command does first and last.
#pragma once

#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace expertmesh {

// Version of the project, for example "0.1.0".
extern const char kVersion[];

// Version of the arithmetic (the bit contract): processes with different ones do not mix.
extern const char kNumerics[];

// "0.1.0 (gRPC 1.51.1, protobuf 3.21.12)".
std::string VersionText();

// To be called once, before any gRPC object exists: memory allocator and lock settings for tensor
// traffic, logs to standard error under `name`, broken pipes ignored. FAILED_PRECONDITION on a
// processor that has none of SupportedIsas().
absl::Status InitProcess(const std::string& name);

// How a daemon ends: by SIGTERM or SIGINT, or because it asks for it. One per process, made before
// any other thread, because it blocks the signals for all of them.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();

  // A stop before Ready() ends the process at once: nothing is under way yet, and loading may take
  // minutes. After it, Wait() returns.
  void Ready();
  // Waits for a stop; returns the exit code of the process.
  int Wait();
  // Stops as a signal does, but with that exit code. Thread-safe.
  void Stop(int exit_code);

 private:
  absl::Mutex mutex_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int exit_code_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;  // waits for the signals
};

}  // namespace expertmesh
