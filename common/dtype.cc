#include "common/dtype.h"

#include <array>
#include <cstddef>

namespace expertmesh {
namespace {

struct DTypeInfo {
  const char* name;
  int bits;
};

constexpr std::array<DTypeInfo, 22> kInfo = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

}  // namespace

int BitsOf(DType dtype) { return kInfo[static_cast<size_t>(dtype)].bits; }

const char* NameOf(DType dtype) { return kInfo[static_cast<size_t>(dtype)].name; }

std::optional<DType> DTypeFromName(const std::string& name) {
  for (size_t i = 0; i < kInfo.size(); ++i) {
    if (name == kInfo[i].name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

float FloatFromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    // Normalise: a binary16 denormal is a normal binary32.
    const int shift = std::countl_zero(mantissa) - 21;
    mantissa = (mantissa << shift) & 0x3ffu;
    exponent = static_cast<uint32_t>(1 - shift);
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

float FloatFromE4M3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t exponent = (code >> 3) & 0xfu;
  const uint32_t mantissa = code & 0x7u;
  if (IsNaNE4M3(code)) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {  // multiples of 2^-9
    const float value = static_cast<float>(mantissa) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

float FloatFromE8M0(uint8_t code) {
  if (code == 0xff) return std::bit_cast<float>(0x7fc00000u);
  if (code == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127 is denormal
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

namespace {

// 2^(scale - 127); in double, where nothing that it is multiplied with becomes denormal.
double PowerOfTwo(uint8_t scale) {
  return std::bit_cast<double>(static_cast<uint64_t>(scale + 1023 - 127) << 52);
}

}  // namespace

float FloatFromMxfp4(uint8_t code, uint8_t scale) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double magnitude = kMagnitudes[code & 7];
  if (magnitude == 0 || (scale == 0 && magnitude == 0.5)) return 0.0f;
  const auto value = static_cast<float>(magnitude * PowerOfTwo(scale));
  return (code & 8) != 0 ? -value : value;
}

float FloatFromMxfp8(uint8_t code, uint8_t scale) {
  const double value = FloatFromE4M3(code) * PowerOfTwo(scale);
  if (value > -0x1p-126 && value < 0x1p-126) return (code & 0x80) != 0 ? -0.0f : 0.0f;
  return static_cast<float>(value);
}

uint16_t F16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more
  if (magnitude < 0x33000000u) return sign;                                    // below 2^-25
  if (magnitude < 0x38800000u) {                                               // denormal result
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)))));
  }
  const uint32_t rebased = magnitude - 0x38000000u;
  return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

}  // namespace expertmesh
