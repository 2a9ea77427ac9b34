#include "common/kernels/dot_product_kernels.h"

#ifndef __clang__  // GCC 12 takes the deliberately undefined operands of its own intrinsics for a
                   // mistake
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <utility>

#include "common/kernels/widen_tables.h"
#include "common/numerics/flush_denormals.h"

#ifdef __clang__  // knows no preferred width here
#define DOT_PRODUCT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#else
#define DOT_PRODUCT_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")))
#endif
#define INLINE DOT_PRODUCT_TARGET __attribute__((always_inline)) inline
#define UNROLL _Pragma("GCC unroll 16")

namespace expertmesh {
namespace {

// By hand: GCC 12 would hoist all broadcasts and spill.
INLINE __m512i BroadcastPair(const std::byte* x) {
  __m512i pair;
  asm volatile("vpbroadcastd %1, %0" : "=v"(pair) : "m"(*reinterpret_cast<const uint32_t*>(x)));
  return pair;
}

INLINE float* SumsOf(const TileArgs& args, int panel, int row) {
  return args.c + panel * args.c_stride + row * kPanelColumns;
}

// The chains of one block of k are done: c = fma(chain, scale, c), and the next ones begin.
template <int kRows, int kPanels>
INLINE void AddScaled(const TileArgs& args, const std::byte* scales, bool from_zero,
                      __m512 (&acc)[kPanels][kRows]) {
  UNROLL for (int p = 0; p < kPanels; ++p) {
    const __m512 scale = _mm512_load_ps(scales + p * args.scale_bytes);
    UNROLL for (int r = 0; r < kRows; ++r) {
      float* const c = SumsOf(args, p, r);
      const __m512 sum = from_zero ? _mm512_setzero_ps() : _mm512_load_ps(c);
      _mm512_store_ps(c, _mm512_fmadd_ps(acc[p][r], scale, sum));
      acc[p][r] = _mm512_setzero_ps();
    }
  }
}

// acc += w[2k + 1] x[2k + 1], then += w[2k] x[2k], for 16 columns.
template <int kRows, int kPanels>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void Tile(const TileArgs& args) {
  __m512 acc[kPanels][kRows];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      acc[p][r] = args.from_zero ? _mm512_setzero_ps() : _mm512_load_ps(SumsOf(args, p, r));
    }
  }
  const std::byte* line = args.weights;
  const int64_t panel_bytes = args.panel_bytes;
  const auto* x = static_cast<const std::byte*>(args.x);
  const int64_t x_stride = args.x_stride;
  const std::byte* prefetch = args.prefetch;
  int64_t countdown = args.prefetch_every;
  for (int64_t lines = args.lines; lines > 0; --lines) {
    if (--countdown == 0) {
      countdown = args.prefetch_every;
      UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(prefetch + p * args.prefetch_bytes, 0, 2);
      }
      prefetch += kLineBytes;
    }
    __m512i w[kPanels];
    UNROLL for (int p = 0; p < kPanels; ++p) w[p] = _mm512_load_si512(line + p * panel_bytes);
    UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i pair = BroadcastPair(x + r * x_stride);
      UNROLL for (int p = 0; p < kPanels; ++p) {
        acc[p][r] = _mm512_dpbf16_ps(acc[p][r], (__m512bh)w[p], (__m512bh)pair);
      }
    }
    line += kLineBytes;
    x += 2 * sizeof(uint16_t);
  }
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) _mm512_store_ps(SumsOf(args, p, r), acc[p][r]);
  }
}

// The lookup of AVX512_VBMI: table[i mod 128] of 128 bytes. By hand, since the rest of the file is
// also for processors without it.
INLINE __m512i Lookup128(__m512i index, const uint8_t* table) {
  asm("vpermi2b %2, %1, %0"
      : "+v"(index)
      : "v"(_mm512_load_si512(table)), "m"(*reinterpret_cast<const __m512i*>(table + 64)));
  return index;
}

// The formats of a quantised line, as in kernels.cc.
struct LinesFp8 {
  static constexpr int kWords = 2;
  static constexpr int64_t kScaleLines = kFp8BlockK / 4;
  static constexpr int64_t kScaleBytes = kLineBytes;
  struct Scale {};
  INLINE static Scale LoadScale(const std::byte* /*scales*/) { return {}; }
  INLINE static void Widen(const std::byte* line, Scale /*scale*/, __m512i (&words)[kWords]) {
    const __m512i v = _mm512_load_si512(line);
    const __m512i low = Lookup128(v, kWidenTables.e4m3_low);
    const __m512i magnitude = Lookup128(v, kWidenTables.e4m3_high);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, v, sign, 0xf8);  // a | b & c
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};
struct LinesMxfp4 {
  static constexpr int kWords = 4;
  static constexpr int64_t kScaleLines = kMxBlockK / 8;
  static constexpr int64_t kScaleBytes = kPanelColumns;
  using Scale = __m512i;
  INLINE static Scale LoadScale(const std::byte* scales) {
    const __m512i scale =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    const __m512i shift =
        _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kMaxMxfp4Scale), scale), 7);
    return _mm512_or_si512(shift, _mm512_slli_epi32(shift, 16));
  }
  INLINE static void Widen(const std::byte* line, Scale scale, __m512i (&words)[kWords]) {
    const __m512i v = _mm512_load_si512(line);
    const __m512i low_table = TableOf16(kWidenTables.e2m1_low);
    const __m512i high_table = TableOf16(kWidenTables.e2m1_high);
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    const __m512i nibbles[2] = {_mm512_and_si512(v, nibble),
                                _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble)};
    UNROLL for (int i = 0; i < 2; ++i) {
      const __m512i low = _mm512_shuffle_epi8(low_table, nibbles[i]);
      const __m512i high = _mm512_shuffle_epi8(high_table, nibbles[i]);
      words[2 * i] = _mm512_subs_epu16(_mm512_unpacklo_epi8(low, high), scale);
      words[2 * i + 1] = _mm512_subs_epu16(_mm512_unpackhi_epi8(low, high), scale);
    }
  }
  INLINE static __m512i TableOf16(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
};

// Few rows: a whole block from its first line on, widened in registers. kScaled: the lines of a
// scale have chains of their own (kFp8Block128).
template <class Lines, bool kScaled, int kRows, int kPanels>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void WideningTile(const TileArgs& args) {
  __m512 acc[kPanels][kRows];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) acc[p][r] = _mm512_setzero_ps();
  }
  const std::byte* line = args.weights;
  const int64_t panel_bytes = args.panel_bytes;
  const auto* x = static_cast<const std::byte*>(args.x);
  const int64_t x_stride = args.x_stride;
  const std::byte* prefetch = args.prefetch;
  const std::byte* scales = args.scales;
  for (int64_t left = args.lines; left > 0;) {
    const int64_t lines = left < Lines::kScaleLines ? left : Lines::kScaleLines;
    left -= lines;
    typename Lines::Scale scale[kPanels];
    UNROLL for (int p = 0; p < kPanels; ++p) {
      scale[p] = Lines::LoadScale(scales + p * args.scale_bytes);
    }
    for (int64_t n = lines; n > 0; --n) {
      UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(prefetch + p * panel_bytes, 0, 2);
      }
      prefetch += kLineBytes;
      UNROLL for (int p = 0; p < kPanels; ++p) {
        __m512i words[Lines::kWords];
        Lines::Widen(line + p * panel_bytes, scale[p], words);
        UNROLL for (int w = 0; w < Lines::kWords; ++w) {
          UNROLL for (int r = 0; r < kRows; ++r) {
            const __m512i pair = BroadcastPair(x + r * x_stride + w * 2 * sizeof(uint16_t));
            acc[p][r] = _mm512_dpbf16_ps(acc[p][r], (__m512bh)words[w], (__m512bh)pair);
          }
        }
      }
      line += kLineBytes;
      x += Lines::kWords * 2 * sizeof(uint16_t);
    }
    if constexpr (kScaled) {
      AddScaled<kRows, kPanels>(args, scales, scales == args.scales, acc);
    }
    scales += Lines::kScaleBytes;
  }
  if constexpr (!kScaled) {
    UNROLL for (int p = 0; p < kPanels; ++p) {
      UNROLL for (int r = 0; r < kRows; ++r) _mm512_store_ps(SumsOf(args, p, r), acc[p][r]);
    }
  }
}

template <class Lines>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void WidenLines(const std::byte* from, const std::byte* scales,
                                                   int64_t lines, std::byte* to) {
  for (int64_t left = lines; left > 0;) {
    const int64_t block = left < Lines::kScaleLines ? left : Lines::kScaleLines;
    left -= block;
    const typename Lines::Scale scale = Lines::LoadScale(scales);
    for (int64_t n = block; n > 0; --n) {
      __m512i words[Lines::kWords];
      Lines::Widen(from, scale, words);
      UNROLL for (int w = 0; w < Lines::kWords; ++w) {
        _mm512_store_si512(to + w * kLineBytes, words[w]);
      }
      from += kLineBytes;
      to += Lines::kWords * kLineBytes;
    }
    scales += Lines::kScaleBytes;
  }
}

DOT_PRODUCT_TARGET KERNEL_NOINLINE void DotProduct(const uint32_t* a, const uint32_t* b,
                                                   float* acc) {
  _mm512_storeu_ps(acc, _mm512_dpbf16_ps(_mm512_loadu_ps(acc), (__m512bh)_mm512_loadu_si512(a),
                                         (__m512bh)_mm512_loadu_si512(b)));
}

KERNEL_NOINLINE KERNEL_FMA float PairChain(uint32_t a, uint32_t b, float acc) {
  acc = std::fma(std::bit_cast<float>(a & 0xffff0000u), std::bit_cast<float>(b & 0xffff0000u), acc);
  return std::fma(std::bit_cast<float>(a << 16), std::bit_cast<float>(b << 16), acc);
}

using RowsLess1 = std::make_integer_sequence<int, kMaxTileRows>;

template <int... kRowsLess1>
Tiles MakeTiles(std::integer_sequence<int, kRowsLess1...> /*rows*/) {
  Tiles tiles;
  ((tiles.tile[kRowsLess1 + 1] = Tile<kRowsLess1 + 1, kBlockPanels>), ...);
  for (int& panels : tiles.panels) panels = kBlockPanels;
  return tiles;
}

template <class Lines, bool kScaled, int... kRowsLess1>
TileKernels MakeQuantised(int64_t chunk_k, std::integer_sequence<int, kRowsLess1...> rows) {
  TileKernels kernels;
  ((kernels.single_pass.tile[kRowsLess1 + 1] =
        WideningTile<Lines, kScaled, kRowsLess1 + 1, kBlockPanels>),
   ...);
  for (int& panels : kernels.single_pass.panels) panels = kBlockPanels;
  kernels.single_pass_rows = 6;
  kernels.chunked = MakeTiles(rows);
  kernels.chunk_lines = chunk_k / (2 * Lines::kWords);
  kernels.widen = WidenLines<Lines>;
  return kernels;
}

}  // namespace

void AddDotProductKernels(Kernels* kernels) {
  const RowsLess1 rows;
  kernels->bf16_pairs.single_pass = MakeTiles(rows);
  kernels->bf16_pairs.single_pass_rows = 6;
  kernels->bf16_pairs.chunked = kernels->bf16_pairs.single_pass;
  kernels->bf16_pairs.chunk_lines = 1024;
  kernels->mxfp4_pairs = MakeQuantised<LinesMxfp4, false>(256, rows);
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512vbmi")) return;
  kernels->fp8_block_pairs = MakeQuantised<LinesFp8, true>(kFp8BlockK, rows);
  kernels->fp8_pairs = MakeQuantised<LinesFp8, false>(256, rows);
}

bool DotProductHasContractOrder() {
  const ScopedFlushDenormals flush;
  uint32_t state = 1;
  const auto random = [&state] {  // xorshift
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
  };
  // Exponents around those of 1 and of the smallest products, in turn.
  const auto random_pair = [&random](uint32_t exponent) {
    const uint32_t bits = random() & 0x807f807fu;
    return bits | (exponent + random() % 8) << 7 | (exponent + random() % 8) << 23;
  };
  for (int round = 0; round < 1000; ++round) {
    const uint32_t exponent = round % 2 == 0 ? 124 : 60;
    uint32_t a[16], b[16];
    float acc[16], expected[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = random_pair(exponent);
      b[i] = random_pair(exponent);
      const uint32_t biased = 2 * exponent - 127 + 7 + random() % 4;
      acc[i] = std::bit_cast<float>((random() & 0x807fffffu) | (biased & 0xff) << 23);
      expected[i] = PairChain(a[i], b[i], acc[i]);
    }
    DotProduct(a, b, acc);
    for (int i = 0; i < 16; ++i) {
      if (std::bit_cast<uint32_t>(acc[i]) != std::bit_cast<uint32_t>(expected[i])) return false;
    }
  }
  return true;
}

}  // namespace expertmesh
