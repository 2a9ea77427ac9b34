#include "common/rpc/process.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/kernels/isa.h"

namespace expertmesh {

const char kVersion[] = EXPERTMESH_VERSION;
const char kNumerics[] = "x86-fma-1";

std::string VersionText() {
  return absl::StrCat(kVersion, " (gRPC ", grpc::Version(), ", protobuf ",
                      google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION), ")");
}

absl::Status InitProcess(const std::string& name) {
  if (SupportedIsas().empty()) {
    return absl::FailedPreconditionError(
        "this processor lacks one of AVX2, FMA, F16C, BMI, BMI2; without them results would differ "
        "from every other machine's");
  }
  // gRPC reads into slices of 64 KiB; with the default thresholds they go back to the kernel after
  // every call and are faulted in again at the next.
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
  // Threads come and go between large buffers; what each arena keeps of them is lost to the others.
  mallopt(M_ARENA_MAX, static_cast<int>(std::max(2u, std::thread::hardware_concurrency())));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Distributions build Abseil with the detection on, which costs several percent of a small call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  signal(SIGPIPE, SIG_IGN);
  // What gRPC would say reaches the user as the status of a call or of a start; GRPC_VERBOSITY
  // brings it back.
  setenv("GRPC_VERBOSITY", "NONE", /*replace=*/0);
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      name, std::make_shared<spdlog::sinks::stderr_color_sink_mt>()));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %n %l %v", spdlog::pattern_time_type::utc);
  return absl::OkStatus();
}

StopSignals::StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this, set] {
    int number = 0;
    while (sigwait(&set, &number) != 0) {
    }
    absl::MutexLock lock(&mutex_);
    if (!ready_) std::_Exit(exit_code_);
    stopped_ = true;
  });
}

StopSignals::~StopSignals() {
  // Still waiting where main() gives up by itself: the signal only ends the thread.
  Ready();
  Stop(0);
  thread_.join();
}

void StopSignals::Ready() {
  absl::MutexLock lock(&mutex_);
  ready_ = true;
}

int StopSignals::Wait() {
  absl::MutexLock lock(&mutex_, absl::Condition(&stopped_));
  return exit_code_;
}

void StopSignals::Stop(int exit_code) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_ && exit_code_ == 0) exit_code_ = exit_code;
  }
  pthread_kill(thread_.native_handle(), SIGTERM);
}

}  // namespace expertmesh
