// Checkpoints with quantised experts, as the tools that write them lay them out: the codes arrive
// as they are, each with its scale, and what is computed from them is what their definition says.
#include "common/model/quantization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/checkpoint.h"
#include "common/model/registry.h"
#include "common/safetensors/safetensors.h"
#include "expert_server/engine/engine.h"
#include "expert_server/engine/expert_store.h"
#include "nlohmann/json.hpp"
#include "tests/random_tensor.h"

namespace expertmesh {
namespace {

using ::nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 320;        // D: two blocks and a half
constexpr int64_t kIntermediate = 160;  // F: no multiple of 128, so up has another grid than gate
constexpr int kExperts = 3;
constexpr char kMlp[] = "model.layers.0.mlp.";

struct Folder {
  json config;
  std::map<std::string, Tensor> tensors;
};

json Config(const std::string& model_type, const json& quantization) {
  json config = {{"model_type", model_type},      {"num_hidden_layers", 1},
                 {"hidden_size", kHidden},        {"intermediate_size", kIntermediate},
                 {"num_experts_per_tok", 2},      {"hidden_act", "silu"},
                 {"num_local_experts", kExperts}, {"quantization_config", quantization}};
  if (quantization.is_null()) config.erase("quantization_config");
  return config;
}

const json kBlockFp8 = {{"quant_method", "fp8"},
                        {"fmt", "e4m3"},
                        {"activation_scheme", "dynamic"},
                        {"weight_block_size", {128, 128}}};
json CompressedTensors(const std::string& strategy) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", {"lm_head", "re:.*gate$"}},
          {"kv_cache_scheme", nullptr},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights",
               {{"num_bits", 8}, {"type", "float"}, {"strategy", strategy}, {"symmetric", true}}},
              {"input_activations", {{"num_bits", 8}, {"type", "float"}, {"dynamic", true}}}}}}}};
}
const json kModelOpt = {
    {"quant_method", "modelopt"}, {"quant_algo", "FP8"}, {"ignore", {"lm_head"}}};
const json kMxfp4 = {{"quant_method", "mxfp4"},
                     {"modules_to_not_convert", {"model.layers.*.self_attn", "lm_head"}}};

Tensor Codes(std::vector<int64_t> shape, std::mt19937& rng) {
  Tensor codes(DType::kF8_E4M3, std::move(shape));
  for (int64_t i = 0; i < codes.num_elements(); ++i) {
    const auto code = static_cast<uint8_t>(rng());
    codes.as<uint8_t>()[i] = IsNaNE4M3(code) ? 0 : code;
  }
  return codes;
}

Tensor Scales(DType dtype, std::vector<int64_t> shape, std::mt19937& rng) {
  Tensor scales(dtype, std::move(shape));
  for (int64_t i = 0; i < scales.num_elements(); ++i) {
    if (dtype == DType::kF8_E8M0) {
      scales.as<uint8_t>()[i] = static_cast<uint8_t>(112 + rng() % 10);
    } else {
      StoreFloat(dtype, scales.data(), i, 1e-4f * (1.0f + static_cast<float>(rng() % 1000) / 100));
    }
  }
  return scales;
}

// Experts of fp8, each projection a tensor; scale_shape(n, k) is that of its scales, suffix their
// name's.
Folder Fp8Folder(const json& quantization, const std::string& suffix, DType scale_dtype,
                 const std::function<std::vector<int64_t>(int64_t, int64_t)>& scale_shape) {
  std::mt19937 rng(31);
  Folder folder{Config("olmoe", quantization), {}};
  folder.tensors[absl::StrCat(kMlp, "gate.weight")] =
      RandomTensor(DType::kBF16, {kExperts, kHidden}, 0.1f, rng);
  for (int expert = 0; expert < kExperts; ++expert) {
    for (const auto& [name, n, k] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
             {"gate_proj", kIntermediate, kHidden},
             {"up_proj", kIntermediate, kHidden},
             {"down_proj", kHidden, kIntermediate}}) {
      const std::string prefix = absl::StrCat(kMlp, "experts.", expert, ".", name);
      folder.tensors[prefix + ".weight"] = Codes({n, k}, rng);
      folder.tensors[prefix + suffix] = Scales(scale_dtype, scale_shape(n, k), rng);
    }
  }
  return folder;
}

std::vector<int64_t> Grid(int64_t n, int64_t k) { return {(n + 127) / 128, (k + 127) / 128}; }
std::vector<int64_t> Column(int64_t n, int64_t /*k*/) { return {n, 1}; }

Folder BlockFolder(DType scale_dtype = DType::kF32,
                   const std::string& suffix = ".weight_scale_inv") {
  return Fp8Folder(kBlockFp8, suffix, scale_dtype, Grid);
}

float LoadScale(const Tensor& scales, int64_t i) {
  return scales.dtype() == DType::kF8_E8M0 ? FloatFromE8M0(scales.as<uint8_t>()[i])
                                           : LoadFloat(scales.dtype(), scales.data(), i);
}

// gpt-oss: all experts in one tensor, gate and up rows in turns, biases.
Folder Mxfp4Folder() {
  std::mt19937 rng(32);
  Folder folder{Config("gpt_oss", kMxfp4), {}};
  auto& tensors = folder.tensors;
  tensors[absl::StrCat(kMlp, "router.weight")] =
      RandomTensor(DType::kBF16, {kExperts, kHidden}, 0.1f, rng);
  tensors[absl::StrCat(kMlp, "router.bias")] = RandomTensor(DType::kBF16, {kExperts}, 0.1f, rng);
  for (const auto& [name, n, k] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
           {"gate_up_proj", 2 * kIntermediate, kHidden}, {"down_proj", kHidden, kIntermediate}}) {
    const std::string prefix = absl::StrCat(kMlp, "experts.", name);
    Tensor blocks(DType::kU8, {kExperts, n, k / 32, 16}), scales(DType::kU8, {kExperts, n, k / 32});
    for (int64_t i = 0; i < blocks.num_elements(); ++i) {
      blocks.as<uint8_t>()[i] = static_cast<uint8_t>(rng());
    }
    for (int64_t i = 0; i < scales.num_elements(); ++i) {
      scales.as<uint8_t>()[i] = static_cast<uint8_t>(118 + rng() % 6);
    }
    tensors[prefix + "_blocks"] = blocks;
    tensors[prefix + "_scales"] = scales;
    tensors[prefix + "_bias"] = RandomTensor(DType::kBF16, {kExperts, n}, 0.1f, rng);
  }
  return folder;
}

// A folder of plain weights, as those of BlockFolder().
Folder PlainFolder() {
  std::mt19937 rng(39);
  Folder folder{Config("olmoe", nullptr), {}};
  for (const auto& [name, tensor] : BlockFolder().tensors) {
    if (name.find("scale") == std::string::npos) {
      folder.tensors[name] = RandomTensor(DType::kBF16, tensor.shape(), 0.1f, rng);
    }
  }
  return folder;
}

class QuantizationTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / absl::StrCat("quantization_test.", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const Folder& folder) {
    std::ofstream(folder_ / "config.json") << folder.config;
    const std::map<std::string, TensorView> views(folder.tensors.begin(), folder.tensors.end());
    EXPECT_TRUE(WriteSafetensors((folder_ / "model.safetensors").string(), views).ok());
    return Checkpoint::Open(folder_.string());
  }
  std::shared_ptr<const Checkpoint> MustOpen(const Folder& folder) {
    auto checkpoint = Open(folder);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? *checkpoint : nullptr;
  }
  // The refusal to open, or to read all experts.
  std::string Refusal(const Folder& folder) {
    const auto checkpoint = Open(folder);
    if (!checkpoint.ok()) return checkpoint.status().ToString();
    for (int expert = 0; expert < kExperts; ++expert) {
      const auto weights = (*checkpoint)->ReadExpert(0, expert);
      if (!weights.ok()) return weights.status().ToString();
    }
    return "accepted";
  }

  std::filesystem::path folder_;
};

// Every weight and every scale of fp8 experts is the one that was written. scale_of(n, k) is the
// index of the stored scale of a weight of a projection of `columns` columns.
void ExpectFp8(const Checkpoint& checkpoint, const Folder& folder, const std::string& suffix,
               WeightFormat format, ScaleLayout layout,
               const std::function<int64_t(int64_t n, int64_t k, int64_t columns)>& scale_of) {
  const ExpertDescriptor& experts = checkpoint.model().layers[0].experts;
  EXPECT_EQ(experts.weight_dtype, DType::kF8_E4M3);
  EXPECT_EQ(experts.scale_layout, layout);
  EXPECT_EQ(experts.scale_dtype,
            folder.tensors.at(absl::StrCat(kMlp, "experts.0.gate_proj", suffix)).dtype());
  EXPECT_EQ(experts.weight_format, format);
  for (int expert = 0; expert < kExperts; ++expert) {
    const auto weights = checkpoint.ReadExpert(0, expert);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const auto check = [&](const char* name, const Tensor& values, const Tensor& scales,
                           int64_t first_row, int64_t n, int64_t k) {
      const std::string prefix = absl::StrCat(kMlp, "experts.", expert, ".", name);
      const Tensor& codes = folder.tensors.at(prefix + ".weight");
      const Tensor& stored = folder.tensors.at(prefix + suffix);
      const int64_t per_row = ScalesPerRow(format, k);
      ASSERT_EQ(scales.dim(1), per_row);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          ASSERT_EQ(values.as<uint8_t>()[(first_row + r) * k + c], codes.as<uint8_t>()[r * k + c]);
          const int64_t block = format == WeightFormat::kFp8Row ? 0 : c / 128;
          ASSERT_EQ(scales.as<float>()[(first_row + r) * per_row + block],
                    LoadScale(stored, scale_of(r, c, k)))
              << name << " of expert " << expert << " at " << r << ", " << c;
        }
      }
    };
    check("gate_proj", weights->gate_up, weights->gate_up_scales, 0, kIntermediate, kHidden);
    check("up_proj", weights->gate_up, weights->gate_up_scales, kIntermediate, kIntermediate,
          kHidden);
    check("down_proj", weights->down, weights->down_scales, 0, kHidden, kIntermediate);
  }
}

int64_t BlockOf(int64_t n, int64_t k, int64_t columns) {
  return n / 128 * ((columns + 127) / 128) + k / 128;
}

TEST_F(QuantizationTest, Fp8Blocks) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8_E8M0}) {
    for (const char* suffix : {".weight_scale_inv", ".scale"}) {
      const Folder folder = BlockFolder(dtype, suffix);
      const auto checkpoint = MustOpen(folder);
      ASSERT_NE(checkpoint, nullptr);
      ExpectFp8(*checkpoint, folder, suffix, WeightFormat::kFp8Block128, ScaleLayout::kBlock128,
                BlockOf);
      // Codes, and scales that are repeated for every row.
      EXPECT_EQ(checkpoint->ExpertBytes(0),
                3 * kHidden * kIntermediate + 4 * (2 * kIntermediate * 3 + kHidden * 2));
    }
  }
  // The shape of a block is 128 x 128 where nobody says another.
  Folder folder = BlockFolder();
  folder.config["quantization_config"].erase("weight_block_size");
  ExpectFp8(*MustOpen(folder), folder, ".weight_scale_inv", WeightFormat::kFp8Block128,
            ScaleLayout::kBlock128, BlockOf);
}

TEST_F(QuantizationTest, Fp8Rows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Folder folder = Fp8Folder(CompressedTensors("channel"), ".weight_scale", dtype, Column);
    ExpectFp8(*MustOpen(folder), folder, ".weight_scale", WeightFormat::kFp8Row, ScaleLayout::kRow,
              [](int64_t n, int64_t, int64_t) { return n; });
  }
}

TEST_F(QuantizationTest, Fp8WithOneScale) {
  const auto first = [](int64_t, int64_t, int64_t) { return int64_t{0}; };
  for (const auto& [quantization, shape] :
       std::vector<std::pair<json, std::vector<int64_t>>>{{CompressedTensors("tensor"), {1}},
                                                          {CompressedTensors("tensor"), {1, 1}},
                                                          {kModelOpt, {}},
                                                          {json{{"quant_method", "fp8"}}, {}}}) {
    Folder folder = Fp8Folder(quantization, ".weight_scale", DType::kF32,
                              [&shape = shape](int64_t, int64_t) { return shape; });
    const std::string unused = absl::StrCat(kMlp, "experts.1.up_proj.input_scale");
    std::mt19937 rng(33);
    folder.tensors[unused] = Scales(DType::kF32, {}, rng);
    const auto checkpoint = MustOpen(folder);
    ASSERT_NE(checkpoint, nullptr);
    ExpectFp8(*checkpoint, folder, ".weight_scale", WeightFormat::kFp8Row, ScaleLayout::kMatrix,
              first);
    EXPECT_THAT(checkpoint->skipped_tensors(), Contains(unused));
  }
}

TEST_F(QuantizationTest, SomeMatricesMayHaveOneScaleAndOthersOneForARow) {
  const Folder folder =
      Fp8Folder(CompressedTensors("channel"), ".weight_scale", DType::kF32, [](int64_t n, int64_t) {
        return n == kHidden ? std::vector<int64_t>{1} : std::vector<int64_t>{n, 1};
      });
  ExpectFp8(*MustOpen(folder), folder, ".weight_scale", WeightFormat::kFp8Row, ScaleLayout::kMixed,
            [](int64_t n, int64_t, int64_t columns) { return columns == kHidden ? n : 0; });
}

TEST_F(QuantizationTest, ModelOptMayHaveAFileOfItsOwn) {
  Folder folder = Fp8Folder(nullptr, ".weight_scale", DType::kF32,
                            [](int64_t, int64_t) { return std::vector<int64_t>{}; });
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("F8_E4M3"), HasSubstr("no quantization_config")));
  const auto write = [this](const json& quantization) {
    std::ofstream(folder_ / "hf_quant_config.json")
        << json{{"producer", {{"name", "modelopt"}}}, {"quantization", quantization}};
  };
  write(
      {{"quant_algo", "FP8"}, {"kv_cache_quant_algo", nullptr}, {"exclude_modules", {"lm_head"}}});
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  ExpectFp8(*checkpoint, folder, ".weight_scale", WeightFormat::kFp8Row, ScaleLayout::kMatrix,
            [](int64_t, int64_t, int64_t) { return int64_t{0}; });
  write({{"quant_algo", "NVFP4"}, {"group_size", 16}});
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("hf_quant_config.json"),
                                     HasSubstr("NVFP4")));
}

// A fused tensor, whose grid of blocks runs on from the gate's rows to those of up.
TEST_F(QuantizationTest, FusedFp8BlocksMayStraddleGateAndUp) {
  std::mt19937 rng(34);
  Folder folder{Config("olmoe", kBlockFp8), {}};
  folder.tensors[absl::StrCat(kMlp, "gate.weight")] =
      RandomTensor(DType::kBF16, {kExperts, kHidden}, 0.1f, rng);
  const std::string prefix = absl::StrCat(kMlp, "experts.");
  const Tensor codes = Codes({kExperts, 2 * kIntermediate, kHidden}, rng);
  const Tensor scales = Scales(DType::kF32, {kExperts, 3, 3}, rng);  // of 320 x 320
  folder.tensors[prefix + "gate_up_proj"] = codes;
  folder.tensors[prefix + "gate_up_proj_scale_inv"] = scales;
  folder.tensors[prefix + "down_proj"] = Codes({kExperts, kHidden, kIntermediate}, rng);
  folder.tensors[prefix + "down_proj_scale_inv"] = Scales(DType::kF32, {kExperts, 3, 2}, rng);
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  const ExpertWeights weights = checkpoint->ReadExpert(0, 2).value();
  for (int64_t r = 0; r < 2 * kIntermediate; ++r) {
    EXPECT_EQ(weights.gate_up.as<uint8_t>()[r * kHidden],
              codes.as<uint8_t>()[(4 * kIntermediate + r) * kHidden]);
    for (int64_t b = 0; b < 3; ++b) {
      EXPECT_EQ(weights.gate_up_scales.as<float>()[3 * r + b],
                scales.as<float>()[18 + r / 128 * 3 + b])
          << r << ", " << b;
    }
  }
}

TEST_F(QuantizationTest, Mxfp4) {
  const Folder folder = Mxfp4Folder();
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  const ExpertDescriptor& experts = checkpoint->model().layers[0].experts;
  EXPECT_EQ(experts.weight_dtype, DType::kF4);
  EXPECT_EQ(experts.weight_format, WeightFormat::kMxfp4);
  EXPECT_EQ(experts.scale_layout, ScaleLayout::kGroup32);
  EXPECT_EQ(experts.scale_dtype, DType::kU8);
  const Tensor& blocks = folder.tensors.at(absl::StrCat(kMlp, "experts.gate_up_proj_blocks"));
  const Tensor& scales = folder.tensors.at(absl::StrCat(kMlp, "experts.gate_up_proj_scales"));
  for (int expert = 0; expert < kExperts; ++expert) {
    const ExpertWeights weights = checkpoint->ReadExpert(0, expert).value();
    for (int64_t r = 0; r < 2 * kIntermediate; ++r) {  // rows g, u, g, u, ... in the file
      const int64_t row = expert * 2 * kIntermediate + 2 * (r % kIntermediate) + r / kIntermediate;
      for (int64_t i = 0; i < kHidden / 2; ++i) {
        ASSERT_EQ(weights.gate_up.as<uint8_t>()[r * kHidden / 2 + i],
                  blocks.as<uint8_t>()[row * kHidden / 2 + i]);
      }
      for (int64_t i = 0; i < kHidden / 32; ++i) {
        ASSERT_EQ(weights.gate_up_scales.as<uint8_t>()[r * kHidden / 32 + i],
                  scales.as<uint8_t>()[row * kHidden / 32 + i]);
      }
    }
  }
  // Byte 0x21 with scale 128 is 1 and 2: the low nibble is the even weight.
  EXPECT_EQ(FloatFromMxfp4(0x21 & 15, 128), 1.0f);
  EXPECT_EQ(FloatFromMxfp4(0x21 >> 4, 128), 2.0f);
}

// Weight [n, k] by its definition, in double.
double Dequantised(WeightFormat format, const Tensor& values, const Tensor& scales, int64_t n,
                   int64_t k) {
  const int64_t columns = values.dim(1) * (format == WeightFormat::kMxfp4 ? 2 : 1);
  if (format == WeightFormat::kMxfp4) {
    const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int code = values.as<uint8_t>()[(n * columns + k) / 2] >> (k % 2 * 4) & 15;
    const double sign = code >= 8 ? -1 : 1;
    return sign *
           std::ldexp(magnitudes[code & 7], scales.as<uint8_t>()[n * scales.dim(1) + k / 32] - 127);
  }
  const int64_t block = format == WeightFormat::kFp8Row ? 0 : k / 128;
  return static_cast<double>(FloatFromE4M3(values.as<uint8_t>()[n * columns + k])) *
         static_cast<double>(scales.as<float>()[n * scales.dim(1) + block]);
}

// Both engines, from the file to the result, against silu-gated units of the dequantised weights.
TEST_F(QuantizationTest, ComputesWhatTheDequantisedWeightsWould) {
  for (const Folder& folder : {BlockFolder(), Fp8Folder(CompressedTensors("channel"),
                                                        ".weight_scale", DType::kF32, Column)}) {
    const auto checkpoint = MustOpen(folder);
    ASSERT_NE(checkpoint, nullptr);
    const ExpertDescriptor& descriptor = checkpoint->model().layers[0].experts;
    const ExpertWeights weights = checkpoint->ReadExpert(0, 1).value();
    std::mt19937 rng(35);
    const Tensor x = RandomTensor(DType::kF32, {1, kHidden}, 1.0f, rng);
    std::vector<double> h(kIntermediate), y(kHidden);
    const auto project = [&](const Tensor& values, const Tensor& scales, int64_t n, auto in) {
      double sum = 0;
      for (int64_t k = 0; k < values.dim(1); ++k) {
        sum += in[k] * Dequantised(descriptor.weight_format, values, scales, n, k);
      }
      return sum;
    };
    for (int64_t f = 0; f < kIntermediate; ++f) {
      const double g = project(weights.gate_up, weights.gate_up_scales, f, x.as<float>());
      const double u =
          project(weights.gate_up, weights.gate_up_scales, kIntermediate + f, x.as<float>());
      h[f] = g / (1 + std::exp(-g)) * u;
    }
    double squares = 0;
    for (int64_t d = 0; d < kHidden; ++d) {
      y[d] = project(weights.down, weights.down_scales, d, h.data());
      squares += y[d] * y[d];
    }
    for (const EngineKind kind : {EngineKind::kForLoop, EngineKind::kGrouped}) {
      auto experts = MakeEngine({.kind = kind})(descriptor, 1).value();
      experts->SetWeights(0, weights);
      ASSERT_TRUE(experts->Prepare().ok());
      const std::vector<int32_t> ids = {0}, gather = {0};
      const std::vector<int64_t> m_sizes = {1};
      Tensor output(DType::kF32, {1, kHidden});
      ASSERT_TRUE(experts->Forward({x, ids, m_sizes, gather}, output.data()).ok());
      double errors = 0;
      for (int64_t d = 0; d < kHidden; ++d) {
        errors += std::pow(output.as<float>()[d] - y[d], 2);
      }
      EXPECT_LT(std::sqrt(errors / squares), 1e-5) << NameOf(descriptor.weight_format);
      EXPECT_GT(squares, 0);
    }
  }
}

// What is planned is what a server takes: panels of 16 columns, 4 of them a block (gate and up two
// each), in lines of 64 bytes.
TEST_F(QuantizationTest, BytesOfAServerAreThoseItTakes) {
  // 160 gate rows are 10 panels, as many as up rows; 320 down rows 20; no block is begun only.
  constexpr int64_t kGateUpPanels = 20, kDownPanels = 20;
  const auto panels = [](int64_t gate_up_bytes, int64_t down_bytes) {
    return kGateUpPanels * gate_up_bytes + kDownPanels * down_bytes;
  };
  const struct {
    Folder folder;
    int64_t expert;
  } cases[] = {
      {PlainFolder(), panels(kHidden * 32, kIntermediate * 32)},
      {BlockFolder(), panels(kHidden * 16 + 3 * 64, kIntermediate * 16 + 2 * 64)},
      {Fp8Folder(CompressedTensors("channel"), ".weight_scale", DType::kBF16, Column),
       panels(kHidden * 16 + 64, kIntermediate * 16 + 64)},
      // Exponents of 10 and of 5 groups, each a byte: 2.5 and 1.25 lines. And biases.
      {Mxfp4Folder(), panels(kHidden * 8 + 3 * 64, kIntermediate * 8 + 2 * 64) + 4 * 2 * kHidden},
  };
  for (const auto& [folder, expert] : cases) {
    const auto checkpoint = MustOpen(folder);
    ASSERT_NE(checkpoint, nullptr);
    SCOPED_TRACE(NameOf(checkpoint->model().layers[0].experts.weight_format));
    for (const int32_t servers : {1, 2, 5}) {
      int64_t all = 0;
      for (int32_t shard = 0; shard < servers; ++shard) {
        const auto held = *ExpertStore::ShardOf(checkpoint->model(), shard, servers);
        LoadProgress last;
        const auto store =
            ExpertStore::Load(*checkpoint, held, MakeEngine({.kind = EngineKind::kGrouped}),
                              [&last](const LoadProgress& progress) { last = progress; });
        ASSERT_TRUE(store.ok()) << store.status();
        EXPECT_EQ((*store)->bytes(), ExpertStore::BytesOf(*checkpoint, held));
        EXPECT_EQ(last.bytes_done, (*store)->bytes());
        EXPECT_EQ(last.bytes_total, (*store)->bytes());
        all += (*store)->bytes();
      }
      EXPECT_EQ(all, kExperts * expert);
    }
  }
}

// Modules that the quantiser left out are plain; so may a whole layer's experts be.
TEST_F(QuantizationTest, PlainExpertsStayPlain) {
  std::mt19937 rng(36);
  Folder folder = BlockFolder();
  folder.config["num_hidden_layers"] = 2;
  folder.config["quantization_config"]["modules_to_not_convert"] = {"model.layers.1.mlp.experts"};
  std::map<std::string, Tensor> more;
  for (const auto& [name, tensor] : folder.tensors) {
    if (name.find("scale") != std::string::npos) continue;
    std::string other = name;
    other.replace(other.find("layers.0"), 8, "layers.1");
    more[other] = RandomTensor(DType::kBF16, tensor.shape(), 0.1f, rng);
  }
  folder.tensors.insert(more.begin(), more.end());
  const auto checkpoint = MustOpen(folder);
  ASSERT_NE(checkpoint, nullptr);
  EXPECT_EQ(checkpoint->model().layers[0].experts.weight_format, WeightFormat::kFp8Block128);
  EXPECT_EQ(checkpoint->model().layers[1].experts.weight_format, WeightFormat::kPlain);
  EXPECT_EQ(checkpoint->model().layers[1].experts.weight_dtype, DType::kBF16);
  EXPECT_EQ(checkpoint->ReadExpert(1, 0).value().gate_up_scales.num_elements(), 0);
}

TEST_F(QuantizationTest, RefusesCodesAndScalesThatAreNoNumbers) {
  const std::string down = absl::StrCat(kMlp, "experts.2.down_proj");
  for (const uint8_t nan : {0x7f, 0xff}) {
    Folder folder = BlockFolder();
    folder.tensors[down + ".weight"].as<uint8_t>()[3 * kIntermediate + 7] = nan;
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(down + ".weight'"),
                                       HasSubstr("nan at [3, 7]")));
  }
  for (const float bad : {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, -1e-3f}) {
    Folder folder = BlockFolder();
    folder.tensors[down + ".weight_scale_inv"].as<float>()[3] = bad;  // [3, 2]
    EXPECT_THAT(Refusal(folder),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(down + ".weight_scale_inv'"),
                      HasSubstr("at [1, 1]"), HasSubstr("positive finite")));
  }
  Folder e8m0 = BlockFolder(DType::kF8_E8M0);
  e8m0.tensors[down + ".weight_scale_inv"].as<uint8_t>()[0] = 255;
  EXPECT_THAT(Refusal(e8m0), AllOf(HasSubstr("exponent 255"), HasSubstr("at [0, 0]")));

  const std::string scales = absl::StrCat(kMlp, "experts.down_proj_scales");
  Folder mxfp4 = Mxfp4Folder();
  mxfp4.tensors[scales].as<uint8_t>()[(kHidden + 4) * (kIntermediate / 32) + 2] = 252;
  EXPECT_EQ(Refusal(mxfp4), "accepted");
  mxfp4.tensors[scales].as<uint8_t>()[(kHidden + 4) * (kIntermediate / 32) + 2] = 253;
  EXPECT_THAT(Refusal(mxfp4), AllOf(HasSubstr(scales), HasSubstr("exponent 253"),
                                    HasSubstr("at [1, 4, 2]"), HasSubstr("at most 252")));
}

TEST_F(QuantizationTest, RefusesTensorsThatDoNotFit) {
  const std::string gate = absl::StrCat(kMlp, "experts.0.gate_proj.weight");
  std::mt19937 rng(37);
  Folder folder = BlockFolder();
  folder.tensors.erase(gate + "_scale_inv");
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(gate + "_scale_inv"),
                                     HasSubstr("missing")));
  folder = BlockFolder();  // a grid that was rounded down
  folder.tensors[gate + "_scale_inv"] = Scales(DType::kF32, {1, 2}, rng);
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr(gate + "_scale_inv"), HasSubstr("[1, 2]"), HasSubstr("[2, 3]")));
  folder = BlockFolder();  // the scales of another projection
  std::swap(folder.tensors[gate + "_scale_inv"],
            folder.tensors[absl::StrCat(kMlp, "experts.0.down_proj.weight_scale_inv")]);
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("weight_scale_inv'"), HasSubstr("shape [3, 2]"),
                                     HasSubstr("expected [2, 3]")));
  folder = BlockFolder();
  folder.tensors[gate + "_scale_inv"] = Tensor(DType::kI32, {2, 3});
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr(gate + "_scale_inv"), HasSubstr("I32")));
  folder = BlockFolder();
  folder.config.erase("quantization_config");
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("F8_E4M3")));
  folder = BlockFolder();  // one expert that is not quantised like the others
  folder.tensors[gate] = RandomTensor(DType::kBF16, {kIntermediate, kHidden}, 0.1f, rng);
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr(absl::StrCat("expected BF16 (plain) like '", gate, "'")),
                    HasSubstr("F8_E4M3")));
  folder = Mxfp4Folder();
  folder.config.erase("quantization_config");
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("mxfp4")));
  folder = Mxfp4Folder();
  const std::string blocks = absl::StrCat(kMlp, "experts.down_proj_blocks");
  folder.tensors[blocks] = Tensor(DType::kU8, {kExperts, kHidden, kIntermediate / 32, 8});
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr(blocks), HasSubstr("[3, 320, 5, 16]")));
}

// Tensors of formats that are not read, in a folder whose configuration says nothing of them.
TEST_F(QuantizationTest, RefusesPackedTensorsByName) {
  const Folder good = PlainFolder();
  ASSERT_EQ(Refusal(good), "accepted");
  std::mt19937 rng(40);
  const std::string up = absl::StrCat(kMlp, "experts.1.up_proj.");
  // In place of a matrix, with several weights in an element or not.
  for (const auto& [dtype, columns] :
       std::vector<std::pair<DType, int64_t>>{{DType::kU8, kHidden / 2},
                                              {DType::kI8, kHidden},
                                              {DType::kI32, kHidden / 8},
                                              {DType::kF8_E5M2, kHidden}}) {
    Folder folder = good;
    Tensor& packed = folder.tensors[up + "weight"] = Tensor(dtype, {kIntermediate, columns});
    std::memset(packed.data(), 0, packed.num_bytes());
    EXPECT_THAT(Refusal(folder),
                AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(up + "weight"),
                      HasSubstr(NameOf(dtype)), HasSubstr("supported are F32, BF16 and F16")));
  }
  // Beside it.
  for (const char* name : {"weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale",
                           "weight.absmax", "weight_zero_point", "g_idx", "scales", "bias"}) {
    Folder folder = good;
    folder.tensors[up + name] = Scales(DType::kF32, {kIntermediate, 1}, rng);
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(up + name)));
  }
  // And where no matrix has its name.
  for (const char* name : {"qweight", "weight_packed"}) {
    Folder folder{good.config, {}};
    for (const auto& [whole, tensor] : good.tensors) {
      const size_t at = whole.find("_proj.weight");
      if (at == std::string::npos) {
        folder.tensors[whole] = tensor;
      } else {
        folder.tensors[whole.substr(0, at + 6) + name] = Tensor(DType::kI32, {1, 1});
      }
    }
    EXPECT_THAT(Refusal(folder),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("no experts"),
                      HasSubstr(absl::StrCat("but '", kMlp, "experts.0.down_proj.", name))));
  }
  // A gate is computed from plain weights only.
  Folder folder = BlockFolder();
  const std::string gate = absl::StrCat(kMlp, "gate.weight");
  folder.tensors[gate] = Codes({kExperts, kHidden}, rng);
  folder.tensors[gate + "_scale_inv"] = Scales(DType::kF32, {1, 3}, rng);
  EXPECT_THAT(Refusal(folder),
              AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(gate), HasSubstr("F8_E4M3")));
}

// A language model's section may speak of quantisation, but not contradict.
TEST(QuantizationConfig, MayBeInTheSection) {
  json text = Config("qwen3_5_moe_text", nullptr);
  text.update({{"moe_intermediate_size", 16}, {"shared_expert_intermediate_size", 16}});
  const auto describe = [&](const json& outer, const json& inner) {
    json config = {{"model_type", "qwen3_5_moe"}, {"text_config", text}};
    if (!outer.is_null()) config["quantization_config"] = outer;
    if (!inner.is_null()) config["text_config"]["quantization_config"] = inner;
    return DescribeModel(config, BuiltInFamilies());
  };
  for (const auto& [outer, inner] : std::vector<std::pair<json, json>>{
           {kBlockFp8, nullptr}, {nullptr, kBlockFp8}, {kBlockFp8, kBlockFp8}}) {
    const auto model = describe(outer, inner);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->quantization.fp8, Quantization::Fp8::kBlock128);
  }
  EXPECT_TRUE(describe(nullptr, nullptr)->quantization.none());
  EXPECT_THAT(describe(kBlockFp8, kMxfp4).status().ToString(),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("quantization_config"),
                    HasSubstr("contradict")));
  EXPECT_THAT(describe(nullptr, json{{"quant_method", "gptq"}}).status().ToString(),
              AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("gptq")));
}

// What is there a second time, in another form, would be used by some and not by others.
TEST_F(QuantizationTest, RefusesWhatIsThereTwice) {
  std::mt19937 rng(38);
  const std::string gate = absl::StrCat(kMlp, "experts.0.gate_proj.weight");
  Folder folder = BlockFolder();
  folder.tensors[gate + "_scale"] = Scales(DType::kF32, {kIntermediate, 1}, rng);
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(gate + "_scale'")));
  folder = BlockFolder();  // dequantised, with the scales left behind
  for (auto& [name, tensor] : folder.tensors) {
    if (tensor.dtype() != DType::kF8_E4M3) continue;
    tensor = RandomTensor(DType::kBF16, tensor.shape(), 0.1f, rng);
  }
  EXPECT_THAT(Refusal(folder), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("_scale_inv'")));
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    const std::string matrix = absl::StrCat(kMlp, "experts.", name);
    const bool down = std::string(name) == "down_proj";
    folder = Mxfp4Folder();
    folder.tensors[matrix] = RandomTensor(
        DType::kBF16,
        {kExperts, down ? kIntermediate : kHidden, down ? kHidden : 2 * kIntermediate}, 0.1f, rng);
    EXPECT_THAT(Refusal(folder), AllOf(HasSubstr(absl::StrCat(matrix, "'")), HasSubstr("plain"),
                                       HasSubstr("mxfp4")));
  }
}

TEST(QuantizationConfig, OthersAreRefusedByName) {
  const auto refusal = [](const json& object) {
    return ReadQuantizationConfig(object).status().ToString();
  };
  for (const auto& [method, reason] :
       std::vector<std::pair<std::string, std::string>>{{"gptq", "packed integers"},
                                                        {"awq", "packed integers"},
                                                        {"bitsandbytes", "4 and 8 bit codes"},
                                                        {"fbgemm_fp8", "its layout"},
                                                        {"modelopt_fp4", "scales in fp8"},
                                                        {"hqq", "not known"},
                                                        {"torchao", "not known"},
                                                        {"quark", "not known"}}) {
    EXPECT_THAT(refusal({{"quant_method", method}, {"bits", 4}, {"group_size", 128}}),
                AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(absl::StrCat("'", method, "'")),
                      HasSubstr(reason), HasSubstr("supported are")));
  }
  for (const auto& [format, reason] : std::vector<std::pair<std::string, std::string>>{
           {"pack-quantized", "packed integers"},
           {"int-quantized", "integers"},
           {"nvfp4-pack-quantized", "scales in fp8"},
           {"mxfp4-pack-quantized", "tensors of blocks and of scales"},
           {"marlin-24", "sparse"},
           {"mixed-precision", "several formats"},
           {"naive-quantized", "not known"}}) {
    json object = CompressedTensors("channel");
    object["format"] = format;
    EXPECT_THAT(refusal(object),
                AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(absl::StrCat("'", format, "'")),
                      HasSubstr(reason), HasSubstr("supported are")));
  }
  for (const char* algorithm : {"NVFP4", "W4A8_AWQ", "MIXED_PRECISION", "FP8_PB_WO"}) {
    EXPECT_THAT(refusal({{"quant_method", "modelopt"}, {"quant_algo", algorithm}}),
                AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(algorithm)));
  }
  EXPECT_THAT(refusal(CompressedTensors("group")), HasSubstr("'group'"));
  json object = CompressedTensors("channel");
  object["config_groups"]["group_0"]["weights"]["type"] = "int";
  EXPECT_THAT(refusal(object), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("type int")));
  object = CompressedTensors("channel");
  object["sparsity_config"] = {{"format", "sparse-24-bitmask"}};
  EXPECT_THAT(refusal(object), HasSubstr("sparse-24-bitmask"));
  object = kBlockFp8;
  object["weight_block_size"] = {64, 128};
  EXPECT_THAT(refusal(object), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("[64,128]")));
  object = kBlockFp8;
  object["fmt"] = "e5m2";
  EXPECT_THAT(refusal(object), HasSubstr("e5m2"));
  object = kMxfp4;
  object["modules_to_not_convert"] = "lm_head";
  EXPECT_THAT(refusal(object),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("modules_to_not_convert")));
  EXPECT_THAT(refusal(json::array()), HasSubstr("INVALID_ARGUMENT"));
  EXPECT_THAT(refusal(json::object()), HasSubstr("(none)"));
  object = CompressedTensors("block");
  object["config_groups"]["group_0"]["weights"]["block_structure"] = {128, 128};
  EXPECT_TRUE(ReadQuantizationConfig(object).ok());
  object["config_groups"]["group_1"] = CompressedTensors("channel")["config_groups"]["group_0"];
  EXPECT_THAT(refusal(object), HasSubstr("several strategies"));
  object["config_groups"] = json::object();
  EXPECT_THAT(refusal(object), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("config_groups")));
  object["config_groups"]["group_0"] = {{"weights", nullptr}};
  EXPECT_THAT(refusal(object), HasSubstr("expected an object weights"));
  EXPECT_THAT(ReadHfQuantConfig({{"quantization", 3}}).status().ToString(),
              HasSubstr("quantization: expected an object, given 3"));
}

}  // namespace
}  // namespace expertmesh
