// The safetensors format: 8 bytes little-endian header length N, N bytes of JSON, the tensors'
// bytes.
//
// The reader is strict: it accepts what the format's reference implementation accepts, but for
// duplicate keys, entries written as arrays and extents of 2^63 and more, which no writer makes.
// Its messages carry that implementation's error names.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/tensor.h"

namespace expertmesh {

// Longest header, in bytes, that is read or written.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

struct TensorInfo {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // rank 0 means one element, an extent of 0 none
  int64_t file_offset = 0;     // of the first byte, from the start of the file; not aligned
  int64_t num_bytes = 0;       // lies wholly inside the file
};

// A file, opened for reading. Immutable: all methods may be called concurrently.
//
// Nothing is mapped, all is copied with pread: a file that is cut short while it is open is then an
// error and not a SIGBUS, no page of the file ever counts as this process's memory, and the one
// copy of a tensor goes straight to where the weights stay. Nothing is read ahead.
class SafetensorsFile {
 public:
  // Opens the file and checks its whole header. Errors of OpenRegularFile; INVALID_ARGUMENT for a
  // malformed file: the message starts with the path and names the tensor.
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(const std::string& path);

  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // The tensor's description, or NOT_FOUND.
  absl::StatusOr<const TensorInfo*> Find(const std::string& name) const;

  // Copies bytes [offset, offset + bytes) of the tensor to `destination`, whatever their alignment
  // in the file. NOT_FOUND (no such tensor), OUT_OF_RANGE (not inside the tensor), DATA_LOSS (the
  // file has become shorter), INTERNAL (read error).
  absl::Status Read(const std::string& name, int64_t offset, int64_t bytes,
                    void* destination) const;

  // The whole tensor, copied. UNIMPLEMENTED for elements of less than a byte (F4, F6_*).
  absl::StatusOr<Tensor> ReadTensor(const std::string& name) const;

 private:
  SafetensorsFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status ParseHeader(const std::string& text);
  absl::Status Malformed(const std::string& what) const;

  const std::string path_;
  const int fd_;
  size_t size_ = 0;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file that the reader and other implementations accept, with the header padded to 8 bytes
// and tensors in the order of the reference writer (descending dtype, then name), so that each is
// aligned to its element. The bytes appear under `path` all at once: they are written to a
// temporary file in the same folder, synced and renamed; on failure `path` is as it was, unless it
// was the folder's own sync after the rename that failed. INVALID_ARGUMENT (a shape or a name that
// the format cannot hold), or the error of the file system.
absl::Status WriteSafetensors(const std::string& path,
                              const std::map<std::string, TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace expertmesh
