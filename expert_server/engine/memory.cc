#include "expert_server/engine/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace expertmesh {
namespace {

// The number after "name" in a file of "name value" lines, or -1.
int64_t ReadField(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = -1;
  while (file >> word) {
    if (word == name && file >> value) return value;
  }
  return -1;
}

// The number that a file starts with, or -1 (also for "max").
int64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

// What the process's control group (version 2) and its parents have left. Pages of files on disk
// count as used there, but are taken back when they are needed.
int64_t ControlGroupBytes() {
  int64_t least = std::numeric_limits<int64_t>::max();
  std::ifstream self("/proc/self/cgroup");
  std::string group;  // "0::/path"
  while (std::getline(self, group) && group.rfind("0::", 0) != 0) {
  }
  std::filesystem::path path = group.size() > 3 ? group.substr(3) : "/";
  while (true) {
    const std::string folder = "/sys/fs/cgroup" + path.string() + "/";
    const int64_t limit = ReadNumber(folder + "memory.max");
    const int64_t used = ReadNumber(folder + "memory.current");
    if (limit >= 0 && used >= 0) {
      const std::string stat = folder + "memory.stat";
      const int64_t files = std::max<int64_t>(0, ReadField(stat, "active_file")) +
                            std::max<int64_t>(0, ReadField(stat, "inactive_file"));
      least = std::min(least, std::max<int64_t>(0, limit - used + files));
    }
    if (path == path.parent_path()) return least;
    path = path.parent_path();
  }
}

}  // namespace

int64_t AvailableMemoryBytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  if (const int64_t kib = ReadField("/proc/meminfo", "MemAvailable:"); kib >= 0) {
    available = std::min(available, kib * 1024);
  }
  available = std::min(available, ControlGroupBytes());
  rlimit address_space;
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    const int64_t mapped = ReadNumber("/proc/self/statm") * sysconf(_SC_PAGESIZE);
    const int64_t left = static_cast<int64_t>(address_space.rlim_cur) - mapped;
    available = std::min(available, std::max<int64_t>(0, left));
  }
  return available;
}

}  // namespace expertmesh
