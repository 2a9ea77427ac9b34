// Tables by which vector kernels widen e4m3 and e2m1 codes to BF16, byte by byte.
#pragma once

#include <cstdint>

namespace expertmesh {

// Tables for MXFP8 have codes times 2^120, the largest power with which they fit below the sign:
// kMaxMxfp8Scale is that of 2^120, so that other scales are a subtraction that saturates at 0.
constexpr int kMxfp8TableExponent = 120;

struct WidenTables {
  // The bytes of the BF16 of an e4m3 code below 128.
  alignas(64) uint8_t e4m3_low[128];
  alignas(64) uint8_t e4m3_high[128];
  // The exponent of a code below 128 times 2^120, 0 of 0, and its mantissa where BF16 has it.
  alignas(64) uint8_t mxfp8_exponent[128];
  alignas(64) uint8_t mxfp8_mantissa[128];
  // The same by nibbles, for normal numbers: the low byte is low[low nibble], the high byte is
  // high[high nibble], the sign among its bits. Codes below 16 (by magnitude), some of which are
  // denormal, take the exclusive or with low_fix and high_fix[low nibble] in addition.
  alignas(16) uint8_t low[16];
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t low_fix[16];
  alignas(16) uint8_t high_fix[16];
  // Those of the codes times 2^120, whose low bytes are the same; 0 is still 0.
  alignas(16) uint8_t mxfp8_high[16];
  alignas(16) uint8_t mxfp8_high_fix[16];
  // The bytes of the BF16 of an e2m1 code times 2^125; -0 has no sign.
  alignas(16) uint8_t e2m1_low[16];
  alignas(16) uint8_t e2m1_high[16];
  // The same as words, twice.
  alignas(64) uint16_t e2m1[32];
};

constexpr uint16_t BF16OfE4M3(int code) {
  int exponent = code >> 3 & 15;
  int mantissa = code & 7;
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    exponent = 1;
    for (; mantissa < 8; mantissa <<= 1) --exponent;
    mantissa &= 7;
  }
  return static_cast<uint16_t>((exponent + 120) << 7 | mantissa << 4);
}

constexpr WidenTables MakeWidenTables() {
  WidenTables t = {};
  for (int code = 0; code < 128; ++code) {
    t.e4m3_low[code] = static_cast<uint8_t>(BF16OfE4M3(code) & 0xff);
    t.e4m3_high[code] = static_cast<uint8_t>(BF16OfE4M3(code) >> 8);
    t.mxfp8_exponent[code] =
        static_cast<uint8_t>(code == 0 ? 0 : (BF16OfE4M3(code) >> 7) + kMxfp8TableExponent);
    t.mxfp8_mantissa[code] = static_cast<uint8_t>(BF16OfE4M3(code) & 0x7f);
  }
  for (int n = 0; n < 16; ++n) {
    t.low[n] = static_cast<uint8_t>(n << 4);
    t.high[n] = static_cast<uint8_t>((n & 8) << 4 | (0x3c + (n & 7)));
    t.low_fix[n] = static_cast<uint8_t>(t.e4m3_low[n] ^ n << 4);
    t.high_fix[n] = static_cast<uint8_t>(t.e4m3_high[n] ^ 0x3c);
    t.mxfp8_high[n] = static_cast<uint8_t>(t.high[n] + kMxfp8TableExponent / 2);
    t.mxfp8_high_fix[n] = static_cast<uint8_t>(t.mxfp8_exponent[n] >> 1 ^ t.mxfp8_high[0]);
    const int magnitude = n & 7;  // 0, 0.5, then exponent and mantissa: 1, 1.5, 2, 3, 4, 6
    int word = 0;
    if (magnitude == 1) word = (127 - 1 + 125) << 7;
    if (magnitude > 1) word = (126 + (magnitude >> 1) + 125) << 7 | (magnitude & 1) << 6;
    if (magnitude > 0) word |= (n & 8) << 12;
    t.e2m1_low[n] = static_cast<uint8_t>(word & 0xff);
    t.e2m1_high[n] = static_cast<uint8_t>(word >> 8);
    t.e2m1[n] = t.e2m1[16 + n] = static_cast<uint16_t>(word);
  }
  return t;
}

inline constexpr WidenTables kWidenTables = MakeWidenTables();

}  // namespace expertmesh
