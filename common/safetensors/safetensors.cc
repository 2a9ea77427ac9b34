#include "common/safetensors/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/regular_file.h"
#include "common/safetensors/strict_json.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr size_t kLengthBytes = sizeof(uint64_t);

// A tensor as the header states it, before any check of its numbers against each other.
struct Entry {
  std::string name;
  DType dtype;
  std::vector<uint64_t> shape;
  uint64_t begin;
  uint64_t end;
};

// Elements times bits, or nothing when that leaves 63 bits; extents are multiplied in their order,
// as the reference implementation does.
std::optional<uint64_t> NumBits(DType dtype, const std::vector<uint64_t>& shape) {
  int64_t bits = 1;
  for (const uint64_t extent : shape) {
    if (extent > INT64_MAX || __builtin_mul_overflow(bits, static_cast<int64_t>(extent), &bits)) {
      return std::nullopt;
    }
  }
  if (__builtin_mul_overflow(bits, int64_t{BitsOf(dtype)}, &bits)) return std::nullopt;
  return static_cast<uint64_t>(bits);
}

// Text of an error, or the entry.
absl::StatusOr<Entry> ParseEntry(const std::string& name, const json& value) {
  const auto refused = [&name](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", name, "': InvalidHeaderDeserialization: ", what));
  };
  if (!value.is_object()) {
    return refused(absl::StrCat("expected an object, given ", value.type_name()));
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return refused(absl::StrCat("no ", key));
  }
  const json& dtype = value["dtype"];
  if (!dtype.is_string()) return refused(absl::StrCat("dtype ", dtype.dump(), " is no string"));
  const std::optional<DType> known = DTypeFromName(dtype.get<std::string>());
  if (!known) return refused(absl::StrCat("unknown dtype ", dtype.dump()));

  Entry entry{.name = name, .dtype = *known, .shape = {}, .begin = 0, .end = 0};
  const json& shape = value["shape"];
  if (!shape.is_array()) return refused(absl::StrCat("shape is no array but ", shape.type_name()));
  for (const json& extent : shape) {
    if (!extent.is_number_unsigned()) {
      return refused(absl::StrCat("shape has ", extent.dump(), ", expected unsigned integers"));
    }
    entry.shape.push_back(extent.get<uint64_t>());
  }
  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return refused("data_offsets: expected two unsigned integers");
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.end = offsets[1].get<uint64_t>();
  return entry;
}

// Writes all of `bytes`.
absl::Status WriteAll(int fd, const void* data, size_t bytes, const std::string& path) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written = write(fd, next, bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      return SystemError(errno, absl::StrCat(path, ": write"));
    }
    next += written;
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

// The header with its length in front, padded to a multiple of 8 bytes, of tensors in this order.
absl::StatusOr<std::string> MakeHeader(const std::vector<std::pair<std::string, TensorView>>& order,
                                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : order) {
    if (name == "__metadata__")
      return absl::InvalidArgumentError("'__metadata__' is no tensor name");
    const std::vector<uint64_t> shape(tensor.shape.begin(), tensor.shape.end());
    const std::optional<uint64_t> bits = NumBits(tensor.dtype, shape);
    if (!bits || *bits % 8 != 0) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "': ", NameOf(tensor.dtype),
                                                     " ", ShapeToString(tensor.shape),
                                                     " is no whole number of bytes in 63 bits"));
    }
    header[name] = {{"dtype", NameOf(tensor.dtype)},
                    {"shape", shape},
                    {"data_offsets", {offset, offset + *bits / 8}}};
    offset += *bits / 8;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("a name or metadata: ", error.what()));
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(
        absl::StrCat("HeaderTooLarge: ", text.size(), " bytes, at most ", kMaxSafetensorsHeader));
  }
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

absl::Status WriteAndSync(int fd, const std::string& path, const std::string& header,
                          const std::vector<std::pair<std::string, TensorView>>& order) {
  RETURN_IF_ERROR(WriteAll(fd, header.data(), header.size(), path));
  for (const auto& [name, tensor] : order) {
    const std::vector<uint64_t> shape(tensor.shape.begin(), tensor.shape.end());
    RETURN_IF_ERROR(WriteAll(fd, tensor.data, *NumBits(tensor.dtype, shape) / 8, path));
  }
  if (fsync(fd) != 0) return SystemError(errno, absl::StrCat(path, ": fsync"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  ASSIGN_OR_RETURN(const RegularFile opened, OpenRegularFile(path));
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile(path, opened.fd));
  file->size_ = static_cast<size_t>(opened.bytes);
  if (file->size_ < kLengthBytes) {
    return file->Malformed(absl::StrCat("HeaderTooSmall: the file has ", file->size_,
                                        " bytes, expected at least ", kLengthBytes));
  }
  // What is read ahead of a tensor would be others', which another server holds.
  posix_fadvise(opened.fd, 0, 0, POSIX_FADV_RANDOM);
  uint64_t length;
  RETURN_IF_ERROR(ReadAt(opened.fd, 0, sizeof(length), &length, path));
  if (length > kMaxSafetensorsHeader) {
    return file->Malformed(absl::StrCat("HeaderTooLarge: the header has ", length,
                                        " bytes, at most ", kMaxSafetensorsHeader));
  }
  if (length > file->size_ - kLengthBytes) {
    return file->Malformed(absl::StrCat("InvalidHeaderLength: the header has ", length,
                                        " bytes, the file ", file->size_ - kLengthBytes,
                                        " after its length"));
  }
  std::string header(length, '\0');
  RETURN_IF_ERROR(
      ReadAt(opened.fd, kLengthBytes, static_cast<int64_t>(length), header.data(), path));
  RETURN_IF_ERROR(file->ParseHeader(header));
  return file;
}

SafetensorsFile::~SafetensorsFile() { close(fd_); }

absl::Status SafetensorsFile::Malformed(const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, ": ", what));
}

absl::Status SafetensorsFile::ParseHeader(const std::string& text) {
  const absl::StatusOr<json> header = ParseStrictJson(text);
  if (!header.ok()) {
    return Malformed(absl::StrCat("InvalidHeader: ", header.status().message()));
  }
  if (!header->is_object()) {
    return Malformed(absl::StrCat("InvalidHeaderDeserialization: expected an object, given ",
                                  header->type_name()));
  }

  std::vector<Entry> entries;
  for (const auto& [name, value] : header->items()) {
    if (name == "__metadata__") {
      if (value.is_null()) continue;
      if (!value.is_object()) {
        return Malformed(
            absl::StrCat("InvalidHeaderDeserialization: __metadata__: expected an object, given ",
                         value.type_name()));
      }
      for (const auto& [key, entry] : value.items()) {
        if (!entry.is_string()) {
          return Malformed(absl::StrCat("InvalidHeaderDeserialization: __metadata__: '", key,
                                        "': expected a string, given ", entry.dump()));
        }
        metadata_[key] = entry.get<std::string>();
      }
      continue;
    }
    absl::StatusOr<Entry> entry = ParseEntry(name, value);
    if (!entry.ok()) return Malformed(std::string(entry.status().message()));
    entries.push_back(*std::move(entry));
  }

  // Every byte after the header belongs to exactly one tensor.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  const uint64_t data_offset = kLengthBytes + text.size();
  const uint64_t available = size_ - data_offset;
  uint64_t expected_begin = 0;
  for (const Entry& entry : entries) {
    const auto malformed = [&](const std::string& what) {
      return Malformed(absl::StrCat("tensor '", entry.name, "': ", what));
    };
    if (entry.begin != expected_begin || entry.end < entry.begin) {
      return malformed(absl::StrCat("InvalidOffset: data_offsets [", entry.begin, ", ", entry.end,
                                    "], expected to begin at ", expected_begin,
                                    ", where the previous tensor ends, and not to end before"));
    }
    const std::string what = absl::StrCat(NameOf(entry.dtype), " ", json(entry.shape).dump());
    const std::optional<uint64_t> bits = NumBits(entry.dtype, entry.shape);
    if (!bits) return malformed(absl::StrCat("ValidationOverflow: the size of ", what));
    if (*bits % 8 != 0) {
      return malformed(absl::StrCat("MisalignedSlice: ", what, " is no whole number of bytes"));
    }
    if (entry.end - entry.begin != *bits / 8) {
      return malformed(absl::StrCat("TensorInvalidInfo: data_offsets cover ",
                                    entry.end - entry.begin, " bytes, ", what, " needs ",
                                    *bits / 8));
    }
    if (entry.end > available) {
      return malformed(absl::StrCat("MetadataIncompleteBuffer: ends at byte ", entry.end,
                                    " of the data, the file has ", available));
    }
    expected_begin = entry.end;
    tensors_[entry.name] = {.dtype = entry.dtype,
                            .shape = std::vector<int64_t>(entry.shape.begin(), entry.shape.end()),
                            .file_offset = static_cast<int64_t>(data_offset + entry.begin),
                            .num_bytes = static_cast<int64_t>(*bits / 8)};
  }
  if (expected_begin != available) {
    return Malformed(absl::StrCat("MetadataIncompleteBuffer: the tensors cover ", expected_begin,
                                  " bytes of the data, the file has ", available));
  }
  return absl::OkStatus();
}

absl::StatusOr<const TensorInfo*> SafetensorsFile::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, ": TensorNotFound: '", name, "'"));
  }
  return &found->second;
}

absl::Status SafetensorsFile::Read(const std::string& name, int64_t offset, int64_t bytes,
                                   void* destination) const {
  ASSIGN_OR_RETURN(const TensorInfo* info, Find(name));
  if (offset < 0 || bytes < 0 || offset > info->num_bytes || bytes > info->num_bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": tensor '", name, "': ", bytes, " bytes at ",
                                              offset, ", it has ", info->num_bytes));
  }
  return ReadAt(fd_, info->file_offset + offset, bytes, destination,
                absl::StrCat(path_, ": tensor '", name, "'"));
}

absl::StatusOr<Tensor> SafetensorsFile::ReadTensor(const std::string& name) const {
  ASSIGN_OR_RETURN(const TensorInfo* info, Find(name));
  if (BitsOf(info->dtype) % 8 != 0) {
    return absl::UnimplementedError(absl::StrCat(path_, ": tensor '", name,
                                                 "': expected elements of whole bytes, given ",
                                                 NameOf(info->dtype)));
  }
  Tensor tensor(info->dtype, info->shape);
  RETURN_IF_ERROR(Read(name, 0, info->num_bytes, tensor.data()));
  return tensor;
}

absl::Status WriteSafetensors(const std::string& path,
                              const std::map<std::string, TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<std::string, TensorView>> order(tensors.begin(), tensors.end());
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.second.dtype > b.second.dtype; });
  absl::StatusOr<std::string> header = MakeHeader(order, metadata);
  if (!header.ok()) {
    return absl::Status(header.status().code(),
                        absl::StrCat(path, ": ", header.status().message()));
  }

  // A name that nobody has: not even a process of the same id that was killed while it wrote.
  static std::atomic<uint64_t> counter{0};
  std::string temporary;
  int fd = -1;
  do {
    temporary =
        absl::StrCat(path, ".tmp-", getpid(), "-", counter.fetch_add(1, std::memory_order_relaxed));
    fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EEXIST);
  if (fd < 0) return SystemError(errno, absl::StrCat(temporary, ": open"));
  absl::Status status = WriteAndSync(fd, temporary, *header, order);
  if (close(fd) != 0 && status.ok()) {
    status = SystemError(errno, absl::StrCat(temporary, ": close"));
  }
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = SystemError(errno, absl::StrCat(temporary, ": rename to ", path));
  }
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  // The rename itself reaches the disk with the folder.
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : path.substr(0, slash);
  const int folder_fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) return SystemError(errno, absl::StrCat(folder, ": open"));
  if (fsync(folder_fd) != 0) status = SystemError(errno, absl::StrCat(folder, ": fsync"));
  close(folder_fd);
  return status;
}

}  // namespace expertmesh
