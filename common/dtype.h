// Element types: the ones safetensors files may hold, and conversions of those we compute with.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

namespace expertmesh {

// Every dtype of the safetensors format, in the order of its reference implementation.
enum class DType : uint8_t {
  kBOOL,
  kF4,
  kF6_E2M3,
  kF6_E3M2,
  kU8,
  kI8,
  kF8_E5M2,
  kF8_E4M3,
  kF8_E8M0,
  kF8_E4M3FNUZ,
  kF8_E5M2FNUZ,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// Size of one element in bits (4 for F4, 6 for F6_*, 8 and more for all others).
int BitsOf(DType dtype);

// Size of one element in bytes; dtype must not be F4 or F6_*.
inline int64_t BytesOf(DType dtype) { return BitsOf(dtype) / 8; }

// The safetensors name, for example "BF16".
const char* NameOf(DType dtype);

// The dtype with that safetensors name.
std::optional<DType> DTypeFromName(const std::string& name);

// True for the dtypes a request may have: F32, BF16, F16.
inline bool IsActivationDType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Dtype of the rows that experts return for a request's dtype: fp32 requests and f16 ones, which
// are computed as fp32, get F32.
inline DType ReplyDType(DType request) {
  return request == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

// Conversions. Bit patterns in, bit patterns out; independent of the floating-point environment, so
// they mean the same on every thread.

inline float FloatFromBF16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest, ties to even. NaN becomes a quiet NaN; values past the range become infinity.
inline uint16_t BF16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact. Denormals become normal floats.
float FloatFromF16(uint16_t bits);

// Round to nearest, ties to even, with gradual underflow. NaN becomes a quiet NaN.
uint16_t F16FromFloat(float value);

// Exact; 0x7f and 0xff are NaN, there is no infinity.
float FloatFromE4M3(uint8_t code);
constexpr bool IsNaNE4M3(uint8_t code) { return (code & 0x7f) == 0x7f; }

// 2^(code - 127); 255 is NaN.
float FloatFromE8M0(uint8_t code);

// What an MXFP4 weight counts as: the e2m1 value of the low four bits of `code` times 2^(scale -
// 127), exact in bf16. Without a sign where it is zero: the code -0, and codes of +-0.5 at scale 0.
// A result below 2^-126 may be denormal or zero, which are the same to the arithmetic. scale is at
// most kMaxMxfp4Scale, beyond which values may not be finite.
float FloatFromMxfp4(uint8_t code, uint8_t scale);
constexpr uint8_t kMaxMxfp4Scale = 252;

// What an MXFP8 code counts as: the e4m3 value of `code`, which is no NaN, times 2^(scale - 127),
// exact in bf16. Below 2^-126 that is zero, with the sign of the code. scale is at most
// kMaxMxfp8Scale, with which codes are at most 240.
float FloatFromMxfp8(uint8_t code, uint8_t scale);
constexpr uint8_t kMaxMxfp8Scale = 247;

// Element `index` of an F32, BF16 or F16 array, widened to float.
inline float LoadFloat(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kBF16:
      return FloatFromBF16(static_cast<const uint16_t*>(data)[index]);
    case DType::kF16:
      return FloatFromF16(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// Rounds `value` once to an F32, BF16 or F16 array's element `index`.
inline void StoreFloat(DType dtype, void* data, int64_t index, float value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<uint16_t*>(data)[index] = BF16FromFloat(value);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(data)[index] = F16FromFloat(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace expertmesh
