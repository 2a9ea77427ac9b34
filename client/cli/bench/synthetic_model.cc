#include "client/cli/bench/synthetic_model.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/safetensors/safetensors.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

constexpr int64_t kSlack = 1 << 16;  // elements by which the experts' pieces of a block may differ

// SplitMix64: a generator whose n-th value needs no other.
uint64_t Random(uint64_t seed, uint64_t n) {
  uint64_t z = seed * 0xd1342543de82ef95u + (n + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::string ConfigText(const MoeShape& shape, DType dtype) {
  const char* torch_name = dtype == DType::kF32    ? "float32"
                           : dtype == DType::kBF16 ? "bfloat16"
                                                   : "float16";
  nlohmann::ordered_json config = {{"model_type", shape.model_type},
                                   {"dtype", torch_name},
                                   {"hidden_size", shape.hidden_size},
                                   {"hidden_act", "silu"},
                                   {"num_hidden_layers", 1},
                                   {"num_attention_heads", 1},
                                   {"num_key_value_heads", 1},
                                   {"num_experts", shape.num_experts},
                                   {"num_experts_per_tok", shape.top_k},
                                   {"norm_topk_prob", shape.normalise},
                                   {"vocab_size", 1},
                                   {"pad_token_id", nullptr},
                                   {"bos_token_id", nullptr},
                                   {"eos_token_id", nullptr}};
  if (shape.model_type == "qwen3_moe") {
    config["moe_intermediate_size"] = shape.intermediate_size;
    config["intermediate_size"] = shape.intermediate_size;
    config["decoder_sparse_step"] = 1;
    config["mlp_only_layers"] = nlohmann::ordered_json::array();
  } else {
    config["intermediate_size"] = shape.intermediate_size;
  }
  return config.dump(2) + "\n";
}

}  // namespace

absl::StatusOr<MoeShape> ParseMoeShape(const std::string& text) {
  if (text == "olmoe-1b-7b") return MoeShape{text, "olmoe", 2048, 1024, 64, 8, false};
  if (text == "qwen3-30b-a3b") return MoeShape{text, "qwen3_moe", 2048, 768, 128, 8, true};
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  int32_t sizes[4];
  bool good = parts.size() == 4;
  for (size_t i = 0; good && i < 4; ++i) {
    good = absl::SimpleAtoi(parts[i], &sizes[i]) && sizes[i] >= 1 && sizes[i] <= 1 << 16;
  }
  if (!good) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape: expected olmoe-1b-7b, qwen3-30b-a3b or DxFxExK (hidden and intermediate size, "
        "experts, top-k; each from 1 to 65536), got \"",
        text, "\""));
  }
  if (sizes[3] > sizes[2]) {
    return absl::InvalidArgumentError(absl::StrCat("shape: expected top-k of at most the ",
                                                   sizes[2], " experts, got ", sizes[3]));
  }
  return MoeShape{text, "olmoe", sizes[0], sizes[1], sizes[2], sizes[3], false};
}

absl::StatusOr<DType> ParseBenchDType(const std::string& name) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    if (name == BenchName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype: expected bf16, fp32 or f16, got \"", name, "\""));
}

const char* BenchName(DType dtype) {
  return dtype == DType::kBF16 ? "bf16" : dtype == DType::kF16 ? "f16" : "fp32";
}

int64_t ExpertBytes(const MoeShape& shape, DType dtype) {
  return 3 * shape.hidden_size * shape.intermediate_size * BytesOf(dtype);
}

Tensor RandomNormal(DType dtype, std::vector<int64_t> shape, float deviation, uint64_t seed) {
  Tensor tensor(dtype, std::move(shape));
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    // Four uniform values of 16 bits: their sum has the variance 65536^2 / 3.
    const uint64_t bits = Random(seed, static_cast<uint64_t>(i));
    const auto sum = static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                          (bits >> 32 & 0xffff) + (bits >> 48));
    StoreFloat(dtype, tensor.data(), i,
               static_cast<float>(sum - 2 * 65535) * (1.7320508f / 65536) * deviation);
  }
  return tensor;
}

absl::Status WriteSyntheticModel(const std::string& folder, const MoeShape& shape, DType dtype) {
  const std::string config_file = folder + "/config.json";
  const std::string config = ConfigText(shape, dtype);
  if (std::ifstream present(config_file); present) {
    std::stringstream text;
    text << present.rdbuf();
    if (text.str() == config) return absl::OkStatus();
    return absl::AlreadyExistsError(
        absl::StrCat(config_file, ": another model is there; choose an empty folder"));
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot make the folder ", folder, ": ", error.message()));
  }
  const int64_t d = shape.hidden_size, f = shape.intermediate_size;
  const std::vector<int64_t> in_shape = {f, d}, out_shape = {d, f};
  const auto block = [&](int64_t fan_in, uint64_t seed) {
    return RandomNormal(dtype, {d * f + kSlack}, 1 / std::sqrt(static_cast<float>(fan_in)), seed);
  };
  const Tensor in = block(d, 1), out = block(f, 2);
  const Tensor gate =
      RandomNormal(dtype, {shape.num_experts, d}, 1 / std::sqrt(static_cast<float>(d)), /*seed=*/3);
  std::map<std::string, TensorView> tensors = {{"model.layers.0.mlp.gate.weight", gate}};
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    const std::string prefix = absl::StrCat("model.layers.0.mlp.experts.", expert, ".");
    const auto piece = [&](const Tensor& source, absl::Span<const int64_t> extents, uint64_t n) {
      const int64_t offset = static_cast<int64_t>(Random(/*seed=*/4, 3 * expert + n) % kSlack);
      return TensorView(dtype, extents, source.data() + offset * BytesOf(dtype));
    };
    tensors[prefix + "gate_proj.weight"] = piece(in, in_shape, 0);
    tensors[prefix + "up_proj.weight"] = piece(in, in_shape, 1);
    tensors[prefix + "down_proj.weight"] = piece(out, out_shape, 2);
  }
  RETURN_IF_ERROR(WriteSafetensors(folder + "/model.safetensors", tensors));
  // Last: a folder with a configuration is complete.
  std::ofstream file(config_file);
  file << config;
  file.close();
  if (!file) return absl::PermissionDeniedError(absl::StrCat("cannot write ", config_file));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<TemporaryFolder>> TemporaryFolder::Create() {
  std::error_code error;
  std::string path = std::filesystem::temp_directory_path(error) / "expertmesh-bench-XXXXXX";
  if (error || mkdtemp(path.data()) == nullptr) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot make a temporary folder ", path, ": ", strerror(errno)));
  }
  return std::unique_ptr<TemporaryFolder>(new TemporaryFolder(std::move(path)));
}

TemporaryFolder::TemporaryFolder(std::string path) : path_(std::move(path)) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signals_ = std::thread([this, set] {
    int number = 0;
    while (sigwait(&set, &number) != 0) {
    }
    if (done_) return;
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
    std::_Exit(128 + number);
  });
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
  done_ = true;
  pthread_kill(signals_.native_handle(), SIGTERM);  // ends the thread
  signals_.join();
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace expertmesh
