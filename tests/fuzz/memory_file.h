// Files without a disk, and folders that name them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/fuzz/check.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {

// A file whose content is replaced for every input.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { FUZZ_CHECK(fd_ >= 0); }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  void Set(Bytes bytes) {
    FUZZ_CHECK(ftruncate(fd_, 0) == 0);
    FUZZ_CHECK(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  void Set(const std::string& text) {
    Set(Bytes(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  const int fd_;
};

// A folder of symbolic links to memory files; removed with the object.
class MemoryFolder {
 public:
  MemoryFolder() {
    path_ = (std::filesystem::temp_directory_path() / "fuzz.XXXXXX").string();
    FUZZ_CHECK(mkdtemp(path_.data()) != nullptr);
  }
  ~MemoryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;

  void Link(const std::string& name, const MemoryFile& file) {
    std::filesystem::create_symlink(file.path(), std::filesystem::path(path_) / name);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace expertmesh::fuzz
