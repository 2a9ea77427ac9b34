// Every target of the fuzzers over its committed inputs: the corpus, and what once crashed.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/models.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {
namespace {

// Runs the target over all files of both folders; returns how many there were.
int RunOver(const std::string& target, void (*run)(Bytes)) {
  std::vector<std::filesystem::path> paths;
  for (const char* kind : {"corpus", "regressions"}) {
    const std::filesystem::path folder =
        std::filesystem::path(EXPERTMESH_FUZZ_DATA) / kind / target;
    if (!std::filesystem::exists(folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  for (const std::filesystem::path& path : paths) {
    std::cout << path.string()
              << std::endl;  // flushed: the last one printed is the one that crashes
    std::ifstream stream(path, std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(stream), {});
    run({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  }
  return static_cast<int>(paths.size());
}

TEST(FuzzCorpus, Safetensors) { EXPECT_GT(RunOver("safetensors", Safetensors), 10); }
TEST(FuzzCorpus, Config) { EXPECT_GT(RunOver("config", Config), 10); }
TEST(FuzzCorpus, Dispatch) { EXPECT_GT(RunOver("dispatch", Dispatch), 10); }
TEST(FuzzCorpus, Forward) { EXPECT_GT(RunOver("forward", Forward), 10); }

// A fuzzer that lacks a family's name does not find it.
TEST(FuzzDictionary, HasEveryFamily) {
  std::ifstream stream(EXPERTMESH_FUZZ_DATA "/config.dict");
  const std::string words(std::istreambuf_iterator<char>(stream), {});
  for (const Family& family : Families()) {
    EXPECT_NE(words.find("\"\\\"" + family.model_type + "\\\"\""), std::string::npos)
        << family.model_type;
  }
}

}  // namespace
}  // namespace expertmesh::fuzz
