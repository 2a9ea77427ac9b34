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

nlohmann::ordered_json QuantizationConfig(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block128:
      return {{"quant_method", "fp8"},
              {"fmt", "e4m3"},
              {"activation_scheme", "dynamic"},
              {"weight_block_size", {128, 128}}};
    case WeightFormat::kFp8Row:
      return {{"quant_method", "compressed-tensors"},
              {"format", "float-quantized"},
              {"config_groups",
               {{"group_0",
                 {{"targets", {"Linear"}},
                  {"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}}}}}}};
    case WeightFormat::kMxfp4:
      return {{"quant_method", "mxfp4"}};
    case WeightFormat::kMxfp8:  // in no file
    case WeightFormat::kPlain:
      break;
  }
  return nullptr;
}

std::string ConfigText(const MoeShape& shape, const BenchFormat& format) {
  const DType dtype = format.activations;
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
  if (format.format != WeightFormat::kPlain) {
    config["quantization_config"] = QuantizationConfig(format.format);
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

absl::StatusOr<BenchFormat> ParseBenchFormat(const std::string& option, const std::string& name) {
  constexpr BenchFormat kFormats[] = {
      {"bf16", WeightFormat::kPlain, DType::kBF16, DType::kBF16},
      {"fp32", WeightFormat::kPlain, DType::kF32, DType::kF32},
      {"f16", WeightFormat::kPlain, DType::kF16, DType::kF16},
      {"fp8", WeightFormat::kFp8Block128, DType::kF8_E4M3, DType::kBF16},
      {"fp8_row", WeightFormat::kFp8Row, DType::kF8_E4M3, DType::kBF16},
      {"mxfp4", WeightFormat::kMxfp4, DType::kF4, DType::kBF16},
  };
  for (const BenchFormat& format : kFormats) {
    if (name == format.name) return format;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      option, ": expected bf16, fp32, f16, fp8, fp8_row or mxfp4, got \"", name, "\""));
}

int64_t ExpertBytes(const MoeShape& shape, const BenchFormat& format) {
  const int64_t weights = 3 * shape.hidden_size * shape.intermediate_size;
  const int64_t scales = format.format == WeightFormat::kMxfp4 ? weights / kMxBlockK : 0;
  return weights * BitsOf(format.dtype) / 8 + scales;
}

BenchWeights RandomWeights(const BenchFormat& format, int64_t n, int64_t k, float deviation,
                           uint64_t seed) {
  BenchWeights weights;
  if (format.format == WeightFormat::kPlain) {
    weights.values = RandomNormal(format.dtype, {n, k}, deviation, seed);
    return weights;
  }
  const bool mxfp4 = format.format == WeightFormat::kMxfp4;
  weights.values = Tensor(StorageDType(format.dtype), {n, mxfp4 ? k / 2 : k});
  for (int64_t i = 0; i < weights.values.num_elements(); ++i) {
    auto code = static_cast<uint8_t>(Random(seed, static_cast<uint64_t>(i)));
    if (!mxfp4 && IsNaNE4M3(code)) code = 0;
    weights.values.as<uint8_t>()[i] = code;
  }
  weights.scales = Tensor(ScaleDType(format.format), {n, ScalesPerRow(format.format, k)});
  double squares = 0;  // of the codes
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const double value = mxfp4             ? FloatFromMxfp4(byte, 127)
                         : IsNaNE4M3(byte) ? 0
                                           : FloatFromE4M3(byte);
    squares += value * value / 256;
  }
  const double scale = deviation / std::sqrt(squares);
  for (int64_t i = 0; i < weights.scales.num_elements(); ++i) {
    if (weights.scales.dtype() == DType::kU8) {
      weights.scales.as<uint8_t>()[i] =
          static_cast<uint8_t>(std::clamp<int>(127 + std::lround(std::log2(scale)), 1, 252));
    } else {
      weights.scales.as<float>()[i] = static_cast<float>(scale);
    }
  }
  return weights;
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

absl::Status WriteSyntheticModel(const std::string& folder, const MoeShape& shape,
                                 const BenchFormat& format) {
  const std::string config_file = folder + "/config.json";
  const std::string config = ConfigText(shape, format);
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
  const float in_deviation = 1 / std::sqrt(static_cast<float>(d));
  const float out_deviation = 1 / std::sqrt(static_cast<float>(f));
  const Tensor gate =
      RandomNormal(format.activations, {shape.num_experts, d}, in_deviation, /*seed=*/3);
  std::map<std::string, TensorView> tensors = {{"model.layers.0.mlp.gate.weight", gate}};
  BenchWeights in, out;
  std::vector<std::vector<int64_t>> shapes;  // what the views refer to
  shapes.reserve(8);
  const auto keep = [&shapes](std::vector<int64_t> extents) -> absl::Span<const int64_t> {
    return shapes.emplace_back(std::move(extents));
  };
  if (format.format == WeightFormat::kMxfp4) {
    if (d % kMxBlockK != 0 || f % kMxBlockK != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape: expected multiples of 32 for mxfp4, got sizes ", d, " and ", f));
    }
    const int64_t e = shape.num_experts;
    in = RandomWeights(format, e * 2 * f, d, in_deviation, /*seed=*/1);
    out = RandomWeights(format, e * d, f, out_deviation, /*seed=*/2);
    const std::string prefix = "model.layers.0.mlp.experts.";
    const auto add = [&](const std::string& name, const BenchWeights& weights, int64_t rows,
                         int64_t columns) {
      const int64_t blocks = columns / kMxBlockK;
      tensors[prefix + name + "_blocks"] =
          TensorView(DType::kU8, keep({e, rows, blocks, 16}), weights.values.data());
      tensors[prefix + name + "_scales"] =
          TensorView(DType::kU8, keep({e, rows, blocks}), weights.scales.data());
    };
    add("gate_up_proj", in, 2 * f, d);
    add("down_proj", out, d, f);
  } else {
    // A few rows more than a matrix has.
    in = RandomWeights(format, f + (kSlack + d - 1) / d, d, in_deviation, /*seed=*/1);
    out = RandomWeights(format, d + (kSlack + f - 1) / f, f, out_deviation, /*seed=*/2);
    const auto add = [&](const std::string& name, const BenchWeights& source,
                         absl::Span<const int64_t> extents, absl::Span<const int64_t> scale_extents,
                         uint64_t n) {
      const auto offset = static_cast<int64_t>(Random(/*seed=*/4, n) % kSlack);
      tensors[name + ".weight"] =
          TensorView(format.dtype, extents, source.values.data() + offset * BytesOf(format.dtype));
      if (format.format == WeightFormat::kPlain) return;
      const bool blocks = format.format == WeightFormat::kFp8Block128;
      tensors[name + (blocks ? ".weight_scale_inv" : ".weight_scale")] =
          TensorView(DType::kF32, scale_extents, source.scales.data());
    };
    const auto scale_shape = [&](int64_t rows, int64_t columns) -> std::vector<int64_t> {
      if (format.format != WeightFormat::kFp8Block128) return {rows, 1};
      return {(rows + kFp8BlockK - 1) / kFp8BlockK, (columns + kFp8BlockK - 1) / kFp8BlockK};
    };
    const auto in_shape = keep({f, d}), out_shape = keep({d, f});
    const auto in_scales = keep(scale_shape(f, d)), out_scales = keep(scale_shape(d, f));
    for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
      const std::string prefix = absl::StrCat("model.layers.0.mlp.experts.", expert, ".");
      add(prefix + "gate_proj", in, in_shape, in_scales, 3 * expert);
      add(prefix + "up_proj", in, in_shape, in_scales, 3 * expert + 1);
      add(prefix + "down_proj", out, out_shape, out_scales, 3 * expert + 2);
    }
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
