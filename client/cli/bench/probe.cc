#include "client/cli/bench/probe.h"

#include <dirent.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

#include "common/status.h"

namespace expertmesh {
namespace {

constexpr size_t kProbeBytes = size_t{96} << 20;  // read by the probe around a run
constexpr int64_t kProbeIterations = 50'000;      // of the other probe: well below a millisecond
constexpr int kIndependent = 12;  // instructions in flight: more than latency x throughput of any

// Runs work(0), ..., work(threads - 1) at once, the first on this thread; seconds from the first
// start to the last end. The threads wait for each other before they start.
double TimeTogether(int threads, const std::function<void(int)>& work) {
  std::vector<double> begin(threads), end(threads);
  std::atomic<int> missing = threads;
  const auto body = [&](int i) {
    --missing;
    while (missing > 0) std::this_thread::yield();
    begin[i] = Now();
    work(i);
    end[i] = Now();
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, i);
  body(0);
  for (std::thread& thread : others) thread.join();
  return *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
}

// Reads `bytes` (a multiple of 256) as four streams, each prefetched: one core needs that many
// lines in flight.
__attribute__((target("avx2"))) void ReadAll(const std::byte* data, size_t bytes) {
  constexpr int kStreams = 4;
  const size_t stream_bytes = bytes / kStreams;
  __m256i sums[kStreams] = {};
  for (size_t i = 0; i < stream_bytes; i += 64) {
    for (int s = 0; s < kStreams; ++s) {
      const std::byte* line = data + s * stream_bytes + i;
      _mm_prefetch(reinterpret_cast<const char*>(line + 1024), _MM_HINT_T0);
      const auto* halves = reinterpret_cast<const __m256i*>(line);
      sums[s] = _mm256_xor_si256(
          sums[s], _mm256_xor_si256(_mm256_load_si256(halves), _mm256_load_si256(halves + 1)));
    }
  }
  for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
}

// The loops of the peak: twelve independent instructions on twelve registers and nothing else,
// which only assembler can be trusted to keep as it is. Values neither grow nor become denormal.
#define FOR_TWELVE_REGISTERS(instruction) \
  ".irp i,0,1,2,3,4,5,6,7,8,9,10,11\n" instruction "\n.endr\n"
#define SPIN(iterations, instruction, first, second)                                          \
  asm volatile(                                                                               \
      FOR_TWELVE_REGISTERS("vpxor %%xmm\\i, %%xmm\\i, %%xmm\\i") "1:\n" FOR_TWELVE_REGISTERS( \
          instruction) "dec %[n]\njnz 1b\n"                                                   \
      : [n] "+r"(iterations)                                                                  \
      : [a] "x"(first), [b] "x"(second)                                                       \
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
        "xmm10", "xmm11")

__attribute__((target("avx2,fma"))) void SpinFma256(int64_t iterations) {
  SPIN(iterations, "vfmadd132ps %[a], %[b], %%ymm\\i", _mm256_set1_ps(.999f),
       _mm256_set1_ps(.001f));
}

__attribute__((target("avx512f"))) void SpinFma512(int64_t iterations) {
  SPIN(iterations, "vfmadd132ps %[a], %[b], %%zmm\\i", _mm512_set1_ps(.999f),
       _mm512_set1_ps(.001f));
}

__attribute__((target("avx512f,avx512bf16"))) void SpinDpBf16(int64_t iterations) {
  SPIN(iterations, "vdpbf16ps %[a], %[b], %%zmm\\i", _mm512_set1_epi16(0x3f00),  // 0.5
       _mm512_set1_epi16(0x3a80));                                               // about 0.001
}

double ProcessCpuSeconds(pid_t pid) {
  clockid_t clock;
  timespec time = {};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Processor seconds of a process and its descendants.
double FamilyCpuSeconds(pid_t pid) {
  double seconds = ProcessCpuSeconds(pid);
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  DIR* folder = opendir(tasks.c_str());
  if (folder == nullptr) return seconds;
  while (const dirent* task = readdir(folder)) {
    if (task->d_name[0] == '.') continue;
    std::ifstream children(absl::StrCat(tasks, "/", task->d_name, "/children"));
    for (pid_t child; children >> child;) seconds += FamilyCpuSeconds(child);
  }
  closedir(folder);
  return seconds;
}

// Waits, at most a second, until nobody else has computed for two times 30 ms.
void WaitForQuiet() {
  int quiet = 0;
  for (int i = 0; i < 30 && quiet < 2; ++i) {
    const ForeignCpu foreign;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    quiet = foreign.Seconds() <= .005 ? quiet + 1 : 0;
  }
}

}  // namespace

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) { return Percentile(std::move(values), .5); }

double Percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(p * static_cast<double>(values.size()));
  return values[std::clamp<size_t>(static_cast<size_t>(rank), 1, values.size()) - 1];
}

const char* NameOf(FmaKind kind) {
  switch (kind) {
    case FmaKind::kFma256:
      return "fma256";
    case FmaKind::kFma512:
      return "fma512";
    case FmaKind::kDpBf16:
      return "dpbf16";
  }
  return "unknown";
}

std::vector<FmaKind> SupportedFmaKinds() {
  std::vector<FmaKind> kinds;
  for (const Isa isa : SupportedIsas()) {
    kinds.push_back(CeilingOf(isa, DType::kBF16, DType::kBF16));
  }
  return kinds;
}

FmaKind CeilingOf(Isa isa, DType activations, DType weights) {
  if (isa == Isa::kAvx2) return FmaKind::kFma256;
  const bool exact = weights != DType::kF32 && weights != DType::kF16;  // in bf16
  const bool bf16 = activations == DType::kBF16 && exact;
  return isa == Isa::kAvx512Bf16 && bf16 ? FmaKind::kDpBf16 : FmaKind::kFma512;
}

Probe::Probe(int threads, size_t buffer_bytes)
    : threads_(threads), buffer_bytes_(std::max<size_t>(buffer_bytes, 2 << 20)) {
  // 4 KiB more: the prefetches run ahead.
  void* memory = mmap(nullptr, buffer_bytes_ + 4096, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, buffer_bytes_, MADV_HUGEPAGE);
  buffer_ = static_cast<std::byte*>(memory);
  // Written once: pages that were only read are all the same page of zeros.
  const size_t share = buffer_bytes_ / threads_;
  TimeTogether(threads_, [&](int i) { std::memset(buffer_ + i * share, i + 1, share); });
}

Probe::~Probe() { munmap(buffer_, buffer_bytes_ + 4096); }

double Probe::ReadBandwidth(size_t bytes) {
  bytes = std::min(bytes, buffer_bytes_);
  if (position_ + bytes > buffer_bytes_) position_ = 0;
  const std::byte* data = buffer_ + position_;
  position_ += bytes;
  const size_t share = bytes / threads_ / 256 * 256;
  const double seconds = TimeTogether(threads_, [&](int i) { ReadAll(data + i * share, share); });
  return static_cast<double>(share * threads_) / seconds;
}

double Probe::PeakFlops(FmaKind kind, int64_t iterations) const {
  const double seconds = TimeTogether(threads_, [&](int) {
    switch (kind) {
      case FmaKind::kFma256:
        return SpinFma256(iterations);
      case FmaKind::kFma512:
        return SpinFma512(iterations);
      case FmaKind::kDpBf16:
        return SpinDpBf16(iterations);
    }
  });
  const double per_instruction = kind == FmaKind::kFma256 ? 16 : kind == FmaKind::kFma512 ? 32 : 64;
  return per_instruction * kIndependent * static_cast<double>(iterations) * threads_ / seconds;
}

double ForeignCpu::Read() {
  // "cpu" user nice system idle iowait irq softirq steal
  std::ifstream stat("/proc/stat");
  std::string label;
  double ticks[8] = {};
  stat >> label;
  for (double& value : ticks) stat >> value;
  const double busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
  return busy / static_cast<double>(sysconf(_SC_CLK_TCK)) - FamilyCpuSeconds(getpid());
}

void ShowProgress(const std::string& text) {
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

absl::StatusOr<Repetitions> Repeat(int count, int threads,
                                   const std::function<absl::Status(int)>& once,
                                   const std::function<void()>& keep) {
  Repetitions result;
  for (int done = 0; done < count;) {
    const double start = Now();
    const ForeignCpu foreign;
    RETURN_IF_ERROR(once(done));
    const bool disturbed = foreign.Seconds() > std::max(.03, .07 * threads * (Now() - start));
    if (disturbed && result.dropped < 2 * count) {
      ++result.dropped;
      WaitForQuiet();
      continue;
    }
    result.contended += disturbed;
    keep();
    ++done;
  }
  ShowProgress("");
  return result;
}

absl::StatusOr<std::vector<Measurement>> Measure(Probe& probe, const std::vector<BenchCase>& cases,
                                                 const MeasureOptions& options) {
  struct Once {
    double seconds, bandwidth, peak;
  };
  std::vector<Once> once(cases.size());
  std::vector<Measurement> results(cases.size());
  for (const BenchCase& one : cases) {
    ShowProgress(absl::StrCat("warming up: ", one.name));
    for (int i = 0; i < options.warm_up; ++i) RETURN_IF_ERROR(one.run());
  }
  const size_t probe_bytes = std::min(kProbeBytes, probe.buffer_bytes() / 2);
  const auto run_all = [&](int repetition) -> absl::Status {
    probe.ReadBandwidth(probe_bytes / 4);
    double bandwidth = probe.ReadBandwidth(probe_bytes);
    for (size_t i = 0; i < cases.size(); ++i) {
      ShowProgress(absl::StrCat("repetition ", repetition + 1, " of ", options.repetitions, ": ",
                                cases[i].name));
      RETURN_IF_ERROR(cases[i].run());
      const double peak = probe.PeakFlops(cases[i].ceiling, kProbeIterations);
      const double begin = Now();
      RETURN_IF_ERROR(cases[i].run());
      const double seconds = Now() - begin;
      const double peak_after = probe.PeakFlops(cases[i].ceiling, kProbeIterations);
      const double bandwidth_after = probe.ReadBandwidth(probe_bytes);
      once[i] = {seconds, std::max(bandwidth, bandwidth_after), std::max(peak, peak_after)};
      bandwidth = bandwidth_after;
    }
    return absl::OkStatus();
  };
  const auto keep = [&] {
    for (size_t i = 0; i < cases.size(); ++i) {
      Measurement& result = results[i];
      result.bytes = cases[i].bytes();
      result.flops = cases[i].flops();
      const double memory = result.bytes / once[i].bandwidth;
      const double compute = result.flops / once[i].peak;
      result.seconds.push_back(once[i].seconds);
      result.bandwidth.push_back(once[i].bandwidth);
      result.peak.push_back(once[i].peak);
      result.efficiency.push_back(std::max(memory, compute) / once[i].seconds);
    }
  };
  ASSIGN_OR_RETURN(const Repetitions repetitions,
                   Repeat(options.repetitions, probe.threads(), run_all, keep));
  for (Measurement& result : results) {
    result.repetitions = repetitions;
    result.memory_bound =
        result.bytes / Median(result.bandwidth) > result.flops / Median(result.peak);
  }
  return results;
}

}  // namespace expertmesh
