#include "expert_server/engine/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace expertmesh {
namespace {

// The number after "name" in a file of "name value" lines, or -1.
int64_t ReadField(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = -1;
  while (file >> word) {
    if (word == name && file >> value) return value;
  }
  return -1;
}

// The number that a file starts with, or -1 (also for "max").
int64_t ReadNumber(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

}  // namespace

int64_t AvailableMemoryBytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  if (const int64_t kib = ReadField("/proc/meminfo", "MemAvailable:"); kib >= 0) {
    available = std::min(available, kib * 1024);
  }
  // Inside a container the process's own control group is mounted at the root of the hierarchy.
  // Page cache counts as used there but can be taken back.
  const int64_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const int64_t used = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0) {
    const int64_t cache = std::max<int64_t>(0, ReadField("/sys/fs/cgroup/memory.stat", "file"));
    available = std::min(available, std::max<int64_t>(0, limit - used + cache));
  }
  rlimit address_space;
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    const int64_t mapped = ReadNumber("/proc/self/statm") * sysconf(_SC_PAGESIZE);
    const int64_t left = static_cast<int64_t>(address_space.rlim_cur) - mapped;
    available = std::min(available, std::max<int64_t>(0, left));
  }
  return available;
}

}  // namespace expertmesh
