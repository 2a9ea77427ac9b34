#include "common/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace expertmesh {

ProgressBar::ProgressBar(const std::string& what)
    : what_(what),
      terminal_(isatty(STDERR_FILENO) && std::getenv("NO_COLOR") == nullptr),
      start_(Clock::now()),
      shown_(start_) {}

void ProgressBar::Update(int64_t done, int64_t total) {
  begun_ = true;
  done_ = done;
  const Clock::time_point now = Clock::now();
  if (!terminal_ || (now - shown_ < std::chrono::milliseconds(100) && done < total)) return;
  shown_ = now;
  const double seconds = std::max(1e-3, std::chrono::duration<double>(now - start_).count());
  const double rate = static_cast<double>(done) / seconds;
  const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
  constexpr int kWidth = 30;
  char bar[kWidth + 1] = {};
  for (int i = 0; i < kWidth; ++i) bar[i] = i < share * kWidth ? '#' : '.';
  std::fprintf(stderr, "\r%s [%s] %3.0f %%  %.1f MiB/s  %.0f s left ", what_.c_str(), bar,
               share * 100, rate / (1 << 20),
               rate > 0 ? static_cast<double>(total - done) / rate : 0.0);
}

void ProgressBar::Finish() {
  if (!begun_) return;
  const double seconds =
      std::max(1e-3, std::chrono::duration<double>(Clock::now() - start_).count());
  std::fprintf(stderr, "%s%s: %.1f MiB in %.2f s (%.1f MiB/s)\n", terminal_ ? "\n" : "",
               what_.c_str(), static_cast<double>(done_) / (1 << 20), seconds,
               static_cast<double>(done_) / (1 << 20) / seconds);
}

}  // namespace expertmesh
