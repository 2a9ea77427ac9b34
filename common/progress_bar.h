// A progress bar for long work, on standard error when that is a terminal; otherwise one line at
// the end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace expertmesh {

// Not thread-safe.
class ProgressBar {
 public:
  explicit ProgressBar(const std::string& what);
  // Shows how much is done, in bytes, with rate and remaining time; at most ten times a second.
  void Update(int64_t done, int64_t total);
  // Ends the line and says how much was done in what time; nothing if nothing was begun.
  void Finish();

 private:
  using Clock = std::chrono::steady_clock;
  const std::string what_;
  const bool terminal_;
  const Clock::time_point start_;
  Clock::time_point shown_;
  int64_t done_ = 0;
  bool begun_ = false;  // Update() was called
};

}  // namespace expertmesh
