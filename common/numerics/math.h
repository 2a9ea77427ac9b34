// The project's own elementary functions, part of the bit contract: every operation is written and
// rounded in fp32, so that a scalar and a vector form give the same bits, whatever libm the machine
// has. To be called under ScopedFlushDenormals.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace expertmesh {

// e^x. At most 1.02 units in the last place from the exact value (1.011 measured over every float)
// and monotone; results below the smallest normal number are 0, above the largest finite one
// +infinity; NaN gives NaN.
//
// x = n ln2 + r with |r| <= ln2 / 2 (ln2 in two parts, the first with trailing zeros so that n
// times it is exact), then a polynomial of degree 6 in r (the minimax coefficients of Cephes'
// expf), then 2^n by exponent bits.
inline float Exp(float x) {
  if (!(x < 88.722839f)) return x != x ? x : std::bit_cast<float>(0x7f800000u);
  if (x < -87.336544f) return 0.0f;
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
  const float shifted = std::fma(x, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p, r * r, r) + 1.0f;
  // n is in [-126, 128]: two factors, because 2^128 is not a float. The first product is exact.
  const int32_t whole = static_cast<int32_t>(n);
  const int32_t half = whole >> 1;
  const float a = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float b = std::bit_cast<float>(static_cast<uint32_t>(whole - half + 127) << 23);
  return p * a * b;
}

// 1 / (1 + e^-x).
inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// log(1 + x) for x > -1. At most 1 unit in the last place (0.82 measured over every float); -1
// gives -infinity, less than that NaN.
//
// 1 + x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), the rounding error of 1 + x added back to
// f; then e ln2 + f - f^2 / 2 + f^3 p(f) with the coefficients of Cephes' logf.
inline float Log1p(float x) {
  constexpr float kInfinity = std::bit_cast<float>(0x7f800000u);
  if (!(x > -1.0f)) return x == -1.0f ? -kInfinity : std::bit_cast<float>(0x7fc00000u);
  if (x == kInfinity) return x;
  const float u = 1.0f + x;
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  const uint32_t bits = std::bit_cast<uint32_t>(u);
  const int32_t e = (static_cast<int32_t>(bits) - static_cast<int32_t>(kSqrtHalf)) >> 23;
  float f = x;
  if (e != 0) {
    const float error = x >= 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
    // Beyond 2^126 the error is far below the last place, whatever its factor.
    const uint32_t scale_exponent = static_cast<uint32_t>(127 - (e < 126 ? e : 126));
    const float mantissa = std::bit_cast<float>(bits - (static_cast<uint32_t>(e) << 23));
    f = std::fma(error, std::bit_cast<float>(scale_exponent << 23), mantissa - 1.0f);
  }
  float p = 7.0376836292e-2f;
  p = std::fma(p, f, -1.1514610310e-1f);
  p = std::fma(p, f, 1.1676998740e-1f);
  p = std::fma(p, f, -1.2420140846e-1f);
  p = std::fma(p, f, 1.4249322787e-1f);
  p = std::fma(p, f, -1.6668057665e-1f);
  p = std::fma(p, f, 2.0000714765e-1f);
  p = std::fma(p, f, -2.4999993993e-1f);
  p = std::fma(p, f, 3.3333331174e-1f);
  const float n = static_cast<float>(e);
  const float square = f * f;
  float y = p * f * square;
  y = std::fma(n, -2.12194440e-4f, y);
  y = std::fma(square, -0.5f, y);
  return std::fma(n, 0.693359375f, f + y);
}

// tanh(x). At most 1.5 units in the last place (1.34 measured over every float) and monotone; odd,
// but tanh(-0) is +0. Below 0.625 an odd polynomial (the coefficients of Cephes' tanhf), else
// 1 - 2 / (e^2|x| + 1).
inline float Tanh(float x) {
  const float magnitude = std::fabs(x);
  if (magnitude < 0.625f) {
    const float square = x * x;
    float p = -5.70498872745e-3f;
    p = std::fma(p, square, 2.06390887954e-2f);
    p = std::fma(p, square, -5.37397155531e-2f);
    p = std::fma(p, square, 1.33314422036e-1f);
    p = std::fma(p, square, -3.33332819422e-1f);
    return std::fma(p * square, x, x);
  }
  return std::copysign(1.0f - 2.0f / (Exp(2.0f * magnitude) + 1.0f), x);
}

// erf(x). At most 1.5 units in the last place (1.18 measured over every float); odd. Below 1 an odd
// polynomial, else 1 - e^(|x| p(|x|)): minimax fits of degree 6 to erf(x) / x - 1 in x^2 and to
// log(erfc(x)) / x up to 3.95, from where on the result is 1.
inline float Erf(float x) {
  const float magnitude = std::fabs(x);
  if (magnitude < 1.0f) {
    const float square = x * x;
    float p = 7.853855e-5f;
    p = std::fma(p, square, -8.0101914e-4f);
    p = std::fma(p, square, 5.1883273e-3f);
    p = std::fma(p, square, -2.6853811e-2f);
    p = std::fma(p, square, 1.12835854e-1f);
    p = std::fma(p, square, -3.7612626e-1f);
    p = std::fma(p, square, 1.2837917e-1f);
    return std::fma(p, x, x);
  }
  float p = -1.3962288e-5f;
  p = std::fma(p, magnitude, 3.505905e-4f);
  p = std::fma(p, magnitude, -3.7574708e-3f);
  p = std::fma(p, magnitude, 2.4010057e-2f);
  p = std::fma(p, magnitude, -1.0653085e-1f);
  p = std::fma(p, magnitude, -6.3496953e-1f);
  p = std::fma(p, magnitude, -1.1286943f);
  return std::copysign(1.0f - Exp(magnitude * p), x);
}

// log(1 + e^x), as max(x, 0) + log(1 + e^-|x|).
inline float Softplus(float x) { return (x > 0.0f ? x : 0.0f) + Log1p(Exp(-std::fabs(x))); }

// x * sigmoid(x), as x / (1 + e^-x).
inline float Silu(float x) { return x / (1.0f + Exp(-x)); }

}  // namespace expertmesh
