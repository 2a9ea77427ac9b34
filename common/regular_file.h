// Reading files that nobody vouches for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertmesh {

// What an errno means: NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED (disk or descriptors),
// INVALID_ARGUMENT (a name that no file can have, or that is of something else), else INTERNAL.
absl::Status SystemError(int error, const std::string& what);

// An open file; the descriptor is the caller's to close.
struct RegularFile {
  int fd = -1;
  int64_t bytes = 0;
};

// Opens a file for reading, symbolic links followed. Never waits: a FIFO, a socket, a folder or a
// device is INVALID_ARGUMENT; errors of SystemError. Messages begin with the path.
absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path);

// Copies bytes [offset, offset + bytes) of a file. DATA_LOSS where it ends before; errors of
// SystemError. Messages begin with `what`.
absl::Status ReadAt(int fd, int64_t offset, int64_t bytes, void* destination,
                    const std::string& what);

}  // namespace expertmesh
