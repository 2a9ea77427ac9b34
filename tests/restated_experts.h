// Experts with random weights, and one expert restated from the bit contract: every fused
// multiply-add by libm's fma, every operation written out, sharing nothing with the engine but the
// elementary functions. For tests.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "common/model/checkpoint.h"
#include "common/model/description.h"
#include "common/numerics/math.h"
#include "tests/random_tensor.h"

namespace expertmesh {

inline const std::vector<Activation>& AllActivations() {
  static const std::vector<Activation> all = {
      Activation::kSiluGlu,        Activation::kGptOssGlu,   Activation::kClampedSiluGlu,
      Activation::kSiluClampedGlu, Activation::kGeluTanhGlu, Activation::kGeluErfGlu,
      Activation::kRelu2};
  return all;
}

// Limits are low, so that many values of ordinary size pass them.
inline ExpertDescriptor Expert(Activation activation, bool has_bias, DType dtype,
                               int64_t hidden_size, int64_t intermediate_size) {
  ExpertDescriptor descriptor;
  descriptor.hidden_size = hidden_size;
  descriptor.intermediate_size = intermediate_size;
  descriptor.activation = activation;
  descriptor.activation_alpha = 1.702f;
  descriptor.activation_limit = 0.75f;
  descriptor.gated = activation != Activation::kRelu2;
  descriptor.has_bias = has_bias;
  descriptor.weight_dtype = dtype;
  return descriptor;
}

inline ExpertWeights RandomExpert(const ExpertDescriptor& descriptor, float scale,
                                  std::mt19937& rng) {
  const int64_t rows = descriptor.intermediate_size * (descriptor.gated ? 2 : 1);
  ExpertWeights weights;
  weights.gate_up =
      RandomTensor(descriptor.weight_dtype, {rows, descriptor.hidden_size}, scale, rng);
  weights.down = RandomTensor(descriptor.weight_dtype,
                              {descriptor.hidden_size, descriptor.intermediate_size}, scale, rng);
  if (descriptor.has_bias) {
    weights.gate_up_bias = RandomTensor(DType::kF32, {rows}, scale, rng);
    weights.down_bias = RandomTensor(DType::kF32, {descriptor.hidden_size}, scale, rng);
  }
  return weights;
}

// One chain of fused multiply-adds, by the order of the weight format.
inline float RestatedChain(const std::vector<float>& x, const Tensor& weights, int64_t n) {
  const int64_t columns = weights.dim(1);
  const int64_t swap = weights.dtype() == DType::kF32 ? 0 : 1;  // the odd one of a pair first
  volatile float sum = 0.0f;
  for (int64_t i = 0; i < columns + (columns & swap); ++i) {
    const int64_t k = i ^ swap;  // may be the zero that pads an odd width
    const float a = k < columns ? x[k] : 0.0f;
    const float w =
        k < columns ? LoadFloat(weights.dtype(), weights.data(), n * columns + k) : 0.0f;
    sum = fmaf(a, w, sum);
  }
  return sum;
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
    case Activation::kGptOssGlu:
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

// The whole expert for one row, with FTZ and DAZ set by the caller.
inline std::vector<float> RestatedExpert(const ExpertDescriptor& descriptor,
                                         const ExpertWeights& weights, DType request,
                                         const std::vector<float>& x) {
  const int64_t width = descriptor.intermediate_size;
  std::vector<float> h(width), y(descriptor.hidden_size);
  const auto row = [&](const Tensor& matrix, const Tensor& bias, const std::vector<float>& in,
                       int64_t n) {
    volatile float sum = RestatedChain(in, matrix, n);
    if (descriptor.has_bias) sum = sum + bias.as<float>()[n];
    return sum;
  };
  for (int64_t f = 0; f < width; ++f) {
    const float g = row(weights.gate_up, weights.gate_up_bias, x, f);
    const float u =
        descriptor.gated ? row(weights.gate_up, weights.gate_up_bias, x, width + f) : 0.0f;
    h[f] = RoundRow(request, RestatedActivation(descriptor, g, u));
  }
  for (int64_t d = 0; d < descriptor.hidden_size; ++d) {
    y[d] = RoundRow(request, row(weights.down, weights.down_bias, h, d));
  }
  return y;
}

}  // namespace expertmesh
