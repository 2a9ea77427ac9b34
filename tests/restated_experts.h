// Experts with random weights, and one expert restated from the bit contract: every fused
// multiply-add by libm's fma, every operation written out, sharing nothing with the engine but the
// elementary functions. For tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "common/kernels/for_loop_quantize.h"
#include "common/model/checkpoint.h"
#include "common/model/description.h"
#include "common/numerics/math.h"
#include "tests/random_tensor.h"

namespace expertmesh {

inline const std::vector<Activation>& AllActivations() {
  static const std::vector<Activation> all = {
      Activation::kSiluGlu,        Activation::kClampedSwishGlu, Activation::kClampedSiluGlu,
      Activation::kSiluClampedGlu, Activation::kGeluTanhGlu,     Activation::kGeluErfGlu,
      Activation::kRelu2};
  return all;
}

// Limits are low, so that many values of ordinary size pass them.
inline ExpertDescriptor Expert(Activation activation, bool has_bias, const WeightType& type,
                               int64_t hidden_size, int64_t intermediate_size) {
  ExpertDescriptor descriptor;
  descriptor.hidden_size = hidden_size;
  descriptor.intermediate_size = intermediate_size;
  descriptor.activation = activation;
  descriptor.activation_alpha = 1.702f;
  descriptor.activation_limit = 0.75f;
  descriptor.gated = activation != Activation::kRelu2;
  descriptor.has_bias = has_bias;
  descriptor.weight_dtype = type.dtype;
  descriptor.weight_format = type.format;
  return descriptor;
}

inline ExpertWeights RandomExpert(const ExpertDescriptor& descriptor, float scale,
                                  std::mt19937& rng) {
  const int64_t rows = descriptor.intermediate_size * (descriptor.gated ? 2 : 1);
  ExpertWeights weights;
  const WeightType type(descriptor.weight_format, descriptor.weight_dtype);
  const RandomWeights gate_up = MakeWeights(type, rows, descriptor.hidden_size, scale, rng);
  const RandomWeights down =
      MakeWeights(type, descriptor.hidden_size, descriptor.intermediate_size, scale, rng);
  weights.gate_up = gate_up.values;
  weights.gate_up_scales = gate_up.scales;
  weights.down = down.values;
  weights.down_scales = down.scales;
  if (descriptor.has_bias) {
    weights.gate_up_bias = RandomTensor(DType::kF32, {rows}, scale, rng);
    weights.down_bias = RandomTensor(DType::kF32, {descriptor.hidden_size}, scale, rng);
  }
  return weights;
}

// Weight [n, k], unscaled for fp8, with its scale for MXFP4 and MXFP8.
inline float RestatedWeight(const RandomWeights& weights, int64_t n, int64_t k) {
  const int64_t columns = weights.View().k();
  const auto byte = [&](int64_t i) { return int{weights.values.as<uint8_t>()[i]}; };
  switch (weights.format) {
    case WeightFormat::kPlain:
      return LoadFloat(weights.values.dtype(), weights.values.data(), n * columns + k);
    case WeightFormat::kMxfp4: {
      const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int code = byte((n * columns + k) / 2) >> (k % 2 * 4) & 15;
      const int scale = weights.scales.as<uint8_t>()[n * weights.scales.dim(1) + k / 32];
      const auto magnitude = static_cast<float>(std::ldexp(magnitudes[code & 7], scale - 127));
      return code > 8 ? -magnitude : magnitude;
    }
    default: {
      const int code = byte(n * columns + k);
      const int exponent = code >> 3 & 15;
      const int mantissa = code & 7;
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      int scale = 0;
      if (weights.format == WeightFormat::kMxfp8) {
        scale = weights.scales.as<uint8_t>()[n * weights.scales.dim(1) + k / 32] - 127;
      }
      return static_cast<float>(std::ldexp(code >= 128 ? -magnitude : magnitude, scale));
    }
  }
}

// One chain over [begin, end), by the order of the weight format.
inline float RestatedChain(const std::vector<float>& x, const RandomWeights& weights, int64_t n,
                           int64_t begin, int64_t end) {
  std::vector<int64_t> order;
  if (weights.values.dtype() == DType::kF32) {
    for (int64_t k = begin; k < end; ++k) order.push_back(k);
  } else {
    const int64_t pad = weights.format == WeightFormat::kPlain   ? 2
                        : weights.format == WeightFormat::kMxfp4 ? 8
                                                                 : 4;
    for (int64_t k = begin; k < end || (k - begin) % pad != 0; k += 2) {
      order.push_back(k + 1);  // may be a zero that pads
      order.push_back(k);
    }
  }
  volatile float sum = 0.0f;
  for (const int64_t k : order) {
    sum = k < end ? fmaf(x[k], RestatedWeight(weights, n, k), sum) : fmaf(0.0f, 0.0f, sum);
  }
  return sum;
}

// Output n of a projection. row_scales: of x where that is quantised to a format with fp32 scales,
// else empty.
inline float RestatedProjection(const std::vector<float>& x, const RandomWeights& weights,
                                int64_t n, const std::vector<float>& row_scales = {}) {
  const int64_t columns = weights.View().k();
  const float* const scales = weights.scales.as<float>();
  const auto scale = [&](int64_t at, int64_t block) {
    volatile float product = scales[at];
    if (!row_scales.empty()) product = product * row_scales[block];
    return product;
  };
  if (weights.format == WeightFormat::kFp8Row) {
    volatile float chain = RestatedChain(x, weights, n, 0, columns);
    return chain * scale(n, 0);
  }
  if (weights.format != WeightFormat::kFp8Block128) return RestatedChain(x, weights, n, 0, columns);
  volatile float y = 0.0f;
  const int64_t blocks = weights.scales.dim(1);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = 128 * block;
    const int64_t end = std::min(columns, begin + 128);
    y = fmaf(RestatedChain(x, weights, n, begin, end), scale(n * blocks + block, block), y);
  }
  return y;
}

// The same for plain weights.
inline float RestatedChain(const std::vector<float>& x, const Tensor& weights, int64_t n) {
  return RestatedProjection(x, {WeightFormat::kPlain, weights, Tensor()}, n);
}

inline float RestatedActivation(const ExpertDescriptor& descriptor, float g, float u) {
  const float limit = descriptor.activation_limit;
  const float low_g = g < limit ? g : limit;
  const float above = u > -limit ? u : -limit;
  const float clamped = above < limit ? above : limit;
  volatile float a, b, c;
  switch (descriptor.activation) {
    case Activation::kSiluGlu:
      a = 1.0f + Exp(-g);
      b = g / a;
      c = b * u;
      return c;
    case Activation::kClampedSwishGlu:
      a = descriptor.activation_alpha * low_g;
      a = 1.0f + Exp(-a);
      b = low_g / a;
      c = clamped + 1.0f;
      c = b * c;
      return c;
    case Activation::kClampedSiluGlu:
      a = 1.0f + Exp(-low_g);
      b = low_g / a;
      c = b * clamped;
      return c;
    case Activation::kSiluClampedGlu:
      a = 1.0f + Exp(-g);
      b = g / a;
      b = b < limit ? b : limit;
      c = b * clamped;
      return c;
    case Activation::kGeluTanhGlu:
      a = g * g;
      a = a * g;
      a = fmaf(0.044715f, a, g);
      a = 0.79788456f * a;
      a = 1.0f + Tanh(a);
      b = 0.5f * g;
      b = b * a;
      c = b * u;
      return c;
    case Activation::kGeluErfGlu:
      a = g * 0.70710678f;
      a = 1.0f + Erf(a);
      b = 0.5f * g;
      b = b * a;
      c = b * u;
      return c;
    case Activation::kRelu2:
      a = g > 0.0f ? g : 0.0f;
      c = a * a;
      return c;
  }
  return NAN;
}

// What becomes of rows and h between the steps: rounded for BF16 requests alone.
inline float RoundRow(DType request, float value) {
  return request == DType::kBF16 ? FloatFromBF16(BF16FromFloat(value)) : value;
}

// A row as it is multiplied, and its scales where they are multiplied apart.
struct RestatedRow {
  std::vector<float> values;
  std::vector<float> scales;
};

inline RestatedRow Quantized(QuantizedFormat format, const std::vector<float>& x) {
  const auto k = static_cast<int64_t>(x.size());
  Tensor codes(DType::kU8, {1, k});
  Tensor scales(ScaleDType(format), {ScalesPerRow(format, k)});
  ForLoopQuantizeRows({format, DType::kF32, x.data(), 1, k, codes.as<uint8_t>(), scales.data()});
  RestatedRow row;
  const RandomWeights unscaled = {WeightFormat::kFp8Row, codes, Tensor()};
  for (int64_t i = 0; i < k; ++i) {
    const double value = RestatedWeight(unscaled, 0, i);
    const int exponent = scales.dtype() == DType::kF32 ? 0 : scales.as<uint8_t>()[i / 32] - 127;
    row.values.push_back(static_cast<float>(std::ldexp(value, exponent)));
  }
  if (scales.dtype() == DType::kF32) {
    row.scales.assign(scales.as<float>(), scales.as<float>() + scales.num_elements());
  }
  return row;
}

// The whole expert for one row, with FTZ and DAZ set by the caller. A row that is to be quantised
// is what the router quantises.
inline std::vector<float> RestatedExpert(const ExpertDescriptor& descriptor,
                                         const ExpertWeights& weights, DType request,
                                         const std::vector<float>& x) {
  const int64_t width = descriptor.intermediate_size;
  std::vector<float> h(width), y(descriptor.hidden_size);
  const RandomWeights gate_up = {descriptor.weight_format, weights.gate_up, weights.gate_up_scales};
  const RandomWeights down = {descriptor.weight_format, weights.down, weights.down_scales};
  const auto input = [&descriptor](const std::vector<float>& values) {
    return descriptor.row_format ? Quantized(*descriptor.row_format, values)
                                 : RestatedRow{values, {}};
  };
  const auto row = [&](const RandomWeights& matrix, const Tensor& bias, const RestatedRow& in,
                       int64_t n) {
    volatile float sum = RestatedProjection(in.values, matrix, n, in.scales);
    if (descriptor.has_bias) sum = sum + bias.as<float>()[n];
    return sum;
  };
  const RestatedRow in = input(x);
  for (int64_t f = 0; f < width; ++f) {
    const float g = row(gate_up, weights.gate_up_bias, in, f);
    const float u = descriptor.gated ? row(gate_up, weights.gate_up_bias, in, width + f) : 0.0f;
    h[f] = RoundRow(request, RestatedActivation(descriptor, g, u));
  }
  const RestatedRow between = input(h);
  for (int64_t d = 0; d < descriptor.hidden_size; ++d) {
    y[d] = RoundRow(request, row(down, weights.down_bias, between, d));
  }
  return y;
}

}  // namespace expertmesh
