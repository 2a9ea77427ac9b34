#include "common/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::Status SystemError(int error, const std::string& what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case ENAMETOOLONG:
    case ELOOP:   // symbolic links
    case EISDIR:  // and what else is no file
    case ENXIO:
    case ENODEV:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::StatusOr<RegularFile> OpenRegularFile(const std::string& path) {
  // O_NONBLOCK: opening a FIFO would wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return SystemError(errno, absl::StrCat(path, ": open"));
  struct stat status;
  absl::Status error;
  if (fstat(fd, &status) != 0) {
    error = SystemError(errno, absl::StrCat(path, ": fstat"));
  } else if (!S_ISREG(status.st_mode)) {
    const char* const given = S_ISDIR(status.st_mode)    ? "a folder"
                              : S_ISFIFO(status.st_mode) ? "a FIFO"
                                                         : "a device";
    error = absl::InvalidArgumentError(
        absl::StrCat(path, ": not a regular file: expected a file, given ", given));
  }
  if (!error.ok()) {
    close(fd);
    return error;
  }
  return RegularFile{fd, static_cast<int64_t>(status.st_size)};
}

absl::Status ReadAt(int fd, int64_t offset, int64_t bytes, void* destination,
                    const std::string& what) {
  auto* next = static_cast<std::byte*>(destination);
  while (bytes > 0) {
    const ssize_t got = pread(fd, next, static_cast<size_t>(bytes), offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      return SystemError(errno, absl::StrCat(what, ": read"));
    }
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(what, ": the file has become shorter: it ends at byte ", offset));
    }
    next += got;
    offset += got;
    bytes -= got;
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
