// GroupedExperts against ForLoopExperts, bit for bit.
#include "expert_server/engine/cpu/grouped_experts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/expert_rows.h"
#include "common/kernels/quantize.h"
#include "expert_server/engine/engine.h"
#include "tests/random_tensor.h"
#include "tests/restated_experts.h"
#include "tests/tested.h"

namespace expertmesh {
namespace {

struct Layer {
  ExpertDescriptor descriptor;
  std::vector<ExpertWeights> weights;

  std::unique_ptr<Experts> Make(const EngineOptions& options) const {
    auto experts = MakeEngine(options)(descriptor, static_cast<int64_t>(weights.size())).value();
    for (size_t e = 0; e < weights.size(); ++e) experts->SetWeights(e, weights[e]);
    EXPECT_TRUE(experts->Prepare().ok());
    return experts;
  }
};

Layer RandomLayer(const WeightType& type, int64_t experts, int64_t hidden_size,
                  int64_t intermediate_size, float scale, std::mt19937& rng) {
  Layer layer;
  layer.descriptor.hidden_size = hidden_size;
  layer.descriptor.intermediate_size = intermediate_size;
  layer.descriptor.weight_dtype = type.dtype;
  layer.descriptor.weight_format = type.format;
  for (int64_t e = 0; e < experts; ++e) {
    layer.weights.push_back(RandomExpert(layer.descriptor, scale, rng));
  }
  return layer;
}

// A batch with its memory.
struct Batch {
  ExpertRows rows;
  std::vector<int32_t> experts;
  std::vector<int64_t> m_sizes;
  std::vector<int32_t> gather;
  std::vector<float> input_weights = {};
  int64_t pairs = 0;

  ExpertBatch View() const {
    ExpertBatch view = {rows.values, experts, m_sizes, gather, input_weights};
    view.row_format = rows.format;
    view.row_scales = rows.scales;
    view.quantized_from = rows.dtype;
    return view;
  }
};

// positions[i] of them for experts[i], each reading a random row; a tenth is padding if `padded`.
Batch RandomBatch(DType dtype, int64_t hidden_size, std::vector<int32_t> experts,
                  std::vector<int64_t> positions, bool padded, std::mt19937& rng) {
  Batch batch;
  const int64_t num_rows = 50;
  batch.rows = RandomTensor(dtype, {num_rows, hidden_size}, 1.0f, rng);
  batch.experts = std::move(experts);
  batch.m_sizes = std::move(positions);
  for (const int64_t size : batch.m_sizes) {
    for (int64_t i = 0; i < size; ++i) {
      const bool padding = padded && rng() % 10 == 0;
      batch.gather.push_back(padding ? -1 : static_cast<int32_t>(rng() % num_rows));
      batch.pairs += !padding;
    }
  }
  return batch;
}

std::string Forward(const Experts& experts, const Batch& batch, int64_t hidden_size) {
  Tensor output(ReplyDType(batch.rows.dtype), {batch.pairs, hidden_size});
  std::memset(output.data(), 0xff, output.num_bytes());
  EXPECT_TRUE(experts.Forward(batch.View(), output.data()).ok());
  return std::string(reinterpret_cast<const char*>(output.data()), output.num_bytes());
}

class SameBits : public testing::TestWithParam<std::tuple<WeightType, DType>> {};

TEST_P(SameBits, AsForLoopExperts) {
  const auto& [type, dtype] = GetParam();
  std::mt19937 rng(21);
  struct Case {
    int64_t hidden_size, intermediate_size;
    float scale;  // 1e-13: products of three around the smallest normal number
    std::vector<int64_t> positions;
    bool padded;
  };
  const std::vector<Case> cases = {
      {160, 96, 0.1f, {0, 1, 2, 3, 4, 5, 6, 0}, false},
      {33, 17, 0.3f, {7, 0, 13, 1, 0, 64, 8, 12}, true},
      {33, 17, 1e-13f, {7, 0, 13, 1, 0, 64, 8, 12}, true},
      {601, 130, 0.1f, {300, 0, 1, 0, 16, 0, 2, 0}, false},
      {64, 64, 0.1f, {9, 9, 9, 9, 9, 9, 9, 9}, true},
      // Experts without a token, at either end and between others.
      {8, 1, 1.0f, {5, 0, 0, 0, 0, 0, 0, 0}, false},
      {64, 32, 0.1f, {0, 5, 0, 3, 0, 0, 0, 0}, false},
      {64, 32, 0.1f, {0, 0, 0, 0, 0, 0, 0, 5}, false},
      {64, 64, 0.1f, {0, 0, 0, 0, 0, 0, 0, 0}, false},
      {40, 24, 0.1f, {299, 254, 158, 278, 167, 343, 263, 286}, false},
  };
  for (const Case& c : cases) {
    // Weights that F16 cannot hold are zero, as are then all results.
    if (c.scale < 1e-6f && type.dtype == DType::kF16) continue;
    const int64_t hidden_size = type.Width(c.hidden_size);
    const int64_t intermediate_size = type.Width(c.intermediate_size);
    const Layer layer = RandomLayer(type, 9, hidden_size, intermediate_size, c.scale, rng);
    const Batch batch =
        RandomBatch(dtype, hidden_size, {0, 1, 2, 3, 4, 5, 6, 8}, c.positions, c.padded, rng);
    const auto reference = layer.Make({.kind = EngineKind::kForLoop});
    const std::string expected = Forward(*reference, batch, hidden_size);
    for (const Isa isa : TestedIsas()) {
      for (const int threads : TestedThreads()) {
        const auto grouped =
            layer.Make({.kind = EngineKind::kGrouped, .isa = isa, .threads = threads});
        EXPECT_TRUE(Forward(*grouped, batch, hidden_size) == expected)
            << NameOf(isa) << ", " << threads << " threads, D " << hidden_size << ", F "
            << intermediate_size << ", scale " << c.scale;
      }
    }
  }
}

// Every activation, with biases and without; one expert of a width that is no multiple of anything.
TEST_P(SameBits, WhateverTheActivation) {
  const auto& [type, dtype] = GetParam();
  std::mt19937 rng(27);
  for (const Activation activation : AllActivations()) {
    for (const bool has_bias : {false, true}) {
      for (const auto& [d, f] :
           std::vector<std::pair<int64_t, int64_t>>{{35, 17}, {96, 130}, {8, 1}}) {
        const int64_t hidden_size = type.Width(d), intermediate_size = type.Width(f);
        Layer layer;
        layer.descriptor = Expert(activation, has_bias, type, hidden_size, intermediate_size);
        for (int e = 0; e < 3; ++e)
          layer.weights.push_back(RandomExpert(layer.descriptor, 0.3f, rng));
        Batch batch = RandomBatch(dtype, hidden_size, {0, 2}, {7, 24}, true, rng);
        if (has_bias) {  // and the input weighed
          for (size_t p = 0; p < batch.gather.size(); ++p) {
            batch.input_weights.push_back(static_cast<float>(rng() % 1000) / 700);
          }
        }
        const std::string expected =
            Forward(*layer.Make({.kind = EngineKind::kForLoop}), batch, hidden_size);
        for (const Isa isa : TestedIsas()) {
          EXPECT_TRUE(Forward(*layer.Make({.isa = isa}), batch, hidden_size) == expected)
              << NameOf(isa) << ", activation " << static_cast<int>(activation) << ", bias "
              << has_bias << ", D " << hidden_size << ", F " << intermediate_size;
        }
      }
    }
  }
}

std::string FormatsName(const testing::TestParamInfo<SameBits::ParamType>& test) {
  const auto& [type, dtype] = test.param;
  return NameOf(type) + "_x_" + NameOf(dtype);
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, SameBits,
                         testing::Combine(testing::ValuesIn(AllWeightTypes()),
                                          testing::ValuesIn(TestedDTypes())),
                         FormatsName);

// Rows whose memory was used before, by larger and by smaller batches of other layers.
TEST(GroupedExperts, NothingOfEarlierCallsIsLeft) {
  std::mt19937 rng(22);
  auto context = std::make_shared<GroupedContext>(BestIsa(), 2);
  const Layer wide = RandomLayer(DType::kBF16, 2, 301, 65, 0.1f, rng);
  const Layer narrow = RandomLayer(DType::kF32, 2, 30, 7, 0.1f, rng);
  std::vector<std::unique_ptr<Experts>> engines, references;
  const std::vector<const Layer*> layers = {&wide, &narrow};
  for (const Layer* layer : layers) {
    auto experts = MakeGroupedExperts(layer->descriptor, 2, context).value();
    for (size_t e = 0; e < 2; ++e) experts->SetWeights(e, layer->weights[e]);
    ASSERT_TRUE(experts->Prepare().ok());
    engines.push_back(std::move(experts));
    references.push_back(layer->Make({.kind = EngineKind::kForLoop}));
  }
  for (const int64_t size : {100, 3, 40, 1, 100}) {
    for (size_t l = 0; l < 2; ++l) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const int64_t hidden_size = layers[l]->descriptor.hidden_size;
        const Batch batch = RandomBatch(dtype, hidden_size, {0, 1}, {size, size / 2}, true, rng);
        EXPECT_TRUE(Forward(*engines[l], batch, hidden_size) ==
                    Forward(*references[l], batch, hidden_size));
      }
    }
  }
}

// Layers of every low precision, the weights being what random ones are quantised to.
Layer LowPrecisionLayer(QuantizedFormat format, int64_t experts, int64_t hidden_size,
                        int64_t intermediate_size, float scale, std::mt19937& rng) {
  Layer layer = RandomLayer(DType::kF32, experts, hidden_size, intermediate_size, scale, rng);
  for (ExpertWeights& weights : layer.weights) {
    const auto quantize = [format](Tensor* matrix, Tensor* scales) {
      const int64_t n = matrix->dim(0), k = matrix->dim(1);
      Tensor codes(DType::kF8_E4M3, {n, k});
      *scales = Tensor(ScaleDType(WeightFormatOf(format)), {n, ScalesPerRow(format, k)});
      QuantizeWeights(BestIsa(), {format, matrix->dtype(), matrix->data(), n, k,
                                  codes.as<uint8_t>(), scales->data()});
      *matrix = codes;
    };
    quantize(&weights.gate_up, &weights.gate_up_scales);
    quantize(&weights.down, &weights.down_scales);
  }
  layer.descriptor.weight_dtype = DType::kF8_E4M3;
  layer.descriptor.weight_format = WeightFormatOf(format);
  layer.descriptor.row_format = format;
  return layer;
}

// The batch with its rows quantised.
Batch Quantized(const Batch& batch, QuantizedFormat format) {
  Batch quantized = batch;
  const Tensor& rows = batch.rows.values;
  quantized.rows.format = format;
  quantized.rows.values = Tensor(DType::kF8_E4M3, rows.shape());
  quantized.rows.scales =
      Tensor(ScaleDType(format), {rows.dim(0), ScalesPerRow(format, rows.dim(1))});
  QuantizeRows(BestIsa(), {format, rows.dtype(), rows.data(), rows.dim(0), rows.dim(1),
                           quantized.rows.values.as<uint8_t>(), quantized.rows.scales.data()});
  return quantized;
}

// The batch with every group padded at its end; groups without rows get a block if `fill`.
Batch Padded(const Batch& batch, int64_t multiple, bool fill) {
  Batch padded = batch;
  padded.gather.clear();
  auto from = batch.gather.begin();
  for (int64_t& size : padded.m_sizes) {
    padded.gather.insert(padded.gather.end(), from, from + size);
    from += size;
    const int64_t blocks = (size + multiple - 1) / multiple;
    const int64_t whole = (size == 0 && fill ? 1 : blocks) * multiple;
    padded.gather.insert(padded.gather.end(), whole - size, -1);
    size = whole;
  }
  return padded;
}

class LowPrecision : public testing::TestWithParam<std::tuple<QuantizedFormat, DType>> {};

// Whatever the instruction set and the threads, how far groups are padded, and what was in the
// memory that the engine uses.
TEST_P(LowPrecision, SameBitsWhateverTheEngineThePaddingAndTheMemory) {
  const auto& [format, dtype] = GetParam();
  std::mt19937 rng(31);
  struct Case {
    int64_t hidden_size, intermediate_size;
    float scale;
    std::vector<int64_t> positions;
  };
  const std::vector<Case> cases = {
      {160, 96, 0.1f, {0, 5, 0, 3}},
      {33, 17, 0.3f, {5, 0, 0, 0}},
      {33, 17, 1e-19f, {7, 0, 13, 64}},  // products around the smallest normal number
      {300, 260, 0.1f, {0, 0, 0, 333}},
      {129, 31, 0.1f, {111, 0, 151, 71}},  // 333 pairs
      {40, 24, 0.1f, {162, 0, 2577, 446, 0, 83}},
      {64, 32, 0.1f, {0, 0, 0, 0}},
  };
  for (const Case& c : cases) {
    const auto num_experts = static_cast<int64_t>(c.positions.size());
    const Layer layer =
        LowPrecisionLayer(format, num_experts, c.hidden_size, c.intermediate_size, c.scale, rng);
    std::vector<int32_t> experts;
    for (int32_t e = 0; e < num_experts; ++e) experts.push_back(e);
    const Batch batch = Quantized(
        RandomBatch(dtype, c.hidden_size, experts, c.positions, /*padded=*/false, rng), format);
    const std::string expected =
        Forward(*layer.Make({.kind = EngineKind::kForLoop}), batch, c.hidden_size);
    for (const Isa isa : TestedIsas()) {
      for (const int threads : TestedThreads()) {
        auto context = std::make_shared<GroupedContext>(isa, threads);
        auto grouped = MakeGroupedExperts(layer.descriptor, num_experts, context).value();
        for (int64_t e = 0; e < num_experts; ++e) grouped->SetWeights(e, layer.weights[e]);
        ASSERT_TRUE(grouped->Prepare().ok());
        Forward(*grouped, batch, c.hidden_size);  // the memory has its size
        for (const int64_t multiple : {1, 16, 128}) {
          for (const bool fill : {false, true}) {
            {
              absl::MutexLock lock(&context->mutex);
              for (Workspace* memory : {&context->x, &context->h, &context->quantized}) {
                memory->Fill(std::byte{0xff});
              }
              for (Workspace& memory : context->scratch) memory.Fill(std::byte{0xff});
            }
            EXPECT_TRUE(Forward(*grouped, Padded(batch, multiple, fill), c.hidden_size) == expected)
                << NameOf(isa) << ", " << threads << " threads, D " << c.hidden_size << ", F "
                << c.intermediate_size << ", scale " << c.scale << ", multiple " << multiple;
          }
        }
      }
    }
  }
}

// Rows so large that the activations overflow give NaN, whatever the engine, and disturb no others.
TEST_P(LowPrecision, OverflowIsSeen) {
  const auto& [format, dtype] = GetParam();
  if (dtype == DType::kF16) return;  // holds no such rows
  std::mt19937 rng(32);
  const Layer layer = LowPrecisionLayer(format, 2, 70, 37, 0.3f, rng);
  Batch batch = RandomBatch(dtype, 70, {0, 1}, {3, 30}, /*padded=*/false, rng);
  const std::string before =
      Forward(*layer.Make({.kind = EngineKind::kForLoop}), Quantized(batch, format), 70);
  const int32_t large = batch.gather[1];
  for (int64_t d = 0; d < 70; ++d) {
    StoreFloat(dtype, batch.rows.values.data(), large * 70 + d, 1e25f);
  }
  batch = Quantized(batch, format);
  std::vector<EngineOptions> engines = {{.kind = EngineKind::kForLoop}};
  for (const Isa isa : SupportedIsas()) engines.push_back({.isa = isa, .threads = 2});
  for (const EngineOptions& engine : engines) {
    const std::string output = Forward(*layer.Make(engine), batch, 70);
    const DType reply = ReplyDType(dtype);
    for (size_t position = 0; position < batch.gather.size(); ++position) {
      for (int64_t d = 0; d < 70; ++d) {
        const auto at = static_cast<int64_t>(position) * 70 + d;
        const float got = LoadFloat(reply, output.data(), at);
        if (batch.gather[position] == large) {
          ASSERT_TRUE(std::isnan(got)) << NameOf(engine.isa) << ", position " << position;
        } else {
          ASSERT_EQ(got, LoadFloat(reply, before.data(), at)) << NameOf(engine.isa);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllFormats, LowPrecision,
    testing::Combine(testing::Values(QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                     QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil),
                     testing::ValuesIn(TestedDTypes())),
    [](const testing::TestParamInfo<LowPrecision::ParamType>& test) {
      return std::string(NameOf(std::get<0>(test.param))) + "_x_" + NameOf(std::get<1>(test.param));
    });

TEST(GroupedExperts, ManyCallersTakeTurns) {
  std::mt19937 rng(23);
  const Layer layer = RandomLayer(DType::kBF16, 4, 96, 64, 0.1f, rng);
  const auto grouped = layer.Make({.threads = 2});
  const auto reference = layer.Make({.kind = EngineKind::kForLoop});
  std::vector<Batch> batches;
  std::vector<std::string> expected;
  for (int i = 0; i < 8; ++i) {
    batches.push_back(RandomBatch(i % 2 == 0 ? DType::kBF16 : DType::kF32, 96, {0, 1, 3},
                                  {i, 2 * i + 1, 5}, true, rng));
    expected.push_back(Forward(*reference, batches.back(), 96));
  }
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        wrong += Forward(*grouped, batches[i], 96) != expected[i];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Memory for a few rows at a time: the batch is computed in many portions.
TEST(GroupedExperts, PortionsChangeNothing) {
  std::mt19937 rng(26);
  const Layer layer = RandomLayer(DType::kBF16, 3, 96, 64, 0.1f, rng);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Batch batch = RandomBatch(dtype, 96, {0, 1, 2}, {1300, 7, 530}, true, rng);
    const std::string expected = Forward(*layer.Make({.kind = EngineKind::kForLoop}), batch, 96);
    for (const int64_t portion_bytes : {1, 100'000, 400'000}) {
      auto context = std::make_shared<GroupedContext>(BestIsa(), 2);
      context->portion_bytes = portion_bytes;
      auto experts = MakeGroupedExperts(layer.descriptor, 3, context).value();
      for (size_t e = 0; e < 3; ++e) experts->SetWeights(e, layer.weights[e]);
      ASSERT_TRUE(experts->Prepare().ok());
      EXPECT_TRUE(Forward(*experts, batch, 96) == expected) << portion_bytes;
      ExpertBatch view = batch.View();
      int questions = 0;
      view.stop = [&questions] { return questions++ >= 2; };  // after the second portion
      Tensor output(ReplyDType(dtype), {batch.pairs, 96});
      EXPECT_EQ(experts->Forward(view, output.data()).code(), absl::StatusCode::kCancelled);
    }
  }
}

TEST(GroupedExperts, GivesUpWhenNobodyWaits) {
  std::mt19937 rng(24);
  const Layer layer = RandomLayer(DType::kF32, 2, 64, 32, 0.1f, rng);
  const auto grouped = layer.Make({.threads = 1});  // with more, who asks may have little to do
  const Batch batch = RandomBatch(DType::kF32, 64, {0, 1}, {2000, 2000}, false, rng);
  for (const int answer : {0, 1, 3}) {  // after so many questions
    ExpertBatch view = batch.View();
    int questions = 0;
    view.stop = [&] { return questions++ >= answer; };
    Tensor output(DType::kF32, {batch.pairs, 64});
    EXPECT_EQ(grouped->Forward(view, output.data()).code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(questions, answer + 1) << "asked on after the answer";
  }
  // The next call is not disturbed.
  EXPECT_TRUE(Forward(*grouped, batch, 64) ==
              Forward(*layer.Make({.kind = EngineKind::kForLoop}), batch, 64));
}

TEST(GroupedExperts, RefusesWhatItDoesNotCompute) {
  ExpertDescriptor descriptor;
  descriptor.hidden_size = 8;
  descriptor.intermediate_size = 8;
  auto context = std::make_shared<GroupedContext>(BestIsa(), 1);
  auto experts = MakeGroupedExperts(descriptor, 1, context).value();
  std::mt19937 rng(25);
  const Batch batch = RandomBatch(DType::kF32, 8, {0}, {1}, false, rng);
  Tensor output(DType::kF32, {1, 8});
  EXPECT_EQ(experts->Forward(batch.View(), output.data()).code(),
            absl::StatusCode::kFailedPrecondition);
  descriptor.activation = Activation::kRelu2;  // with a gate
  EXPECT_EQ(MakeGroupedExperts(descriptor, 1, context).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
