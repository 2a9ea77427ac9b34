#include "common/kernels/dot_product_kernels.h"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <utility>

#include "common/numerics/flush_denormals.h"

#ifdef __clang__  // knows no preferred width here
#define DOT_PRODUCT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#else
#define DOT_PRODUCT_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")))
#endif
#define UNROLL _Pragma("GCC unroll 16")

namespace expertmesh {
namespace {

// acc += w[2k + 1] x[2k + 1], then += w[2k] x[2k], for 16 columns.
template <int kRows, int kPanels>
DOT_PRODUCT_TARGET KERNEL_NOINLINE void Tile(const TileArgs& args) {
  __m512 acc[kPanels][kRows];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      acc[p][r] = args.from_zero ? _mm512_setzero_ps()
                                 : _mm512_load_ps(args.c + p * args.c_stride + r * kPanelColumns);
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
        __builtin_prefetch(prefetch + p * panel_bytes, 0, 2);
      }
      prefetch += kLineBytes;
    }
    __m512i w[kPanels];
    UNROLL for (int p = 0; p < kPanels; ++p) w[p] = _mm512_load_si512(line + p * panel_bytes);
    UNROLL for (int r = 0; r < kRows; ++r) {
      __m512i pair;  // by hand: GCC 12 would hoist all broadcasts and spill
      asm volatile("vpbroadcastd %1, %0"
                   : "=v"(pair)
                   : "m"(*reinterpret_cast<const uint32_t*>(x + r * x_stride)));
      UNROLL for (int p = 0; p < kPanels; ++p) {
        acc[p][r] = _mm512_dpbf16_ps(acc[p][r], (__m512bh)w[p], (__m512bh)pair);
      }
    }
    line += kLineBytes;
    x += 2 * sizeof(uint16_t);
  }
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      _mm512_store_ps(args.c + p * args.c_stride + r * kPanelColumns, acc[p][r]);
    }
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

template <int... kRowsLess1>
void AddTiles(std::integer_sequence<int, kRowsLess1...>, TileKernels& kernels) {
  ((kernels.tile[kRowsLess1 + 1] = Tile<kRowsLess1 + 1, kBlockPanels>), ...);
}

}  // namespace

TileKernels MakeDotProductTiles() {
  TileKernels kernels;
  AddTiles(std::make_integer_sequence<int, kMaxTileRows>(), kernels);
  for (int& panels : kernels.panels) panels = kBlockPanels;
  kernels.single_pass_rows = 6;
  kernels.chunk_lines = 1024;
  return kernels;
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
