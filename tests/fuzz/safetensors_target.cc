#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/safetensors/safetensors.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

// A file without a disk, whose content is replaced for every input.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { FUZZ_CHECK(fd_ >= 0); }
  ~MemoryFile() { close(fd_); }

  void Set(Bytes bytes) {
    FUZZ_CHECK(ftruncate(fd_, 0) == 0);
    FUZZ_CHECK(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  const int fd_;
};

}  // namespace

void Safetensors(Bytes bytes) {
  static MemoryFile memory;
  memory.Set(bytes);
  const auto file = SafetensorsFile::Open(memory.path());
  if (!file.ok()) return;

  // The tensors tile the end of the file.
  std::vector<const TensorInfo*> infos;
  for (const auto& [name, info] : (*file)->tensors()) infos.push_back(&info);
  std::sort(infos.begin(), infos.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return a->file_offset + a->num_bytes < b->file_offset + b->num_bytes;
  });
  auto end = static_cast<int64_t>(bytes.size());
  for (auto info = infos.rbegin(); info != infos.rend(); ++info) {
    FUZZ_CHECK((*info)->num_bytes >= 0 && (*info)->file_offset + (*info)->num_bytes == end);
    end = (*info)->file_offset;
  }
  FUZZ_CHECK(end >= 8);

  for (const auto& [name, info] : (*file)->tensors()) {
    FUZZ_CHECK(NumElements(info.shape) * BitsOf(info.dtype) == info.num_bytes * 8);
    std::vector<uint8_t> content(static_cast<size_t>(info.num_bytes));
    FUZZ_CHECK((*file)->Read(name, 0, info.num_bytes, content.data()).ok());
    FUZZ_CHECK(std::equal(content.begin(), content.end(), bytes.begin() + info.file_offset));
    FUZZ_CHECK(!(*file)->Read(name, 1, info.num_bytes, content.data()).ok());
    const auto tensor = (*file)->ReadTensor(name);
    FUZZ_CHECK(tensor.ok() == (BitsOf(info.dtype) % 8 == 0));
    if (tensor.ok()) FUZZ_CHECK(tensor->shape() == info.shape);
  }
}

}  // namespace expertmesh::fuzz
