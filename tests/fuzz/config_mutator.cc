// Mutations of a config.json: of its text, or of the values of its keys, some of which are set to
// those that a model of the weights at hand would have.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "tests/fuzz/models.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  using nlohmann::json;
  std::minstd_rand random(seed);
  if (random() % 8 != 0) return LLVMFuzzerMutate(data, size, max_size);
  json config = json::parse(data, data + size, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) return LLVMFuzzerMutate(data, size, max_size);
  const auto& models = expertmesh::fuzz::TinyModels();
  const json& other = models[random() % models.size()].config;
  const bool all = random() % 2 == 0;
  for (const auto& [key, value] : other.items()) {
    if (all || random() % 2 == 0) config[key] = value;
  }
  const std::string text = config.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, text.data(), text.size());
  return text.size();
}
