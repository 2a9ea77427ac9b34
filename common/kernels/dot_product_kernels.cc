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

constexpr int64_t kPairBytes = 2 * sizeof(uint16_t);

INLINE float* SumsOf(const TileArgs& args, int panel, int row) {
  return args.c + panel * args.c_stride + row * kPanelColumns;
}

template <int kRows, int kPanels>
INLINE void StoreSums(const TileArgs& args, const __m512 (&acc)[kPanels][kRows]) {
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) _mm512_store_ps(SumsOf(args, p, r), acc[p][r]);
  }
}

// The chains of one block of k are done: c = fma(chain, scale, c), and the next ones begin. block:
// counted from args.scales on.
template <bool kRowScales, int kRows, int kPanels>
INLINE void AddScaledBlock(const TileArgs& args, int64_t block, __m512 (&acc)[kPanels][kRows]) {
  const std::byte* const scales = args.scales + block * kFp8BlockScaleBytes;
  const bool from_zero = args.from_zero && block == 0;
  UNROLL for (int p = 0; p < kPanels; ++p) {
    const __m512 of_weights = _mm512_load_ps(scales + p * args.scale_bytes);
    UNROLL for (int r = 0; r < kRows; ++r) {
      __m512 scale = of_weights;
      if constexpr (kRowScales) {
        scale =
            _mm512_mul_ps(scale, _mm512_set1_ps(args.x_scales[r * args.x_scales_stride + block]));
      }
      float* const c = SumsOf(args, p, r);
      const __m512 sum = from_zero ? _mm512_setzero_ps() : _mm512_load_ps(c);
      _mm512_store_ps(c, _mm512_fmadd_ps(acc[p][r], scale, sum));
      acc[p][r] = _mm512_setzero_ps();
    }
  }
}

template <int kRows, int kPanels>
INLINE void AddScaled(const TileArgs& args, int64_t block, __m512 (&acc)[kPanels][kRows]) {
  if (args.x_scales == nullptr) {
    AddScaledBlock<false, kRows, kPanels>(args, block, acc);
  } else {
    AddScaledBlock<true, kRows, kPanels>(args, block, acc);
  }
}

// acc += w[2k + 1] x[2k + 1], then += w[2k] x[2k], for 16 columns. kScaled: the lines are those of
// one scale, which have chains of their own (kFp8Block128).
template <bool kScaled, int kRows, int kPanels>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void Tile(const TileArgs& args) {
  __m512 acc[kPanels][kRows];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      const bool from_zero = kScaled || args.from_zero;
      acc[p][r] = from_zero ? _mm512_setzero_ps() : _mm512_load_ps(SumsOf(args, p, r));
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
    x += kPairBytes;
  }
  if constexpr (kScaled) {
    AddScaled<kRows, kPanels>(args, /*block=*/0, acc);
  } else {
    StoreSums<kRows, kPanels>(args, acc);
  }
}

// Keeps a vector in its register: GCC 12 would load it again wherever it is used.
INLINE void Keep(__m512i& v) { asm("" : "+v"(v)); }

// The lookup of AVX512_VBMI: table[i mod 128] of 128 bytes. By hand, since the rest of the file is
// also for processors without it.
INLINE __m512i Lookup128(__m512i index, const __m512i (&table)[2]) {
  asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(table[0]), "v"(table[1]));
  return index;
}

// The formats of a quantised line, as in kernels.cc. PanelsAtOnce: how many a tile widens before it
// multiplies them, as measured.
struct LinesFp8 {
  static constexpr int kWords = 2;
  static constexpr int PanelsAtOnce(int rows, bool /*wide*/) { return rows <= 3 ? 4 : 2; }
  static constexpr int64_t kScaleLines = kFp8BlockK / 4;
  static constexpr int64_t kScaleBytes = kFp8BlockScaleBytes;
  struct Scale {};
  struct Tables {
    __m512i low[2], high[2], sign;
  };
  INLINE static Tables LoadTables() {
    Tables t;
    UNROLL for (int i = 0; i < 2; ++i) {
      t.low[i] = _mm512_load_si512(kWidenTables.e4m3_low + 64 * i);
      t.high[i] = _mm512_load_si512(kWidenTables.e4m3_high + 64 * i);
      Keep(t.low[i]);
      Keep(t.high[i]);
    }
    t.sign = _mm512_set1_epi8(static_cast<char>(0x80));
    return t;
  }
  INLINE static Scale LoadScale(const std::byte* /*scales*/) { return {}; }
  template <int kRows>
  INLINE static void Widen(const Tables& t, const std::byte* line, Scale /*scale*/,
                           __m512i (&words)[kWords]) {
    __m512i v = _mm512_load_si512(line);
    Keep(v);
    const __m512i low = Lookup128(v, t.low);
    const __m512i magnitude = Lookup128(v, t.high);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, v, t.sign, 0xf8);  // a | b & c
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};
struct LinesMxfp8 {
  static constexpr int kWords = 2;
  static constexpr int PanelsAtOnce(int rows, bool /*wide*/) { return rows <= 3 ? 4 : 2; }
  static constexpr int64_t kScaleLines = kMxBlockK / 4;
  static constexpr int64_t kScaleBytes = kPanelColumns;
  using Scale = __m512i;  // what is to be subtracted from the exponent of each byte of a line
  struct Tables {
    __m512i exponent[2], mantissa[2], top_bit;
  };
  INLINE static Tables LoadTables() {
    Tables t;
    UNROLL for (int i = 0; i < 2; ++i) {
      t.exponent[i] = _mm512_load_si512(kWidenTables.mxfp8_exponent + 64 * i);
      t.mantissa[i] = _mm512_load_si512(kWidenTables.mxfp8_mantissa + 64 * i);
      Keep(t.exponent[i]);
      Keep(t.mantissa[i]);
    }
    t.top_bit = _mm512_set1_epi8(static_cast<char>(0x80));
    return t;
  }
  INLINE static Scale LoadScale(const std::byte* scales) {
    const __m512i scale =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    const __m512i columns =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12));
    return _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(kMaxMxfp8Scale)),
                           _mm512_shuffle_epi8(scale, columns));
  }
  // The exponent saturates at zero, and then lies across both bytes, as if they were shifted right.
  template <int kRows>
  INLINE static void Widen(const Tables& t, const std::byte* line, Scale scale,
                           __m512i (&words)[kWords]) {
    __m512i v = _mm512_load_si512(line);
    Keep(v);
    constexpr int kFirstChooses = 0xca;  // a ? b : c
    const __m512i mantissa = Lookup128(v, t.mantissa);
    const __m512i exponent = _mm512_subs_epu8(Lookup128(v, t.exponent), scale);
    const __m512i low = _mm512_ternarylogic_epi32(t.top_bit, _mm512_slli_epi16(exponent, 7),
                                                  mantissa, kFirstChooses);
    const __m512i high =
        _mm512_ternarylogic_epi32(t.top_bit, v, _mm512_srli_epi16(exponent, 1), kFirstChooses);
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};
struct LinesMxfp4 {
  static constexpr int kWords = 4;
  static constexpr int PanelsAtOnce(int rows, bool wide) { return rows <= 5 || wide ? 2 : 1; }
  static constexpr int64_t kScaleLines = kMxBlockK / 8;
  static constexpr int64_t kScaleBytes = kPanelColumns;
  using Scale = __m512i;
  struct Tables {
    __m512i words;
  };
  INLINE static Tables LoadTables() { return {_mm512_load_si512(kWidenTables.e2m1)}; }
  INLINE static Scale LoadScale(const std::byte* scales) {
    const __m512i scale =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    const __m512i shift =
        _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kMaxMxfp4Scale), scale), 7);
    return _mm512_or_si512(shift, _mm512_slli_epi32(shift, 16));
  }
  template <int kRows>
  INLINE static void Widen(const Tables& t, const std::byte* line, Scale scale,
                           __m512i (&words)[kWords]) {
    __m512i v = _mm512_load_si512(line);
    Keep(v);
    // The lookup uses 5 bits of each word, and the table is there twice.
    const __m512i codes[2] = {_mm512_unpacklo_epi8(v, v), _mm512_unpackhi_epi8(v, v)};
    UNROLL for (int i = 0; i < 2; ++i) {
      words[i] = Scaled<kRows>(_mm512_permutexvar_epi16(codes[i], t.words), scale);
      words[2 + i] =
          Scaled<kRows>(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes[i], 4), t.words), scale);
    }
  }
  // A subtraction that saturates at zero. Of more than two rows by two instructions: the one there
  // is competes with the dot product.
  template <int kRows>
  INLINE static __m512i Scaled(__m512i words, Scale scale) {
    if constexpr (kRows <= 2) return _mm512_subs_epu16(words, scale);
    return _mm512_sub_epi16(_mm512_max_epu16(words, scale), scale);
  }
};

// The same for quantised lines, from the first one of a scale on, widened in registers and, where
// kWide, also for other tiles. A few panels are widened before they are multiplied, so that a pair
// is broadcast once for all of them.
template <class Lines, bool kScaled, bool kWide, int kRows, int kPanels>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void WideningTile(const TileArgs& args) {
  __m512 acc[kPanels][kRows];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      acc[p][r] =
          kScaled || args.from_zero ? _mm512_setzero_ps() : _mm512_load_ps(SumsOf(args, p, r));
    }
  }
  constexpr int kGroup = Lines::PanelsAtOnce(kRows, kWide);
  const typename Lines::Tables tables = Lines::LoadTables();
  const std::byte* line = args.weights;
  const int64_t panel_bytes = args.panel_bytes;
  const auto* x = static_cast<const std::byte*>(args.x);
  const int64_t x_stride = args.x_stride;
  const std::byte* prefetch = args.prefetch;
  const std::byte* scales = args.scales;
  [[maybe_unused]] std::byte* wide = args.wide;
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
      UNROLL for (int first = 0; first < kPanels; first += kGroup) {
        __m512i words[kGroup][Lines::kWords];
        UNROLL for (int p = 0; p < kGroup; ++p) {
          Lines::template Widen<kRows>(tables, line + (first + p) * panel_bytes, scale[first + p],
                                       words[p]);
        }
        if constexpr (kWide) {
          UNROLL for (int p = 0; p < kGroup; ++p) {
            UNROLL for (int w = 0; w < Lines::kWords; ++w) {
              _mm512_store_si512(wide + (first + p) * args.wide_bytes + w * kLineBytes,
                                 words[p][w]);
            }
          }
        }
        UNROLL for (int w = 0; w < Lines::kWords; ++w) {
          UNROLL for (int r = 0; r < kRows; ++r) {
            const __m512i pair = BroadcastPair(x + r * x_stride + w * kPairBytes);
            UNROLL for (int p = 0; p < kGroup; ++p) {
              acc[first + p][r] =
                  _mm512_dpbf16_ps(acc[first + p][r], (__m512bh)words[p][w], (__m512bh)pair);
            }
          }
        }
      }
      line += kLineBytes;
      x += Lines::kWords * kPairBytes;
      if constexpr (kWide) wide += Lines::kWords * kLineBytes;
    }
    if constexpr (kScaled) {
      AddScaled<kRows, kPanels>(args, (scales - args.scales) / Lines::kScaleBytes, acc);
    }
    scales += Lines::kScaleBytes;
  }
  if constexpr (!kScaled) StoreSums<kRows, kPanels>(args, acc);
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

template <bool kScaled, int... kRowsLess1>
Tiles MakeTiles(std::integer_sequence<int, kRowsLess1...> /*rows*/) {
  Tiles tiles;
  ((tiles.tile[kRowsLess1 + 1] = Tile<kScaled, kRowsLess1 + 1, kBlockPanels>), ...);
  for (int& panels : tiles.panels) panels = kBlockPanels;
  return tiles;
}

template <class Lines, bool kScaled, bool kWide, int... kRowsLess1>
Tiles MakeWideningTiles(std::integer_sequence<int, kRowsLess1...> /*rows*/) {
  Tiles tiles;
  ((tiles.tile[kRowsLess1 + 1] = WideningTile<Lines, kScaled, kWide, kRowsLess1 + 1, kBlockPanels>),
   ...);
  for (int& panels : tiles.panels) panels = kBlockPanels;
  return tiles;
}

template <class Lines, bool kScaled>
TileKernels MakeQuantised(int64_t chunk_k) {
  const RowsLess1 rows;
  TileKernels kernels;
  kernels.single_pass = MakeWideningTiles<Lines, kScaled, false>(rows);
  kernels.single_pass_rows = kMaxTileRows;
  kernels.widening = MakeWideningTiles<Lines, kScaled, true>(rows);
  kernels.chunked = MakeTiles<kScaled>(rows);
  kernels.chunk_lines = chunk_k / (2 * Lines::kWords);
  kernels.widens = true;
  return kernels;
}

}  // namespace

void AddDotProductKernels(Kernels* kernels) {
  const RowsLess1 rows;
  kernels->bf16_pairs.single_pass = MakeTiles<false>(rows);
  kernels->bf16_pairs.single_pass_rows = 6;
  kernels->bf16_pairs.chunked = kernels->bf16_pairs.single_pass;
  kernels->bf16_pairs.chunk_lines = 1024;
  kernels->mxfp4_pairs = MakeQuantised<LinesMxfp4, false>(256);
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512vbmi")) return;
  kernels->fp8_block_pairs = MakeQuantised<LinesFp8, true>(kFp8BlockK);
  kernels->fp8_pairs = MakeQuantised<LinesFp8, false>(256);
  kernels->mxfp8_pairs = MakeQuantised<LinesMxfp8, false>(256);
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
