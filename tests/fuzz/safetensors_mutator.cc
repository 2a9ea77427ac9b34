// Mutations of a safetensors file. Few changes of a header survive that leave its length, in the
// first 8 bytes, the offsets in it or the number of bytes of data as they were: most are made to
// fit here.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/tensor.h"
#include "tests/fuzz/models.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using expertmesh::fuzz::TensorsOf;
using expertmesh::fuzz::TinyModel;
using expertmesh::fuzz::TinyModels;
using nlohmann::json;
using Random = std::minstd_rand;

size_t Below(size_t limit, Random& random) { return random() % limit; }

template <typename List>
const auto& AnyOf(const List& list, Random& random) {
  return list[Below(list.size(), random)];
}

json Entry(const std::string& dtype, const std::vector<int64_t>& shape) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {0, 0}}};
}

// Adds what one of the models has in one of its layouts, or all of that but one tensor.
void AddModel(json& header, Random& random) {
  const TinyModel& model = AnyOf(TinyModels(), random);
  auto tensors = TensorsOf(model, AnyOf(model.family->layouts, random));
  if (Below(4, random) == 0) tensors.erase(tensors.begin() + Below(tensors.size(), random));
  static const std::vector<std::string> kDTypes = {"F32", "BF16", "F16"};
  const std::string& dtype = AnyOf(kDTypes, random);
  for (const auto& tensor : tensors) {
    header[tensor.name] = Entry(tensor.dtype ? NameOf(*tensor.dtype) : dtype, tensor.shape);
  }
}

// Changes one of the header's tensors.
void ChangeTensor(json& header, Random& random) {
  if (header.empty()) return;
  auto found = header.begin();
  std::advance(found, Below(header.size(), random));
  std::string name = found.key();
  json entry = *found;
  if (!entry.is_object() || !entry.contains("shape") || !entry["shape"].is_array()) return;
  json& shape = entry["shape"];
  switch (Below(6, random)) {
    case 0:
      header.erase(name);
      return;
    case 1: {
      const TinyModel& model = AnyOf(TinyModels(), random);
      name = AnyOf(TensorsOf(model, AnyOf(model.family->layouts, random)), random).name;
      break;
    }
    case 2:
      header.erase(name);
      for (char& c : name) {
        if (c >= '0' && c <= '9') c = static_cast<char>('0' + Below(10, random));
      }
      break;
    case 3: {
      static const std::vector<std::string> kDTypes = {"F32", "BF16", "F16", "I32",     "F64",
                                                       "U8",  "F4",   "I64", "F8_E4M3", "F8_E8M0"};
      entry["dtype"] = AnyOf(kDTypes, random);
      break;
    }
    case 4:
      if (shape.empty()) return;
      shape[Below(shape.size(), random)] = Below(5, random);
      break;
    case 5:
      shape.insert(shape.begin() + Below(shape.size() + 1, random), Below(3, random));
  }
  header[name] = entry;
}

// Gives each tensor its place behind the one before; returns where the last one ends, or nothing
// where that is not to be known.
std::optional<size_t> Tile(json& header, size_t most) {
  size_t end = 0;
  for (auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) return {};
    const auto dtype = expertmesh::DTypeFromName(entry["dtype"].get<std::string>());
    if (!dtype || !entry.contains("shape") || !entry["shape"].is_array()) return {};
    size_t bits = expertmesh::BitsOf(*dtype);
    for (const json& extent : entry["shape"]) {
      if (!extent.is_number_integer() || extent.get<uint64_t>() > most) return {};
      bits *= extent.get<uint64_t>();
      if (bits > 8 * most) return {};
    }
    entry["data_offsets"] = {end, end + bits / 8};
    end += bits / 8;
  }
  return end;
}

// Another header of whole tensors; nothing if `text` is none.
std::optional<std::string> Restructure(const std::string& text, size_t most, Random& random,
                                       size_t* data_bytes) {
  json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return {};
  if (Below(8, random) == 0) AddModel(header, random);
  for (size_t changes = Below(3, random); changes > 0; --changes) ChangeTensor(header, random);
  const auto end = Tile(header, most);
  if (!end) return {};
  *data_bytes = *end;
  return header.dump(-1, ' ', false, json::error_handler_t::replace);
}

// As many bytes as the largest number in the header: an end of the data, if that is right.
size_t LargestNumber(const std::string& header, size_t most) {
  size_t largest = 0, number = 0;
  for (const char c : header) {
    number = c >= '0' && c <= '9' ? std::min<size_t>(number * 10 + (c - '0'), most) : 0;
    if (number < most) largest = std::max(largest, number);
  }
  return largest;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  Random random(seed);
  uint64_t length = 0;
  if (size >= sizeof(length)) std::memcpy(&length, data, sizeof(length));
  const size_t before = sizeof(length) + length;  // the data
  const size_t how = Below(8, random);
  if (size < sizeof(length) || length > size - sizeof(length) || how == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  if (how == 1 && size > before) {  // the data alone, and no more of it
    const size_t changed = LLVMFuzzerMutate(data + before, size - before, size - before);
    std::fill(data + before + changed, data + size, uint8_t{0});
    return size;
  }

  std::string header(reinterpret_cast<const char*>(data) + sizeof(length), length);
  size_t data_bytes = size - before;
  const auto restructured =
      how < 5 ? Restructure(header, max_size, random, &data_bytes) : std::nullopt;
  if (restructured && before < max_size && restructured->size() <= max_size - sizeof(length)) {
    header = *restructured;
  } else {
    header.resize(max_size - sizeof(length));
    header.resize(
        LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(header.data()), length, header.size()));
    if (how % 2 == 0) data_bytes = LargestNumber(header, max_size);
  }
  length = header.size();
  data_bytes = std::min<size_t>(data_bytes, max_size - sizeof(length) - length);
  std::memcpy(data, &length, sizeof(length));
  std::memcpy(data + sizeof(length), header.data(), length);
  for (size_t i = 0; i < data_bytes; ++i) {
    data[sizeof(length) + length + i] = static_cast<uint8_t>(i % 64);  // finite in every format
  }
  return sizeof(length) + length + data_bytes;
}
