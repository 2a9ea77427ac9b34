#include "common/model/shards.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "common/regular_file.h"
#include "common/safetensors/strict_json.h"
#include "common/status.h"

namespace expertmesh {
namespace {

using nlohmann::json;

constexpr int64_t kMaxWholeFile = 256 << 20;

// What is wrong with the name of a file in the index, or nothing. It must stay in the model's
// folder (a symbolic link there may lead anywhere).
std::string WrongName(const std::string& name) {
  const std::filesystem::path path(name);
  const auto is_long = [](const std::filesystem::path& part) {
    return part.native().size() > NAME_MAX;
  };
  if (name.size() >= PATH_MAX) {
    return absl::StrCat("expected a path of less than ", PATH_MAX, " bytes, given one of ",
                        name.size());
  }
  if (const auto part = std::find_if(path.begin(), path.end(), is_long); part != path.end()) {
    return absl::StrCat("expected file names of at most ", NAME_MAX, " bytes, given one of ",
                        part->native().size());
  }
  if (name.empty() || name.find('\0') != std::string::npos || path.is_absolute() ||
      std::find(path.begin(), path.end(), "..") != path.end()) {
    return absl::StrCat(json(name).dump(), " is no path inside the model's folder");
  }
  return "";
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
    const std::string name = file.get<std::string>();
    if (const std::string wrong = WrongName(name); !wrong.empty()) {
      return malformed(absl::StrCat("weight_map: '", tensor, "': ", wrong));
    }
    files[tensor] = name;
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
  ASSIGN_OR_RETURN(const RegularFile file, OpenRegularFile(path));
  const absl::Cleanup closed = [&file] { close(file.fd); };
  if (file.bytes > kMaxWholeFile) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at most ", kMaxWholeFile, " bytes, given ", file.bytes));
  }
  std::string text(static_cast<size_t>(file.bytes), '\0');
  RETURN_IF_ERROR(ReadAt(file.fd, 0, file.bytes, text.data(), path));
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
    const absl::Status added = AddFile(absl::StrCat(directory, "/", file), &shards);
    if (!added.ok()) {
      return absl::Status(added.code(),
                          absl::StrCat(index, ": weight_map: '", tensor, "': ", added.message()));
    }
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
