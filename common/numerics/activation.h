// What experts compute between their two projections, as scalar functions: part of the bit
// contract, like math.h, and to be called under ScopedFlushDenormals.
//
// With g and u of the gate and up projections (biases added), L the limit and a = alpha, every
// operation below is rounded in fp32, in this order; min and max return their second argument where
// the first one is not less or greater:
//
//   kSiluGlu         (g / (1 + Exp(-g))) * u
//   kClampedSwishGlu       c = min(g, L), v = min(max(u, -L), L): (c / (1 + Exp(-(a * c)))) * (v +
//   1) kClampedSiluGlu  c and v as above: (c / (1 + Exp(-c))) * v kSiluClampedGlu  v as above:
//   min(g / (1 + Exp(-g)), L) * v kGeluTanhGlu     z = 0.79788456 * fma(0.044715, (g * g) * g, g):
//   (g / 2 * (1 + Tanh(z))) * u kGeluErfGlu      (g / 2 * (1 + Erf(g * 0.70710678))) * u kRelu2 r =
//   max(g, 0): r * r
//
// All are +0 for g = u = +0, which is what padded columns of a GEMM give.
#pragma once

#include <cmath>

#include "common/model/description.h"
#include "common/numerics/math.h"

namespace expertmesh {

inline constexpr float kSqrtTwoOverPi = 0.797884583f;
inline constexpr float kGeluCubic = 0.044715f;
inline constexpr float kSqrtHalf = 0.707106769f;

struct ActivationFunction {
  Activation kind = Activation::kSiluGlu;
  float alpha = 1.0f;
  float limit = 0.0f;  // L > 0 where the function has one
};

inline ActivationFunction ActivationOf(const ExpertDescriptor& descriptor) {
  return {descriptor.activation, descriptor.activation_alpha, descriptor.activation_limit};
}

// Whether it has no up projection.
constexpr bool IsGated(Activation kind) { return kind != Activation::kRelu2; }

// Whether it has a limit.
constexpr bool HasLimit(Activation kind) {
  return kind == Activation::kClampedSwishGlu || kind == Activation::kClampedSiluGlu ||
         kind == Activation::kSiluClampedGlu;
}

inline float MinOf(float a, float b) { return a < b ? a : b; }
inline float MaxOf(float a, float b) { return a > b ? a : b; }

// u counts only where the function is gated.
inline float Activate(const ActivationFunction& function, float g, float u) {
  const float limit = function.limit;
  switch (function.kind) {
    case Activation::kSiluGlu:
      return Silu(g) * u;
    case Activation::kClampedSwishGlu: {
      const float c = MinOf(g, limit);
      return c / (1.0f + Exp(-(function.alpha * c))) * (MinOf(MaxOf(u, -limit), limit) + 1.0f);
    }
    case Activation::kClampedSiluGlu:
      return Silu(MinOf(g, limit)) * MinOf(MaxOf(u, -limit), limit);
    case Activation::kSiluClampedGlu:
      return MinOf(Silu(g), limit) * MinOf(MaxOf(u, -limit), limit);
    case Activation::kGeluTanhGlu: {
      const float z = kSqrtTwoOverPi * std::fma(kGeluCubic, g * g * g, g);
      return 0.5f * g * (1.0f + Tanh(z)) * u;
    }
    case Activation::kGeluErfGlu:
      return 0.5f * g * (1.0f + Erf(g * kSqrtHalf)) * u;
    case Activation::kRelu2: {
      const float r = MaxOf(g, 0.0f);
      return r * r;
    }
  }
  return 0.0f;
}

}  // namespace expertmesh
