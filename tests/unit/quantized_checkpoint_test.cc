// Experts in a low precision, made of every kind of checkpoint: descriptions, weights,
// fingerprints, and what is refused.
#include "common/model/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/for_loop_quantize.h"
#include "tests/families.h"

namespace expertmesh {
namespace {

using families::FamilyCase;
using families::Scheme;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr QuantizedFormat kFormats[] = {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                        QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil};

using Shared = std::shared_ptr<const Checkpoint>;

Shared Open(const families::Folder& folder) {
  const std::string path = absl::StrCat(testing::TempDir(), "precision-", getpid());
  families::Write(folder, path);
  auto checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::filesystem::remove_all(path);  // what is open stays readable
  return *checkpoint;
}

FamilyCase Case(const std::vector<FamilyCase>& cases, const std::string& name) {
  return *std::find_if(cases.begin(), cases.end(),
                       [&name](const FamilyCase& one) { return one.name == name; });
}

// The model of a quantised case in plain weights: no size is a multiple of a block of rows.
families::Folder Plain(const std::string& name, DType dtype = DType::kBF16) {
  FamilyCase one = Case(families::QuantisedCases(), name);
  one.scheme = Scheme::kNone;
  families::Folder folder = families::MakeRandomFolder(one);
  for (auto& [unused, tensor] : folder.tensors) {
    Tensor converted(dtype, tensor.shape());
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      StoreFloat(dtype, converted.data(), i, LoadFloat(tensor.dtype(), tensor.data(), i));
    }
    tensor = converted;
  }
  return folder;
}

Precision In(QuantizedFormat format, std::vector<std::pair<int32_t, int32_t>> layers = {}) {
  return {format, std::move(layers)};
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), a.num_bytes()) == 0;
}

bool SameBits(const ExpertWeights& a, const ExpertWeights& b) {
  return SameBits(a.gate_up, b.gate_up) && SameBits(a.down, b.down) &&
         SameBits(a.gate_up_bias, b.gate_up_bias) && SameBits(a.down_bias, b.down_bias) &&
         SameBits(a.gate_up_scales, b.gate_up_scales) && SameBits(a.down_scales, b.down_scales);
}

// ---- The flag ----------------------------------------------------------------------------------

TEST(Precision, Parse) {
  const auto native = ParsePrecision("native");
  ASSERT_TRUE(native.ok());
  EXPECT_FALSE(native->format);
  EXPECT_TRUE(native->layers.empty());
  for (const QuantizedFormat format : kFormats) {
    const auto all = ParsePrecision(NameOf(format));
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ(all->format, format);
    EXPECT_TRUE(all->layers.empty());
    const auto some = ParsePrecision(absl::StrCat(NameOf(format), ":layers=1,3-5,20-20"));
    ASSERT_TRUE(some.ok()) << some.status();
    EXPECT_EQ(some->format, format);
    EXPECT_EQ(some->layers, (std::vector<std::pair<int32_t, int32_t>>{{1, 1}, {3, 5}, {20, 20}}));
  }
}

TEST(Precision, WhatIsNoPrecisionIsNamed) {
  for (const std::string text :
       {"", "bf16", "fp8", "MXFP8", "mxfp8 ", "mxfp8:", "mxfp8:1-2", "mxfp8:layer=1",
        "native:layers=1", "fp8_rowwise,mxfp8", ":layers=1"}) {
    const absl::Status status = ParsePrecision(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.ToString(),
                AllOf(HasSubstr("--precision"), HasSubstr("fp8_rowwise, fp8_block128, mxfp8 or"),
                      HasSubstr(absl::StrCat("got '", text, "'"))));
  }
  for (const std::string range :
       {"", "x", "-1", "1-", "5-3", "1-2-3", " 1", "+1", "1.5", "99999999999", "0-99999999999"}) {
    const std::string text = absl::StrCat("mxfp8:layers=0,", range);
    const absl::Status status = ParsePrecision(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.ToString(),
                AllOf(HasSubstr("--precision: layers: expected decoder layers"),
                      HasSubstr(absl::StrCat("got '", range, "' in '", text, "'"))));
  }
}

// ---- Descriptions ------------------------------------------------------------------------------

TEST(Precision, NativeIsTheCheckpointItself) {
  const Shared checkpoint = Open(Plain("deepseek_v3_fp8"));
  for (const int64_t pad_multiple : {0, 1}) {
    EXPECT_EQ(*WithPrecision(checkpoint, {}, pad_multiple), checkpoint);
  }
}

void ExpectConverted(const ExpertDescriptor& given, const ExpertDescriptor& stored,
                     QuantizedFormat format) {
  EXPECT_EQ(given.row_format, format);
  EXPECT_EQ(given.weight_dtype, DType::kF8_E4M3);
  EXPECT_EQ(given.weight_format, WeightFormatOf(format));
  EXPECT_EQ(given.hidden_size, stored.hidden_size);
  EXPECT_EQ(given.intermediate_size, stored.intermediate_size);
  EXPECT_EQ(given.activation, stored.activation);
  EXPECT_EQ(given.has_bias, stored.has_bias);
}

TEST(Precision, DescriptionsOfEveryFormat) {
  const std::map<QuantizedFormat, std::pair<WeightFormat, int64_t>> expected = {
      {QuantizedFormat::kFp8Rowwise, {WeightFormat::kFp8Row, 16}},
      {QuantizedFormat::kFp8Block128, {WeightFormat::kFp8Block128, 128}},
      {QuantizedFormat::kMxfp8, {WeightFormat::kMxfp8, 32}},
      {QuantizedFormat::kMxfp8Rceil, {WeightFormat::kMxfp8, 32}}};
  const Shared stored = Open(Plain("deepseek_v3_fp8"));  // layer 0 is dense, 1 and 2 have a shared
  for (const QuantizedFormat format : kFormats) {
    const auto& [weight_format, multiple] = expected.at(format);
    for (const int64_t factor : {0, 1, 3}) {
      SCOPED_TRACE(absl::StrCat(NameOf(format), " ", factor));
      const auto made = WithPrecision(stored, In(format), factor * multiple);
      ASSERT_TRUE(made.ok()) << made.status();
      const ModelDescription& model = (*made)->model();
      EXPECT_EQ(model.model_type, "deepseek_v3");
      ASSERT_EQ(model.layers.size(), 3u);
      EXPECT_FALSE(model.layers[0].shared.experts.row_format);
      EXPECT_EQ(model.layers[0].shared.experts.weight_dtype, DType::kBF16);
      EXPECT_EQ(model.layers[0].pad_multiple, 1);
      EXPECT_EQ((*made)->ExpertBytes(0), 0);
      for (const int layer : {1, 2}) {
        const LayerDescription& given = model.layers[layer];
        const LayerDescription& was = stored->model().layers[layer];
        ExpectConverted(given.experts, was.experts, format);
        ExpectConverted(given.shared.experts, was.shared.experts, format);
        EXPECT_EQ(given.experts.weight_format, weight_format);
        EXPECT_EQ(given.pad_multiple, factor == 0 ? multiple : factor * multiple);
        EXPECT_EQ((*made)->ExpertBytes(layer), BytesOfExpert(given.experts));
      }
      EXPECT_EQ((*made)->layout(), stored->layout());
      EXPECT_EQ((*made)->skipped_tensors(), stored->skipped_tensors());
    }
  }
}

// D = 144 and F = 68: scales of ragged blocks count, too.
TEST(Precision, BytesOfAnExpert) {
  const Shared stored = Open(Plain("deepseek_v3_fp8"));
  const int64_t codes = 3 * 144 * 68;
  EXPECT_EQ(stored->ExpertBytes(1), 2 * codes);
  const std::map<QuantizedFormat, int64_t> scales = {
      {QuantizedFormat::kFp8Rowwise, 4 * (2 * 68 + 144)},
      {QuantizedFormat::kFp8Block128, 4 * (2 * 68 * 2 + 144)},
      {QuantizedFormat::kMxfp8, 2 * 68 * 5 + 144 * 3},
      {QuantizedFormat::kMxfp8Rceil, 2 * 68 * 5 + 144 * 3}};
  for (const auto& [format, bytes] : scales) {
    EXPECT_EQ((*WithPrecision(stored, In(format)))->ExpertBytes(1), codes + bytes)
        << NameOf(format);
  }
}

TEST(Precision, OnlyTheChosenLayers) {
  const Shared stored = Open(Plain("deepseek_v3_fp8"));
  const auto made = *WithPrecision(stored, In(QuantizedFormat::kMxfp8, {{2, 2}}), 64);
  const LayerDescription& other = *made->model().Find(1);
  EXPECT_FALSE(other.experts.row_format);
  EXPECT_FALSE(other.shared.experts.row_format);
  EXPECT_EQ(other.experts.weight_format, WeightFormat::kPlain);
  EXPECT_EQ(other.pad_multiple, 1);
  EXPECT_EQ(made->ExpertBytes(1), stored->ExpertBytes(1));
  EXPECT_EQ(made->model().Find(2)->experts.row_format, QuantizedFormat::kMxfp8);
  // Dense layers in a range stay as they are.
  const auto all = *WithPrecision(stored, In(QuantizedFormat::kMxfp8, {{0, 2}}), 64);
  EXPECT_FALSE(all->model().Find(0)->shared.experts.row_format);
  EXPECT_EQ(all->model().Find(1)->experts.row_format, QuantizedFormat::kMxfp8);
  EXPECT_EQ(all->model().Find(2)->experts.row_format, QuantizedFormat::kMxfp8);
  EXPECT_EQ(made->model().Find(2)->pad_multiple, 64);
  for (const int expert : {0, 12}) {
    EXPECT_TRUE(SameBits(*made->ReadExpert(1, expert), *stored->ReadExpert(1, expert)));
    EXPECT_FALSE(SameBits(*made->ReadExpert(2, expert), *stored->ReadExpert(2, expert)));
  }
}

// ---- Weights -----------------------------------------------------------------------------------

// The matrices of one projection each, quantised by the reference.
struct Reference {
  Reference(QuantizedFormat format, const Tensor& stored, int64_t first, int64_t rows)
      : codes(DType::kF8_E4M3, {rows, stored.dim(1)}),
        scales(ScaleDType(WeightFormatOf(format)), {rows, ScalesPerRow(format, stored.dim(1))}) {
    const int64_t k = stored.dim(1);
    ForLoopQuantizeWeights({format, stored.dtype(),
                            stored.data() + first * k * BytesOf(stored.dtype()), rows, k,
                            codes.as<uint8_t>(), scales.data()});
  }
  Tensor codes;
  Tensor scales;
};

// That rows [first, first + rows) of a matrix are those of the stored one, quantised on their own,
// and stand for about its values.
void ExpectQuantized(QuantizedFormat format, const Tensor& stored, int64_t first, int64_t rows,
                     const Tensor& codes, const Tensor& scales) {
  const Reference reference(format, stored, first, rows);
  const int64_t k = stored.dim(1), per_row = ScalesPerRow(format, k);
  ASSERT_EQ(codes.dtype(), DType::kF8_E4M3);
  ASSERT_EQ(codes.shape(), stored.shape());
  ASSERT_EQ(scales.dtype(), reference.scales.dtype());
  ASSERT_EQ(scales.shape(), (std::vector<int64_t>{stored.dim(0), per_row}));
  const size_t scale_bytes = static_cast<size_t>(per_row * BytesOf(scales.dtype()));
  EXPECT_EQ(
      std::memcmp(codes.data() + first * k, reference.codes.data(), reference.codes.num_bytes()),
      0);
  EXPECT_EQ(std::memcmp(scales.data() + static_cast<size_t>(first) * scale_bytes,
                        reference.scales.data(), reference.scales.num_bytes()),
            0);
  double error = 0, norm = 0;
  for (int64_t r = first; r < first + rows; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      const int64_t block = r * per_row + c / ChannelsPerScale(format, k);
      const float scale = scales.dtype() == DType::kF32
                              ? scales.as<float>()[block]
                              : FloatFromE8M0(scales.as<uint8_t>()[block]);
      const float value = LoadFloat(stored.dtype(), stored.data(), r * k + c);
      error += std::pow(value - FloatFromE4M3(codes.as<uint8_t>()[r * k + c]) * scale, 2);
      norm += value * value;
    }
  }
  EXPECT_LT(std::sqrt(error / norm), 0.125);  // what saturates to 448 of 512
}

// Every expert of every layer of `made`; how many were quantised, and how many taken as they are.
std::pair<int, int> ExpectWeights(const Checkpoint& made, const Checkpoint& stored,
                                  QuantizedFormat format) {
  int quantized = 0, same = 0;
  for (const LayerDescription& layer : made.model().layers) {
    const LayerDescription& was = *stored.model().Find(layer.layer);
    for (int32_t expert = 0; expert < layer.num_held(); ++expert) {
      SCOPED_TRACE(absl::StrCat("layer ", layer.layer, ", expert ", expert));
      const bool routed = expert < layer.router.num_experts;
      const ExpertDescriptor& from = routed ? was.experts : was.shared.experts;
      const ExpertDescriptor& to = routed ? layer.experts : layer.shared.experts;
      const auto weights = made.ReadExpert(layer.layer, expert);
      const auto plain = stored.ReadExpert(layer.layer, expert);
      EXPECT_TRUE(weights.ok() && plain.ok()) << weights.status();
      if (layer.kind == LayerKind::kDense || from.weight_format != WeightFormat::kPlain) {
        ++same;
        EXPECT_TRUE(SameBits(*weights, *plain));
        continue;
      }
      ++quantized;
      const int64_t width = to.intermediate_size;
      for (int64_t part = 0; part < (to.gated ? 2 : 1); ++part) {
        ExpectQuantized(format, plain->gate_up, part * width, width, weights->gate_up,
                        weights->gate_up_scales);
      }
      ExpectQuantized(format, plain->down, 0, to.hidden_size, weights->down, weights->down_scales);
      EXPECT_TRUE(SameBits(weights->gate_up_bias, plain->gate_up_bias));
      EXPECT_TRUE(SameBits(weights->down_bias, plain->down_bias));
      EXPECT_EQ(weights->gate_up_bias.num_elements() > 0, to.has_bias);
      const size_t bytes = weights->gate_up.num_bytes() + weights->gate_up_scales.num_bytes() +
                           weights->down.num_bytes() + weights->down_scales.num_bytes() +
                           weights->gate_up_bias.num_bytes() + weights->down_bias.num_bytes();
      EXPECT_EQ(bytes, static_cast<size_t>(BytesOfExpert(to)));
    }
    const auto router = made.ReadRouter(layer.layer), expected = stored.ReadRouter(layer.layer);
    EXPECT_TRUE(router.ok() && expected.ok());
    EXPECT_TRUE(SameBits(router->weight, expected->weight));
    EXPECT_TRUE(SameBits(router->selection_bias, expected->selection_bias));
    EXPECT_TRUE(SameBits(router->shared_gate, expected->shared_gate));
  }
  return {quantized, same};
}

// Shared experts, dense layers, biases, experts without a gate; F below, at and above a block of
// rows; D and F that are no multiples of a block of channels.
TEST(Precision, WeightsOfEveryFormat) {
  std::vector<std::pair<std::string, families::Folder>> folders;
  for (const char* name : {"deepseek_v3_fp8", "deepseek_v32_ue8m0", "qwen3_moe_fp8",
                           "minimax_m2_fp8", "gpt_oss_mxfp4"}) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      folders.emplace_back(absl::StrCat(name, " ", NameOf(dtype)), Plain(name, dtype));
    }
  }
  folders.emplace_back("nemotron_h",
                       families::MakeRandomFolder(Case(families::Cases(), "nemotron_h")));
  for (const auto& [name, folder] : folders) {
    const Shared stored = Open(folder);
    for (const QuantizedFormat format : kFormats) {
      SCOPED_TRACE(absl::StrCat(name, " ", NameOf(format)));
      const auto made = WithPrecision(stored, In(format));
      ASSERT_TRUE(made.ok()) << made.status();
      const auto [quantized, same] = ExpectWeights(**made, *stored, format);
      EXPECT_GE(quantized, 12);
      int dense = 0;
      for (const LayerDescription& layer : stored->model().layers) {
        dense += layer.kind == LayerKind::kDense;
      }
      EXPECT_EQ(same, dense);
    }
  }
}

// Weights of 1 in the gate, of 100 in the up projection: a block of both would show.
TEST(Precision, BlocksBeginWithEachProjection) {
  families::Folder folder = Plain("deepseek_v3_fp8");  // F = 68
  for (auto& [name, tensor] : folder.tensors) {
    const float value = name.find("up_proj") != std::string::npos ? 100.0f : 1.0f;
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      StoreFloat(tensor.dtype(), tensor.data(), i, value);
    }
  }
  const auto made = *WithPrecision(Open(folder), In(QuantizedFormat::kFp8Block128));
  const auto weights = made->ReadExpert(1, 0);
  ASSERT_TRUE(weights.ok());
  for (int64_t i = 0; i < weights->gate_up_scales.num_elements(); ++i) {
    EXPECT_EQ(weights->gate_up_scales.as<float>()[i],
              (i < weights->gate_up_scales.num_elements() / 2 ? 1.0f : 100.0f) / 448.0f);
  }
}

TEST(Precision, ReadingReportsWhatIsNotThere) {
  const auto made = *WithPrecision(Open(Plain("qwen3_moe_fp8")), In(QuantizedFormat::kMxfp8));
  EXPECT_EQ(made->ReadExpert(77, 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(made->ReadExpert(1, 12).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(made->ReadRouter(77).status().code(), absl::StatusCode::kNotFound);
}

// ---- Combinations ------------------------------------------------------------------------------

// Files that are quantised: fp8 in blocks as they are, for fp8_block128; nothing else.
TEST(Precision, QuantisedFiles) {
  for (const FamilyCase& one : families::QuantisedCases()) {
    const Shared stored = Open(families::MakeRandomFolder(one));
    const bool blocks = one.scheme == Scheme::kFp8Block || one.scheme == Scheme::kFp8BlockUe8m0;
    EXPECT_EQ(*WithPrecision(stored, {}), stored);
    for (const QuantizedFormat format : kFormats) {
      SCOPED_TRACE(absl::StrCat(one.name, " ", NameOf(format)));
      const auto made = WithPrecision(stored, In(format));
      if (blocks && format == QuantizedFormat::kFp8Block128) {
        ASSERT_TRUE(made.ok()) << made.status();
        EXPECT_EQ(ExpectWeights(**made, *stored, format).first, 0);
        const LayerDescription& layer = *(*made)->model().Find(one.moe_layers[0]);
        ExpectConverted(layer.experts, stored->model().Find(layer.layer)->experts, format);
        EXPECT_EQ(layer.experts.scale_layout, ScaleLayout::kBlock128);
        EXPECT_EQ(layer.pad_multiple, 128);
        EXPECT_NE((*made)->fingerprint(), stored->fingerprint());
        continue;
      }
      EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
      const ExpertDescriptor& experts = stored->model().Find(one.moe_layers[0])->experts;
      EXPECT_EQ(made.status().message(),
                absl::StrCat("--precision: layer ", one.moe_layers[0], ": experts stored as ",
                             NameOf(experts.weight_dtype), " (", NameOf(experts.weight_format),
                             ") cannot be made ", NameOf(format), "; of these: native",
                             blocks ? ", fp8_block128" : "",
                             "; of F32, BF16 or F16: native, fp8_rowwise, fp8_block128, mxfp8, "
                             "mxfp8_rceil"));
    }
  }
}

// Routed experts in fp8, the shared one not: each is what it can be.
TEST(Precision, RoutedAndSharedExpertsAreStoredDifferently) {
  FamilyCase one = Case(families::QuantisedCases(), "deepseek_v3_fp8");
  families::Folder folder = families::MakeRandomFolder(one);
  const families::Folder plain = Plain(one.name);
  for (const auto& [name, tensor] : plain.tensors) {
    if (name.find("shared_experts") == std::string::npos) continue;
    folder.tensors[name] = tensor;
    folder.tensors.erase(name + "_scale_inv");
  }
  folder.config["quantization_config"]["modules_to_not_convert"] = {"shared_experts"};
  const Shared stored = Open(folder);
  ASSERT_EQ(stored->model().Find(1)->shared.experts.weight_format, WeightFormat::kPlain);
  const auto made = WithPrecision(stored, In(QuantizedFormat::kFp8Block128));
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(ExpectWeights(**made, *stored, QuantizedFormat::kFp8Block128),
            (std::pair<int, int>{2, 2 * 12 + 1}));
  EXPECT_THAT(WithPrecision(stored, In(QuantizedFormat::kMxfp8)).status().ToString(),
              HasSubstr("layer 1: experts stored as F8_E4M3 (fp8_block128)"));
}

// ---- Refusals ----------------------------------------------------------------------------------

TEST(Precision, LayersThatAreNotMoeAreRefused) {
  const Shared stored = Open(Plain("deepseek_v3_fp8"));
  const auto refusal = [&stored](std::vector<std::pair<int32_t, int32_t>> layers) {
    return WithPrecision(stored, In(QuantizedFormat::kMxfp8, std::move(layers)))
        .status()
        .ToString();
  };
  EXPECT_EQ(refusal({{0, 0}}),
            "INVALID_ARGUMENT: --precision: layers: expected MoE layers (1-2), got 0, which is "
            "dense and stays native");
  EXPECT_EQ(refusal({{1, 1}, {2, 2147483647}}),
            "INVALID_ARGUMENT: --precision: layers: expected MoE layers (1-2), got 2-2147483647, "
            "which is not served");
  // Once or twice is the same.
  EXPECT_EQ((*WithPrecision(stored, In(QuantizedFormat::kMxfp8, {{1, 2}, {2, 2}})))->fingerprint(),
            (*WithPrecision(stored, In(QuantizedFormat::kMxfp8)))->fingerprint());
}

TEST(Precision, PadMultiplesThatDoNotFitAreRefused) {
  const Shared stored = Open(Plain("qwen3_moe_fp8"));
  const auto refusal = [&stored](const Precision& precision, int64_t pad_multiple) {
    return WithPrecision(stored, precision, pad_multiple).status().ToString();
  };
  EXPECT_EQ(refusal({}, 16),
            "INVALID_ARGUMENT: --pad-multiple: expected 1 with --precision native, whose groups "
            "are never padded, got 16");
  EXPECT_EQ(refusal(In(QuantizedFormat::kFp8Block128), 64),
            "INVALID_ARGUMENT: --pad-multiple: expected a multiple of 128 with --precision "
            "fp8_block128, got 64");
  EXPECT_EQ(refusal(In(QuantizedFormat::kMxfp8Rceil), 48),
            "INVALID_ARGUMENT: --pad-multiple: expected a multiple of 32 with --precision "
            "mxfp8_rceil, got 48");
  EXPECT_EQ(refusal(In(QuantizedFormat::kFp8Rowwise), -16),
            "INVALID_ARGUMENT: --pad-multiple: expected a multiple of 16 with --precision "
            "fp8_rowwise, got -16");
}

// ---- Fingerprints ------------------------------------------------------------------------------

TEST(Precision, FingerprintsDiffer) {
  const Shared stored = Open(Plain("deepseek_v3_fp8"));
  std::set<std::string> fingerprints = {stored->fingerprint()};
  const auto expect_new = [&fingerprints](const Shared& checkpoint, const Precision& precision,
                                          int64_t pad_multiple) {
    const std::string first = (*WithPrecision(checkpoint, precision, pad_multiple))->fingerprint();
    EXPECT_EQ(first.size(), 64u);
    EXPECT_EQ((*WithPrecision(checkpoint, precision, pad_multiple))->fingerprint(), first);
    EXPECT_TRUE(fingerprints.insert(first).second)
        << NameOf(*precision.format) << " " << pad_multiple;
  };
  for (const QuantizedFormat format : kFormats) {
    expect_new(stored, In(format), 0);
    expect_new(stored, In(format), 384);
    expect_new(stored, In(format, {{1, 1}}), 0);
    expect_new(stored, In(format, {{2, 2}}), 0);
  }
  // The format's own multiple, said or not.
  EXPECT_EQ((*WithPrecision(stored, In(QuantizedFormat::kMxfp8), 32))->fingerprint(),
            (*WithPrecision(stored, In(QuantizedFormat::kMxfp8)))->fingerprint());
  // Another model.
  families::Folder other = Plain("deepseek_v3_fp8");
  for (auto& [name, tensor] : other.tensors) StoreFloat(tensor.dtype(), tensor.data(), 0, 0.25f);
  expect_new(Open(other), In(QuantizedFormat::kMxfp8), 0);
}

}  // namespace
}  // namespace expertmesh
