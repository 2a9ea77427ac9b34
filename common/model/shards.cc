#include "common/model/shards.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "common/safetensors/strict_json.h"
#include "common/status.h"

namespace expertmesh {
namespace {

using nlohmann::json;

constexpr uintmax_t kMaxWholeFile = 256 << 20;

// A name in the index must stay in the model's folder (a symbolic link there may lead anywhere).
bool StaysInFolder(const std::string& name) {
  const std::filesystem::path path(name);
  if (name.empty() || name.find('\0') != std::string::npos || path.is_absolute()) return false;
  for (const std::filesystem::path& part : path) {
    if (part == "..") return false;
  }
  return true;
}

// The tensor -> file map of the index.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  const auto malformed = [&path](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path));
  const absl::StatusOr<json> index = ParseStrictJson(text);
  if (!index.ok()) return malformed(std::string(index.status().message()));
  if (!index->is_object() || !index->contains("weight_map") ||
      !(*index)["weight_map"].is_object()) {
    return malformed("weight_map: expected an object with a file for every tensor");
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : (*index)["weight_map"].items()) {
    if (file.is_array()) {
      return malformed(absl::StrCat("weight_map is inverted: '", tensor,
                                    "' has a list, expected tensor names with one file each"));
    }
    if (!file.is_string()) {
      return malformed(
          absl::StrCat("weight_map: '", tensor, "': expected a file name, given ", file.dump()));
    }
    if (!StaysInFolder(file.get<std::string>())) {
      return malformed(absl::StrCat("weight_map: '", tensor, "': ", file.dump(),
                                    " is no path inside the model's folder"));
    }
    files[tensor] = file.get<std::string>();
  }
  return files;
}

// Opens a file and takes up its tensors.
absl::Status AddFile(const std::string& path, Shards* shards) {
  ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const auto& [name, info] : file->tensors()) {
    const auto [present, inserted] = shards->tensors.insert({name, {file.get(), &info}});
    if (!inserted) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is in both ",
                                                     present->second.file->path(), " and ", path));
    }
  }
  shards->files.push_back(std::move(file));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path) {
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) {
    return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  }
  if (error) return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.message()));
  if (size > kMaxWholeFile) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", size, " bytes, at most ", kMaxWholeFile));
  }
  std::string text(size, '\0');
  std::ifstream stream(path, std::ios::binary);
  if (!stream.read(text.data(), static_cast<std::streamsize>(size))) {
    return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

absl::StatusOr<Shards> OpenShards(const std::string& directory) {
  Shards shards;
  const std::string single = directory + "/model.safetensors";
  const std::string index = single + ".index.json";
  std::error_code error;
  if (std::filesystem::exists(single, error)) {
    RETURN_IF_ERROR(AddFile(single, &shards));
    return shards;
  }
  if (!std::filesystem::exists(index, error)) {
    return absl::NotFoundError(absl::StrCat(
        directory, ": neither model.safetensors nor model.safetensors.index.json is there"));
  }

  ASSIGN_OR_RETURN(const auto weight_map, ReadIndex(index));
  std::map<std::string, const SafetensorsFile*> opened;
  for (const auto& [tensor, file] : weight_map) {
    const auto [entry, inserted] = opened.insert({file, nullptr});
    if (!inserted) continue;
    RETURN_IF_ERROR(AddFile(absl::StrCat(directory, "/", file), &shards));
    entry->second = shards.files.back().get();
  }
  for (const auto& [tensor, file] : weight_map) {
    const auto found = shards.tensors.find(tensor);
    if (found == shards.tensors.end() || found->second.file != opened.at(file)) {
      return absl::InvalidArgumentError(
          absl::StrCat(index, ": weight_map: tensor '", tensor, "' is not in '", file, "'"));
    }
  }
  for (const auto& [tensor, location] : shards.tensors) {
    if (weight_map.count(tensor) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          index, ": weight_map: tensor '", tensor, "' of ", location.file->path(), " is missing"));
    }
  }
  return shards;
}

}  // namespace expertmesh
