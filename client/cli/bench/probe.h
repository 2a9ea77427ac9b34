// What this machine can do at most, and timing against it while others use the machine too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/kernels/isa.h"

namespace expertmesh {

// Seconds of a clock that only goes forward.
double Now();

// The median; values must not be empty.
double Median(std::vector<double> values);
// The value that a share `p` of them does not exceed (nearest rank); values must not be empty.
double Percentile(std::vector<double> values, double p);

// Instructions whose rate is a ceiling for a GEMM.
enum class FmaKind {
  kFma256,  // fp32 FMA, vectors of 8
  kFma512,  // fp32 FMA, vectors of 16
  kDpBf16,  // dot product of bf16 pairs, vectors of 16
};

// "fma256", "fma512", "dpbf16".
const char* NameOf(FmaKind kind);

// Those of this processor, ascending.
std::vector<FmaKind> SupportedFmaKinds();

// The ceiling of a kernel for `isa` that multiplies activations and weights of these dtypes.
FmaKind CeilingOf(Isa isa, DType activations, DType weights);

// Measures the two ceilings, on `threads` threads at once. Not thread-safe.
class Probe {
 public:
  // Takes `buffer_bytes` of memory to read from, which should exceed every cache by far.
  Probe(int threads, size_t buffer_bytes);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  int threads() const { return threads_; }
  size_t buffer_bytes() const { return buffer_bytes_; }

  // Bytes per second of reading the next `bytes` of the buffer.
  double ReadBandwidth(size_t bytes);
  // Floating-point operations per second of `iterations` rounds of independent instructions, all in
  // registers; a fused multiply-add counts as two.
  double PeakFlops(FmaKind kind, int64_t iterations) const;

 private:
  const int threads_;
  const size_t buffer_bytes_;
  std::byte* buffer_ = nullptr;
  size_t position_ = 0;
};

// Processor time that others took: /proc/stat of the whole machine (in ticks of 10 ms) without this
// process and its descendants.
class ForeignCpu {
 public:
  ForeignCpu() : start_(Read()) {}
  double Seconds() const { return Read() - start_; }

 private:
  static double Read();
  const double start_;
};

// What became of repetitions on a machine that others use too.
struct Repetitions {
  int dropped = 0;    // disturbed by others and repeated
  int contended = 0;  // disturbed too, but kept
};

// Calls `once` and, where nobody disturbed it, `keep`, until `count` have been kept. Disturbed is a
// repetition in which others took more than 7 % of the time of `threads` processors, and more than
// 30 ms, since the kernel counts in ticks of 10 ms; it is
// repeated, up to twice `count` times in all, after which such ones are kept. The first error of
// `once` ends it. `once` gets the number of the repetition, from 0.
absl::StatusOr<Repetitions> Repeat(int count, int threads,
                                   const std::function<absl::Status(int)>& once,
                                   const std::function<void()>& keep);

// Replaces the progress line on standard error, where that is a terminal; an empty text removes it.
void ShowProgress(const std::string& text);

// Something to be timed against the roofline.
struct BenchCase {
  std::string name;  // for the progress on standard error
  FmaKind ceiling = FmaKind::kFma256;
  std::function<absl::Status()> run;
  // What one run has to do at least; asked after a run, since some cases know it only then.
  std::function<double()> bytes;  // read from memory
  std::function<double()> flops;
};

struct MeasureOptions {
  int repetitions = 9;
  int warm_up = 1;  // runs of each case before the first repetition
};

// One entry per repetition that counts.
struct Measurement {
  std::vector<double> seconds;
  std::vector<double> efficiency;  // max(bytes / bandwidth, flops / peak) / seconds
  std::vector<double> bandwidth;   // probed, bytes per second
  std::vector<double> peak;        // probed, flops per second
  Repetitions repetitions;
  bool memory_bound = false;
  double bytes = 0;
  double flops = 0;

  // True when the median of the efficiency exceeds what is possible by more than 5 %: the probes
  // were disturbed more than the run.
  bool ProbeError() const { return Median(efficiency) > 1.05; }
};

// Times the cases in turn, repetition by repetition, with the rules of Repeat(): each is run once
// to warm up, then probed, timed, and probed again; the better of the probes around a run counts.
absl::StatusOr<std::vector<Measurement>> Measure(Probe& probe, const std::vector<BenchCase>& cases,
                                                 const MeasureOptions& options);

}  // namespace expertmesh
