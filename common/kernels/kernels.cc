// The kernels by Highway: this file is compiled once for AVX2 and once for AVX-512.
//
// Nothing between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE may instantiate a template of the
// standard library: it would be compiled for that instruction set, and the linker might keep that
// copy for everybody.
#include "common/kernels/kernels.h"

#include "common/kernels/dot_product_kernels.h"
#include "common/kernels/widen_tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/kernels/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace expertmesh {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors of a panel's 16 columns: one or two.
using F = hn::CappedTag<float, kPanelColumns>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using Bytes = hn::Repartition<uint8_t, F>;
using Words = hn::Repartition<uint16_t, F>;
using HalfWords = hn::Rebind<uint16_t, F>;
using HalfFloats = hn::Rebind<hwy::float16_t, F>;
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
using VU = hn::Vec<U>;
using VBytes = hn::Vec<Bytes>;
constexpr int kLanes = HWY_TARGET == HWY_AVX2 ? 8 : 16;
constexpr int kVectors = kPanelColumns / kLanes;
constexpr bool kManyRegisters = HWY_TARGET == HWY_AVX3;  // 32 instead of 16

#define UNROLL HWY_PRAGMA(GCC unroll 16)

// ---- GEMM tiles --------------------------------------------------------------------------------

// GCC 12 would hoist all broadcasts of a step above the arithmetic and run out of registers.
HWY_INLINE VF Broadcast(const float* p) {
  VF v;
#if HWY_TARGET == HWY_AVX2
  asm volatile("vbroadcastss %1, %0" : "=x"(v.raw) : "m"(*p));
#else
  asm volatile("vbroadcastss %1, %0" : "=v"(v.raw) : "m"(*p));
#endif
  return v;
}

// Keeps a widened vector in its register: GCC 12 would widen it again for every row.
HWY_INLINE void Keep(VF& v) {
#if HWY_TARGET == HWY_AVX2
  asm volatile("" : "+x"(v.raw));
#else
  asm volatile("" : "+v"(v.raw));
#endif
}

// acc = fma(b, w, acc), in place: GCC 12 would let the sum change its register, and spill others.
HWY_INLINE void MulAddTo(VF& acc, VF b, VF w) {
#if HWY_TARGET == HWY_AVX2
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.raw) : "x"(b.raw), "x"(w.raw));
#else
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc.raw) : "v"(b.raw), "v"(w.raw));
#endif
}

// The formats of a line. kSteps: k per line, in the order of the chain; Load: the weights of step s
// of one vector of the line; K: which k of the line step s is.
struct LinesF32 {
  static constexpr int kSteps = 1;
  static constexpr int K(int) { return 0; }
  static HWY_INLINE VF Load(const std::byte* line, int /*step*/, int vector) {
    return hn::Load(F(), reinterpret_cast<const float*>(line) + vector * kLanes);
  }
};
struct LinesBF16 {  // [16 columns][2 k]
  static constexpr int kSteps = 2;
  static constexpr int K(int step) { return 1 - step; }
  static HWY_INLINE VF Load(const std::byte* line, int step, int vector) {
    const VU words = hn::Load(U(), reinterpret_cast<const uint32_t*>(line) + vector * kLanes);
    return hn::BitCast(
        F(), step == 0 ? hn::And(words, hn::Set(U(), 0xffff0000u)) : hn::ShiftLeft<16>(words));
  }
};
struct LinesF16 {  // [2 k][16 columns]
  static constexpr int kSteps = 2;
  static constexpr int K(int step) { return 1 - step; }
  static HWY_INLINE VF Load(const std::byte* line, int step, int vector) {
    const auto* halves = reinterpret_cast<const hwy::float16_t*>(line);
    return hn::PromoteTo(
        F(), hn::Load(HalfFloats(), halves + K(step) * kPanelColumns + vector * kLanes));
  }
};

HWY_INLINE float* SumsOf(const TileArgs& args, int panel, int row, int vector) {
  return args.c + panel * args.c_stride + row * kPanelColumns + vector * kLanes;
}

// The chains of one block of k are done: c = fma(chain, scale, c), and the next ones begin. block:
// counted from args.scales on.
template <bool kRowScales, int kRows, int kPanels>
HWY_INLINE void AddScaledBlock(const TileArgs& args, int64_t block,
                               VF (&acc)[kPanels][kRows][kVectors]) {
  const std::byte* const scales = args.scales + block * kFp8BlockScaleBytes;
  const bool from_zero = args.from_zero && block == 0;
  UNROLL for (int p = 0; p < kPanels; ++p) {
    const auto* scale = reinterpret_cast<const float*>(scales + p * args.scale_bytes);
    UNROLL for (int v = 0; v < kVectors; ++v) {
      const VF of_weights = hn::Load(F(), scale + v * kLanes);
      UNROLL for (int r = 0; r < kRows; ++r) {
        VF s = of_weights;
        if constexpr (kRowScales) {
          s = hn::Mul(s, hn::Set(F(), args.x_scales[r * args.x_scales_stride + block]));
        }
        float* const c = SumsOf(args, p, r, v);
        const VF sum = from_zero ? hn::Zero(F()) : hn::Load(F(), c);
        hn::Store(hn::MulAdd(acc[p][r][v], s, sum), F(), c);
        acc[p][r][v] = hn::Zero(F());
      }
    }
  }
}

template <int kRows, int kPanels>
HWY_INLINE void AddScaled(const TileArgs& args, int64_t block,
                          VF (&acc)[kPanels][kRows][kVectors]) {
  if (args.x_scales == nullptr) {
    AddScaledBlock<false, kRows, kPanels>(args, block, acc);
  } else {
    AddScaledBlock<true, kRows, kPanels>(args, block, acc);
  }
}

template <int kRows, int kPanels>
HWY_INLINE void StoreSums(const TileArgs& args, const VF (&acc)[kPanels][kRows][kVectors]) {
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        hn::Store(acc[p][r][v], F(), SumsOf(args, p, r, v));
      }
    }
  }
}

// kScaled: the lines are those of one scale, which have chains of their own (kFp8Block128).
template <class Lines, bool kScaled, int kRows, int kPanels>
HWY_NOINLINE void Tile(const TileArgs& args) {
  VF acc[kPanels][kRows][kVectors];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        const bool from_zero = kScaled || args.from_zero;
        acc[p][r][v] = from_zero ? hn::Zero(F()) : hn::Load(F(), SumsOf(args, p, r, v));
      }
    }
  }
  const std::byte* line = args.weights;
  const int64_t panel_bytes = args.panel_bytes;
  const auto* x = static_cast<const float*>(args.x);
  const int64_t x_stride = args.x_stride / static_cast<int64_t>(sizeof(float));
  const std::byte* prefetch = args.prefetch;
  int64_t countdown = args.prefetch_every;
  for (int64_t lines = args.lines; lines > 0; --lines) {
    if (--countdown == 0) {
      countdown = args.prefetch_every;
      // Into the second-level cache: the first is full of what is being computed.
      UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(prefetch + p * args.prefetch_bytes, 0, 2);
      }
      prefetch += kLineBytes;
    }
    if constexpr (kManyRegisters) {
      // The weights of all panels stay in registers, so that a row's element is broadcast once.
      const std::byte* source = line;
      UNROLL for (int step = 0; step < Lines::kSteps; ++step) {
        VF w[kPanels];
        UNROLL for (int p = 0; p < kPanels; ++p) {
          w[p] = Lines::Load(source + p * panel_bytes, step, 0);
          Keep(w[p]);
        }
        asm volatile("" : "+r"(source));  // the next step loads its words again: no spills
        UNROLL for (int r = 0; r < kRows; ++r) {
          const VF b = Broadcast(x + r * x_stride + Lines::K(step));
          UNROLL for (int p = 0; p < kPanels; ++p) { MulAddTo(acc[p][r][0], b, w[p]); }
        }
      }
    } else {
      UNROLL for (int p = 0; p < kPanels; ++p) {
        UNROLL for (int step = 0; step < Lines::kSteps; ++step) {
          VF w[kVectors];
          UNROLL for (int v = 0; v < kVectors; ++v) {
            w[v] = Lines::Load(line + p * panel_bytes, step, v);
            Keep(w[v]);
          }
          UNROLL for (int r = 0; r < kRows; ++r) {
            const VF b = Broadcast(x + r * x_stride + Lines::K(step));
            UNROLL for (int v = 0; v < kVectors; ++v) { MulAddTo(acc[p][r][v], b, w[v]); }
          }
        }
      }
    }
    line += kLineBytes;
    x += Lines::kSteps;
  }
  if constexpr (kScaled) {
    AddScaled<kRows, kPanels>(args, /*block=*/0, acc);
  } else {
    StoreSums<kRows, kPanels>(args, acc);
  }
}

// ---- Quantised weights -------------------------------------------------------------------------

HWY_INLINE VBytes TableOf16(const uint8_t* table) { return hn::LoadDup128(Bytes(), table); }

HWY_INLINE VBytes HighNibbles(VBytes v) {
  const Words words;
  return hn::And(hn::BitCast(Bytes(), hn::ShiftRight<4>(hn::BitCast(words, v))),
                 hn::Set(Bytes(), 0x0f));
}

// The BF16 pairs of one vector of e4m3 codes; the tables of the high bytes say what 1 becomes.
HWY_INLINE void WidenE4M3(const std::byte* line, int vector, const uint8_t* high_table,
                          const uint8_t* high_fix, VU (&words)[2]) {
  const Bytes bytes;
  const VBytes v =
      hn::Load(bytes, reinterpret_cast<const uint8_t*>(line) + vector * kLanes * sizeof(float));
  const VBytes magnitude = hn::And(v, hn::Set(bytes, 0x7f));
  // Lookups use the lowest four bits of an index. Bit 7, which makes the other ones give zero, is
  // set unless the magnitude is below 16.
  const VBytes fix = hn::Add(magnitude, hn::Set(bytes, 0x70));
  const VBytes low = hn::Xor(hn::TableLookupBytes(TableOf16(kWidenTables.low), magnitude),
                             hn::TableLookupBytesOr0(TableOf16(kWidenTables.low_fix), fix));
  const VBytes high = hn::Xor(hn::TableLookupBytes(TableOf16(high_table), HighNibbles(v)),
                              hn::TableLookupBytesOr0(TableOf16(high_fix), fix));
  words[0] = hn::BitCast(U(), hn::InterleaveLower(bytes, low, high));
  words[1] = hn::BitCast(U(), hn::InterleaveUpper(bytes, low, high));
}

// What Lowered() takes of the e8m0 exponents of a vector's columns: how far they are below `most`,
// in the place of BF16's exponent, for both halves of a word.
HWY_INLINE VU ExponentsBelow(uint32_t most, const std::byte* scales, int vector) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(scales) + vector * kLanes;
  const VU scale = hn::PromoteTo(U(), hn::Load(hn::Rebind<uint8_t, U>(), bytes));
  const VU below = hn::ShiftLeft<7>(hn::Sub(hn::Set(U(), most), scale));
  return hn::Or(below, hn::ShiftLeft<16>(below));
}

// Pairs with lower exponents; saturates at zero where the result would be denormal.
HWY_INLINE VU Lowered(VU words, VU below) {
  const Words halves;
  return hn::BitCast(U(), hn::SaturatedSub(hn::BitCast(halves, words), hn::BitCast(halves, below)));
}

// The formats of a quantised line. kWords: words of BF16 pairs that a word of it becomes; Widen:
// the words of one vector of the line; Scale: what that takes, for kScaleLines lines.
struct LinesFp8 {
  static constexpr int kWords = 2;
  static constexpr int64_t kScaleLines = kFp8BlockK / 4;
  static constexpr int64_t kScaleBytes = kFp8BlockScaleBytes;
  struct Scale {};
  static HWY_INLINE Scale LoadScale(const std::byte* /*scales*/, int /*vector*/) { return {}; }
  static HWY_INLINE void Widen(const std::byte* line, int vector, Scale /*scale*/,
                               VU (&words)[kWords]) {
    WidenE4M3(line, vector, kWidenTables.high, kWidenTables.high_fix, words);
  }
};
struct LinesMxfp4 {
  static constexpr int kWords = 4;
  static constexpr int64_t kScaleLines = kMxBlockK / 8;
  static constexpr int64_t kScaleBytes = kPanelColumns;
  using Scale = VU;
  static HWY_INLINE Scale LoadScale(const std::byte* scales, int vector) {
    return ExponentsBelow(kMaxMxfp4Scale, scales, vector);
  }
  static HWY_INLINE void Widen(const std::byte* line, int vector, Scale scale,
                               VU (&words)[kWords]) {
    const Bytes bytes;
    const VBytes v =
        hn::Load(bytes, reinterpret_cast<const uint8_t*>(line) + vector * kLanes * sizeof(float));
    const VBytes nibbles[2] = {hn::And(v, hn::Set(bytes, 0x0f)), HighNibbles(v)};
    UNROLL for (int i = 0; i < 2; ++i) {
      const VBytes low = hn::TableLookupBytes(TableOf16(kWidenTables.e2m1_low), nibbles[i]);
      const VBytes high = hn::TableLookupBytes(TableOf16(kWidenTables.e2m1_high), nibbles[i]);
      words[2 * i] = Lowered(hn::BitCast(U(), hn::InterleaveLower(bytes, low, high)), scale);
      words[2 * i + 1] = Lowered(hn::BitCast(U(), hn::InterleaveUpper(bytes, low, high)), scale);
    }
  }
};
struct LinesMxfp8 {
  static constexpr int kWords = 2;
  static constexpr int64_t kScaleLines = kMxBlockK / 4;
  static constexpr int64_t kScaleBytes = kPanelColumns;
  using Scale = VU;
  static HWY_INLINE Scale LoadScale(const std::byte* scales, int vector) {
    return ExponentsBelow(kMaxMxfp8Scale, scales, vector);
  }
  static HWY_INLINE void Widen(const std::byte* line, int vector, Scale scale,
                               VU (&words)[kWords]) {
    WidenE4M3(line, vector, kWidenTables.mxfp8_high, kWidenTables.mxfp8_high_fix, words);
    const VU signs = hn::Set(U(), 0x80008000u);
    UNROLL for (int i = 0; i < kWords; ++i) {
      words[i] = hn::OrAnd(Lowered(hn::AndNot(signs, words[i]), scale), words[i], signs);
    }
  }
};

// The same for quantised lines, from the first one of a scale on, widened in registers.
template <class Lines, bool kScaled, int kRows, int kPanels>
HWY_NOINLINE void WideningTile(const TileArgs& args) {
  VF acc[kPanels][kRows][kVectors];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        acc[p][r][v] =
            kScaled || args.from_zero ? hn::Zero(F()) : hn::Load(F(), SumsOf(args, p, r, v));
      }
    }
  }
  const std::byte* line = args.weights;
  const int64_t panel_bytes = args.panel_bytes;
  const auto* x = static_cast<const float*>(args.x);
  const int64_t x_stride = args.x_stride / static_cast<int64_t>(sizeof(float));
  const std::byte* prefetch = args.prefetch;
  const std::byte* scales = args.scales;
  for (int64_t left = args.lines; left > 0;) {
    const int64_t lines = left < Lines::kScaleLines ? left : Lines::kScaleLines;
    left -= lines;
    typename Lines::Scale scale[kPanels][kVectors];
    UNROLL for (int p = 0; p < kPanels; ++p) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        scale[p][v] = Lines::LoadScale(scales + p * args.scale_bytes, v);
      }
    }
    for (int64_t n = lines; n > 0; --n) {
      UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(prefetch + p * panel_bytes, 0, 2);
      }
      prefetch += kLineBytes;
      UNROLL for (int p = 0; p < kPanels; ++p) {
        VU words[kVectors][Lines::kWords];
        UNROLL for (int v = 0; v < kVectors; ++v) {
          Lines::Widen(line + p * panel_bytes, v, scale[p][v], words[v]);
        }
        UNROLL for (int k = 0; k < 2 * Lines::kWords; ++k) {
          // The odd one of a pair first.
          VF w[kVectors];
          UNROLL for (int v = 0; v < kVectors; ++v) {
            const VU word = words[v][k / 2];
            w[v] = hn::BitCast(F(), k % 2 == 0 ? hn::And(word, hn::Set(U(), 0xffff0000u))
                                               : hn::ShiftLeft<16>(word));
            Keep(w[v]);
          }
          UNROLL for (int r = 0; r < kRows; ++r) {
            const VF b = Broadcast(x + r * x_stride + (k ^ 1));
            UNROLL for (int v = 0; v < kVectors; ++v) { MulAddTo(acc[p][r][v], b, w[v]); }
          }
        }
      }
      line += kLineBytes;
      x += 2 * Lines::kWords;
    }
    if constexpr (kScaled) {
      AddScaled<kRows, kPanels>(args, (scales - args.scales) / Lines::kScaleBytes, acc);
    }
    scales += Lines::kScaleBytes;
  }
  if constexpr (!kScaled) StoreSums<kRows, kPanels>(args, acc);
}

template <class Lines>
HWY_NOINLINE void WidenLines(const std::byte* from, const std::byte* scales, int64_t lines,
                             std::byte* to) {
  for (int64_t left = lines; left > 0;) {
    const int64_t block = left < Lines::kScaleLines ? left : Lines::kScaleLines;
    left -= block;
    typename Lines::Scale scale[kVectors];
    UNROLL for (int v = 0; v < kVectors; ++v) scale[v] = Lines::LoadScale(scales, v);
    for (int64_t n = block; n > 0; --n) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        VU words[Lines::kWords];
        Lines::Widen(from, v, scale[v], words);
        UNROLL for (int w = 0; w < Lines::kWords; ++w) {
          hn::Store(words[w], U(), reinterpret_cast<uint32_t*>(to + w * kLineBytes) + v * kLanes);
        }
      }
      from += kLineBytes;
      to += Lines::kWords * kLineBytes;
    }
    scales += Lines::kScaleBytes;
  }
}

// As many accumulators as there are registers for, beside the weights and a broadcast.
constexpr int PanelsFor(bool widened, int rows) {
  if (kManyRegisters || rows == 1) return 4;
  return rows == 2 || (rows == 3 && !widened) ? 2 : 1;
}

template <class Lines, bool kScaled, int kRows>
void AddTile(Tiles& tiles) {
  constexpr int kPanels = PanelsFor(Lines::kSteps > 1, kRows);
  tiles.tile[kRows] = Tile<Lines, kScaled, kRows, kPanels>;
  tiles.panels[kRows] = kPanels;
}

template <class Lines, bool kScaled = false>
Tiles MakeTiles() {
  Tiles tiles;
  AddTile<Lines, kScaled, 1>(tiles);
  AddTile<Lines, kScaled, 2>(tiles);
  AddTile<Lines, kScaled, 3>(tiles);
  AddTile<Lines, kScaled, 4>(tiles);
  AddTile<Lines, kScaled, 5>(tiles);
  AddTile<Lines, kScaled, 6>(tiles);
  return tiles;
}

template <class Lines>
TileKernels MakePlain() {
  TileKernels kernels;
  kernels.single_pass = MakeTiles<Lines>();
  kernels.single_pass_rows = kManyRegisters ? 6 : 2;
  kernels.chunked = kernels.single_pass;
  kernels.chunk_lines = kManyRegisters ? 1024 : 512;
  return kernels;
}

template <class Lines, bool kScaled, int kRows>
void AddWideningTile(Tiles& tiles) {
  constexpr int kPanels = PanelsFor(false, kRows);
  tiles.tile[kRows] = WideningTile<Lines, kScaled, kRows, kPanels>;
  tiles.panels[kRows] = kPanels;
}

template <class Lines, bool kScaled>
TileKernels MakeQuantised(int64_t chunk_k) {
  TileKernels kernels;
  AddWideningTile<Lines, kScaled, 1>(kernels.single_pass);
  AddWideningTile<Lines, kScaled, 2>(kernels.single_pass);
  AddWideningTile<Lines, kScaled, 3>(kernels.single_pass);
  AddWideningTile<Lines, kScaled, 4>(kernels.single_pass);
  AddWideningTile<Lines, kScaled, 5>(kernels.single_pass);
  AddWideningTile<Lines, kScaled, 6>(kernels.single_pass);
  kernels.single_pass_rows = 3;
  kernels.chunked = MakeTiles<LinesBF16, kScaled>();
  kernels.chunk_lines = chunk_k / (2 * Lines::kWords);
  kernels.widens = true;
  kernels.widen = WidenLines<Lines>;
  return kernels;
}

// ---- Row by row --------------------------------------------------------------------------------

// What BF16FromFloat does, for numbers that are not NaN: the rounded bits in the upper half.
HWY_INLINE VU RoundedBF16(VF x) {
  const VU bits = hn::BitCast(U(), x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U(), 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(U(), 0x7fffu)));
}

HWY_INLINE VF WidenBF16(const uint16_t* from) {
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(U(), hn::LoadU(HalfWords(), from))));
}

HWY_INLINE void StoreVector(VF x, RowFormat format, void* row, int64_t column) {
  switch (format) {
    case RowFormat::kF32:
      hn::StoreU(x, F(), static_cast<float*>(row) + column);
      break;
    case RowFormat::kF32OfBF16:
      hn::StoreU(hn::BitCast(F(), hn::And(RoundedBF16(x), hn::Set(U(), 0xffff0000u))), F(),
                 static_cast<float*>(row) + column);
      break;
    case RowFormat::kBF16:
      hn::StoreU(hn::DemoteTo(hn::Rebind<uint16_t, F>(),
                              hn::BitCast(I(), hn::ShiftRight<16>(RoundedBF16(x)))),
                 HalfWords(), static_cast<uint16_t*>(row) + column);
      break;
  }
}

int64_t BytesOfRow(RowFormat format, int64_t elements) {
  return elements * (format == RowFormat::kBF16 ? 2 : 4);
}

// e^x with the operations of Exp in common/numerics/math.h.
HWY_INLINE VF ExpVector(VF x) {
  const F f;
  const I i;
  const VF shifted = hn::MulAdd(x, hn::Set(f, 1.44269504f), hn::Set(f, 12582912.0f));
  const VF n = hn::Sub(shifted, hn::Set(f, 12582912.0f));
  VF r = hn::MulAdd(n, hn::Set(f, -0.693359375f), x);
  r = hn::MulAdd(n, hn::Set(f, 2.12194440e-4f), r);
  VF p = hn::Set(f, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(f, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(f, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(f, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(f, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(f, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(f, 1.0f));
  const auto whole = hn::ConvertTo(i, n);
  const auto half = hn::ShiftRight<1>(whole);
  const auto bias = hn::Set(i, 127);
  const VF a = hn::BitCast(f, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VF b = hn::BitCast(f, hn::ShiftLeft<23>(hn::Add(hn::Sub(whole, half), bias)));
  VF y = hn::Mul(hn::Mul(p, a), b);
  y = hn::IfThenElse(hn::Lt(x, hn::Set(f, -87.336544f)), hn::Zero(f), y);
  const VF infinity = hn::BitCast(f, hn::Set(i, 0x7f800000));
  y = hn::IfThenElse(hn::Lt(x, hn::Set(f, 88.722839f)), y, infinity);
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// The others, likewise.
HWY_INLINE VF TanhVector(VF x) {
  const F f;
  const VF magnitude = hn::Abs(x);
  const VF square = hn::Mul(x, x);
  VF p = hn::Set(f, -5.70498872745e-3f);
  p = hn::MulAdd(p, square, hn::Set(f, 2.06390887954e-2f));
  p = hn::MulAdd(p, square, hn::Set(f, -5.37397155531e-2f));
  p = hn::MulAdd(p, square, hn::Set(f, 1.33314422036e-1f));
  p = hn::MulAdd(p, square, hn::Set(f, -3.33332819422e-1f));
  const VF near = hn::MulAdd(hn::Mul(p, square), x, x);
  const VF one = hn::Set(f, 1.0f);
  const VF e = ExpVector(hn::Mul(hn::Set(f, 2.0f), magnitude));
  const VF far = hn::Sub(one, hn::Div(hn::Set(f, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(f, 0.625f)), near, hn::CopySign(far, x));
}

HWY_INLINE VF ErfVector(VF x) {
  const F f;
  const VF magnitude = hn::Abs(x);
  const VF square = hn::Mul(x, x);
  VF p = hn::Set(f, 7.853855e-5f);
  p = hn::MulAdd(p, square, hn::Set(f, -8.0101914e-4f));
  p = hn::MulAdd(p, square, hn::Set(f, 5.1883273e-3f));
  p = hn::MulAdd(p, square, hn::Set(f, -2.6853811e-2f));
  p = hn::MulAdd(p, square, hn::Set(f, 1.12835854e-1f));
  p = hn::MulAdd(p, square, hn::Set(f, -3.7612626e-1f));
  p = hn::MulAdd(p, square, hn::Set(f, 1.2837917e-1f));
  const VF near = hn::MulAdd(p, x, x);
  p = hn::Set(f, -1.3962288e-5f);
  p = hn::MulAdd(p, magnitude, hn::Set(f, 3.505905e-4f));
  p = hn::MulAdd(p, magnitude, hn::Set(f, -3.7574708e-3f));
  p = hn::MulAdd(p, magnitude, hn::Set(f, 2.4010057e-2f));
  p = hn::MulAdd(p, magnitude, hn::Set(f, -1.0653085e-1f));
  p = hn::MulAdd(p, magnitude, hn::Set(f, -6.3496953e-1f));
  p = hn::MulAdd(p, magnitude, hn::Set(f, -1.1286943f));
  const VF far = hn::Sub(hn::Set(f, 1.0f), ExpVector(hn::Mul(magnitude, p)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(f, 1.0f)), near, hn::CopySign(far, x));
}

HWY_INLINE VF SiluVector(VF x) {
  return hn::Div(x, hn::Add(hn::Set(F(), 1.0f), ExpVector(hn::Neg(x))));
}

// Min and Max are the instructions, which return their second operand as MinOf and MaxOf do.
HWY_INLINE VF Clamp(VF x, float limit) {
  return hn::Min(hn::Max(x, hn::Set(F(), -limit)), hn::Set(F(), limit));
}

// One vector of Activate() of common/numerics/activation.h.
template <Activation kKind>
HWY_INLINE VF ActivateVector(const ActivationFunction& function, VF g, VF u) {
  const F f;
  const VF one = hn::Set(f, 1.0f);
  if constexpr (kKind == Activation::kSiluGlu) {
    return hn::Mul(SiluVector(g), u);
  } else if constexpr (kKind == Activation::kClampedSwishGlu) {
    const VF c = hn::Min(g, hn::Set(f, function.limit));
    const VF e = ExpVector(hn::Neg(hn::Mul(hn::Set(f, function.alpha), c)));
    return hn::Mul(hn::Div(c, hn::Add(one, e)), hn::Add(Clamp(u, function.limit), one));
  } else if constexpr (kKind == Activation::kClampedSiluGlu) {
    return hn::Mul(SiluVector(hn::Min(g, hn::Set(f, function.limit))), Clamp(u, function.limit));
  } else if constexpr (kKind == Activation::kSiluClampedGlu) {
    return hn::Mul(hn::Min(SiluVector(g), hn::Set(f, function.limit)), Clamp(u, function.limit));
  } else if constexpr (kKind == Activation::kGeluTanhGlu) {
    const VF cube = hn::Mul(hn::Mul(g, g), g);
    const VF z = hn::Mul(hn::Set(f, kSqrtTwoOverPi), hn::MulAdd(hn::Set(f, kGeluCubic), cube, g));
    return hn::Mul(hn::Mul(hn::Mul(hn::Set(f, 0.5f), g), hn::Add(one, TanhVector(z))), u);
  } else if constexpr (kKind == Activation::kGeluErfGlu) {
    const VF erf = ErfVector(hn::Mul(g, hn::Set(f, kSqrtHalf)));
    return hn::Mul(hn::Mul(hn::Mul(hn::Set(f, 0.5f), g), hn::Add(one, erf)), u);
  } else {
    const VF r = hn::Max(g, hn::Zero(f));
    return hn::Mul(r, r);
  }
}

void Widen(DType dtype, const void* from, int64_t n, float* to) {
  int64_t i = 0;
  if (dtype == DType::kBF16) {
    const auto* words = static_cast<const uint16_t*>(from);
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(WidenBF16(words + i), F(), to + i);
  } else if (dtype == DType::kF16) {
    const auto* halves = static_cast<const hwy::float16_t*>(from);
    for (; i + kLanes <= n; i += kLanes) {
      hn::StoreU(hn::PromoteTo(F(), hn::LoadU(HalfFloats(), halves + i)), F(), to + i);
    }
  } else {
    const auto* floats = static_cast<const float*>(from);
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::LoadU(F(), floats + i), F(), to + i);
  }
  for (; i < n; ++i) to[i] = LoadFloat(dtype, from, i);
}

// The values of a vector of e4m3 codes times 2^120, whose magnitudes are lowered by `below` in the
// place of the exponent; what is below 2^-126 then is zero.
HWY_INLINE VU WidenCodes(const uint8_t* codes, uint32_t below) {
  const I i32;
  const VI code = hn::PromoteTo(i32, hn::LoadU(hn::Rebind<uint8_t, F>(), codes));
  const VI magnitude = hn::And(code, hn::Set(i32, 0x7f));
  // Codes below 8 are multiples of 2^-9, and 0 is what is lowered most.
  const VI normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(i32, (120 + 120) << 23));
  const VF multiple = hn::Mul(hn::ConvertTo(F(), magnitude), hn::Set(F(), 0x1p111f));
  const VI wide =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(i32, 8)), hn::BitCast(i32, multiple), normal);
  const VI lowered = hn::Sub(wide, hn::Set(i32, static_cast<int32_t>(below)));
  const VI flushed = hn::IfThenElseZero(hn::Gt(lowered, hn::Set(i32, 0x007fffff)), lowered);
  return hn::BitCast(U(), hn::Or(flushed, hn::ShiftLeft<24>(hn::Sub(code, magnitude))));
}

HWY_NOINLINE void WidenCodeRow(const uint8_t* codes, const uint8_t* exponents, int64_t n,
                               DType dtype, void* to) {
  for (int64_t begin = 0; begin < n; begin += kMxBlockK) {
    const int64_t end = begin + kMxBlockK < n ? begin + kMxBlockK : n;
    const uint32_t exponent = exponents == nullptr ? 127 : exponents[begin / kMxBlockK];
    const uint32_t below = (kMaxMxfp8Scale - exponent) << 23;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const VU bits = WidenCodes(codes + i, below);
      if (dtype == DType::kBF16) {
        hn::StoreU(hn::DemoteTo(HalfWords(), hn::BitCast(I(), hn::ShiftRight<16>(bits))),
                   HalfWords(), static_cast<uint16_t*>(to) + i);
      } else {
        hn::StoreU(bits, U(), static_cast<uint32_t*>(to) + i);
      }
    }
    for (; i < end; ++i) {
      StoreFloat(dtype, to, i, FloatFromMxfp8(codes[i], static_cast<uint8_t>(exponent)));
    }
  }
}

HWY_NOINLINE void Weigh(DType dtype, const void* from, int64_t n, float weight, RowFormat format,
                        void* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    VF x;
    if (dtype == DType::kBF16) {
      x = WidenBF16(static_cast<const uint16_t*>(from) + i);
    } else if (dtype == DType::kF16) {
      x = hn::PromoteTo(F(), hn::LoadU(HalfFloats(), static_cast<const hwy::float16_t*>(from) + i));
    } else {
      x = hn::LoadU(F(), static_cast<const float*>(from) + i);
    }
    StoreVector(hn::Mul(hn::Set(F(), weight), x), format, to, i);
  }
  for (; i < n; ++i) {
    float x = weight * LoadFloat(dtype, from, i);
    if (format == RowFormat::kBF16) {
      StoreFloat(DType::kBF16, to, i, x);
    } else {
      if (format == RowFormat::kF32OfBF16) x = FloatFromBF16(BF16FromFloat(x));
      StoreFloat(DType::kF32, to, i, x);
    }
  }
}

HWY_NOINLINE void AddBias(float* c, int64_t rows, const float* bias) {
  for (int p = 0; p < kBlockPanels; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      const VF b = hn::LoadU(F(), bias + p * kPanelColumns + v * kLanes);
      for (int64_t r = 0; r < rows; ++r) {
        float* const at = c + (p * rows + r) * kPanelColumns + v * kLanes;
        hn::Store(hn::Add(hn::Load(F(), at), b), F(), at);
      }
    }
  }
}

template <Activation kKind>
HWY_NOINLINE void ActivateBlock(const ActivationFunction& function, const float* c, int64_t rows,
                                int64_t columns, RowFormat format, void* h, int64_t stride) {
  constexpr int kPanels = IsGated(kKind) ? 2 : 1;  // of c for one of h
  for (int64_t r = 0; r < rows; ++r) {
    std::byte* row = static_cast<std::byte*>(h) + BytesOfRow(format, r * stride);
    for (int p = 0; p < kBlockPanels / kPanels && p * kPanelColumns < columns; ++p) {
      const float* g = c + (kPanels * p * rows + r) * kPanelColumns;
      const float* u = g + (kPanels - 1) * rows * kPanelColumns;
      UNROLL for (int v = 0; v < kVectors; ++v) {
        StoreVector(ActivateVector<kKind>(function, hn::Load(F(), g + v * kLanes),
                                          hn::Load(F(), u + v * kLanes)),
                    format, row, p * kPanelColumns + v * kLanes);
      }
    }
  }
}

void ActivateAny(const ActivationFunction& function, const float* c, int64_t rows, int64_t columns,
                 RowFormat format, void* h, int64_t stride) {
  switch (function.kind) {
    case Activation::kSiluGlu:
      return ActivateBlock<Activation::kSiluGlu>(function, c, rows, columns, format, h, stride);
    case Activation::kClampedSwishGlu:
      return ActivateBlock<Activation::kClampedSwishGlu>(function, c, rows, columns, format, h,
                                                         stride);
    case Activation::kClampedSiluGlu:
      return ActivateBlock<Activation::kClampedSiluGlu>(function, c, rows, columns, format, h,
                                                        stride);
    case Activation::kSiluClampedGlu:
      return ActivateBlock<Activation::kSiluClampedGlu>(function, c, rows, columns, format, h,
                                                        stride);
    case Activation::kGeluTanhGlu:
      return ActivateBlock<Activation::kGeluTanhGlu>(function, c, rows, columns, format, h, stride);
    case Activation::kGeluErfGlu:
      return ActivateBlock<Activation::kGeluErfGlu>(function, c, rows, columns, format, h, stride);
    case Activation::kRelu2:
      return ActivateBlock<Activation::kRelu2>(function, c, rows, columns, format, h, stride);
  }
}

HWY_NOINLINE void StoreBlock(const float* c, int64_t rows, int64_t columns, RowFormat format,
                             void* y, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    std::byte* row = static_cast<std::byte*>(y) + BytesOfRow(format, r * stride);
    for (int p = 0; p < kBlockPanels; ++p) {
      const float* from = c + (p * rows + r) * kPanelColumns;
      const int64_t begin = p * kPanelColumns;
      int64_t done = 0;
      for (; done + kLanes <= kPanelColumns && begin + done + kLanes <= columns; done += kLanes) {
        StoreVector(hn::Load(F(), from + done), format, row, begin + done);
      }
      for (; done < kPanelColumns && begin + done < columns; ++done) {
        if (format == RowFormat::kBF16) {
          StoreFloat(DType::kBF16, row, begin + done, from[done]);
        } else {
          StoreFloat(DType::kF32, row, begin + done, from[done]);
        }
      }
    }
  }
}

HWY_INLINE VF LoadVector(DType dtype, const void* row, int64_t column) {
  return dtype == DType::kBF16 ? WidenBF16(static_cast<const uint16_t*>(row) + column)
                               : hn::LoadU(F(), static_cast<const float*>(row) + column);
}

// The chains of neighbouring vectors, over the rows [begin, end).
template <int kChains>
HWY_INLINE void AddRows(const CombineRows& token, int64_t begin, int64_t end, int64_t column,
                        VF (&acc)[kChains]) {
  for (int64_t s = begin; s < end; ++s) {
    const VF w = hn::Set(F(), token.weights[s]);
    UNROLL for (int v = 0; v < kChains; ++v) {
      acc[v] = hn::MulAdd(w, LoadVector(token.dtype, token.rows[s], column + v * kLanes), acc[v]);
    }
  }
}

template <int kChains>
HWY_INLINE void Scale(float scale, VF (&acc)[kChains]) {
  if (scale == 1.0f) return;
  UNROLL for (int v = 0; v < kChains; ++v) acc[v] = hn::Mul(acc[v], hn::Set(F(), scale));
}

HWY_NOINLINE void Combine(const CombineRows& token, DType out_dtype, int64_t n, void* out) {
  constexpr int kUnroll = 4;  // independent chains, to hide the latency of an addition
  const int64_t slots = token.num_routed + token.num_shared;
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    VF acc[kUnroll];
    UNROLL for (int v = 0; v < kUnroll; ++v) acc[v] = hn::Zero(F());
    AddRows(token, 0, token.num_routed, i, acc);
    Scale(token.routed_scale, acc);
    AddRows(token, token.num_routed, slots, i, acc);
    Scale(token.scale, acc);
    UNROLL for (int v = 0; v < kUnroll; ++v) {
      const int64_t column = i + v * kLanes;
      if (out_dtype == DType::kF16) {
        hn::StoreU(hn::DemoteTo(HalfFloats(), acc[v]), HalfFloats(),
                   static_cast<hwy::float16_t*>(out) + column);
      } else {
        StoreVector(acc[v], out_dtype == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kF32, out,
                    column);
      }
    }
  }
  for (; i < n; ++i) {
    float acc = 0.0f;
    for (int64_t s = 0; s <= slots; ++s) {
      if (s == token.num_routed && token.routed_scale != 1.0f) acc *= token.routed_scale;
      if (s == slots) break;
      acc = __builtin_fmaf(token.weights[s], LoadFloat(token.dtype, token.rows[s], i), acc);
    }
    if (token.scale != 1.0f) acc *= token.scale;
    StoreFloat(out_dtype, out, i, acc);
  }
}

HWY_NOINLINE void ScaleColumns(const std::byte* scales, int64_t scale_bytes, const float* x_scales,
                               int64_t rows, float* c) {
  for (int p = 0; p < kBlockPanels; ++p) {
    const auto* scale = reinterpret_cast<const float*>(scales + p * scale_bytes);
    for (int64_t r = 0; r < rows; ++r) {
      float* const sums = c + (p * rows + r) * kPanelColumns;
      const VF x_scale = hn::Set(F(), x_scales == nullptr ? 1.0f : x_scales[r]);
      for (int v = 0; v < kPanelColumns; v += kLanes) {
        const VF s = hn::Mul(hn::Load(F(), scale + v), x_scale);
        hn::Store(hn::Mul(hn::Load(F(), sums + v), s), F(), sums + v);
      }
    }
  }
}

// ---- Packing -----------------------------------------------------------------------------------

// Four columns of a line, of one 32-bit word of their rows each.
using Quad = hn::FixedTag<uint32_t, 4>;
using VQuad = hn::Vec<Quad>;

// Word i of four rows becomes columns[i].
HWY_INLINE void Transpose(const VQuad (&rows)[4], VQuad (&columns)[4]) {
  const hn::FixedTag<uint64_t, 2> pairs;
  const Quad quad;
  const auto even = [&](VQuad a, VQuad b) {
    return hn::BitCast(pairs, hn::InterleaveLower(quad, a, b));
  };
  const auto odd = [&](VQuad a, VQuad b) {
    return hn::BitCast(pairs, hn::InterleaveUpper(quad, a, b));
  };
  const auto low01 = even(rows[0], rows[1]), low23 = even(rows[2], rows[3]);
  const auto high01 = odd(rows[0], rows[1]), high23 = odd(rows[2], rows[3]);
  columns[0] = hn::BitCast(quad, hn::InterleaveLower(pairs, low01, low23));
  columns[1] = hn::BitCast(quad, hn::InterleaveUpper(pairs, low01, low23));
  columns[2] = hn::BitCast(quad, hn::InterleaveLower(pairs, high01, high23));
  columns[3] = hn::BitCast(quad, hn::InterleaveUpper(pairs, high01, high23));
}

// [4 columns][2 halves] becomes [2 halves][4 columns].
HWY_INLINE VQuad SplitHalves(VQuad words) {
  alignas(16) static constexpr uint8_t kOrder[16] = {0, 1, 4, 5, 8,  9,  12, 13,
                                                     2, 3, 6, 7, 10, 11, 14, 15};
  const hn::FixedTag<uint8_t, 16> bytes;
  return hn::BitCast(Quad(),
                     hn::TableLookupBytes(hn::BitCast(bytes, words), hn::Load(bytes, kOrder)));
}

// Nibbles 0 to 3 of a word go to the low nibbles of its bytes, 4 to 7 to the high ones.
HWY_INLINE VQuad SplitNibbles(VQuad words) {
  const Quad quad;
  const auto spread = [&](VQuad v) {  // the nibbles of the lower half
    v = hn::And(hn::Or(v, hn::ShiftLeft<8>(v)), hn::Set(quad, 0x00ff00ffu));
    return hn::And(hn::Or(v, hn::ShiftLeft<4>(v)), hn::Set(quad, 0x0f0f0f0fu));
  };
  const VQuad low = spread(hn::And(words, hn::Set(quad, 0xffffu)));
  return hn::Or(low, hn::ShiftLeft<4>(spread(hn::ShiftRight<16>(words))));
}

// Stores columns 4 * quad, ... of a line.
HWY_INLINE void StoreQuad(WeightFormat format, DType dtype, VQuad words, int quad,
                          std::byte* line) {
  auto* const to = reinterpret_cast<uint32_t*>(line);
  if (format == WeightFormat::kPlain && dtype != DType::kF16) {
    hn::Store(words, Quad(), to + 4 * quad);
    return;
  }
  if (format == WeightFormat::kMxfp4) words = SplitNibbles(words);
  words = SplitHalves(words);
  if (format != WeightFormat::kPlain) {
    hn::Store(words, Quad(), to + 4 * quad);
    return;
  }
  const hn::FixedTag<uint32_t, 2> half;
  hn::Store(hn::LowerHalf(half, words), half, to + 2 * quad);
  hn::Store(hn::UpperHalf(half, words), half, to + 8 + 2 * quad);
}

HWY_NOINLINE void PackLines(WeightFormat format, DType dtype, const std::byte* from, int64_t rows,
                            int64_t row_bytes, std::byte* lines) {
  constexpr int64_t kWord = sizeof(uint32_t);
  constexpr int64_t kStep = kLineBytes / kWord;  // words of a row at a time: whole cache lines
  const int64_t words = (row_bytes + kWord - 1) / kWord;
  for (int64_t begin = 0; begin < words; begin += kStep) {
    const int64_t end = begin + kStep < words ? begin + kStep : words;
    for (int quad = 0; quad < kPanelColumns / 4; ++quad) {
      for (int64_t word = begin; word < end; word += 4) {
        VQuad in[4], out[4];
        UNROLL for (int i = 0; i < 4; ++i) {
          const int64_t row = 4 * quad + i;
          const int64_t left = row < rows ? row_bytes - word * kWord : 0;
          const std::byte* const at = from + row * row_bytes + word * kWord;
          if (left >= 4 * kWord) {
            in[i] = hn::LoadU(Quad(), reinterpret_cast<const uint32_t*>(at));
          } else {
            alignas(16) uint32_t rest[4] = {};
            if (left > 0) __builtin_memcpy(rest, at, static_cast<size_t>(left));
            in[i] = hn::Load(Quad(), rest);
          }
        }
        Transpose(in, out);
        UNROLL for (int i = 0; i < 4; ++i) {
          if (word + i < end) {
            StoreQuad(format, dtype, out[i], quad, lines + (word + i) * kLineBytes);
          }
        }
      }
    }
  }
}

int64_t FindNotFinite(DType dtype, const void* values, int64_t n) {
  // The exponent's bits all set: infinity or NaN.
  constexpr int64_t kBlock = 256;  // elements between two looks at what was collected
  const auto not_finite = [dtype, values](int64_t i) {
    if (dtype == DType::kF8_E4M3) return IsNaNE4M3(static_cast<const uint8_t*>(values)[i]);
    const float value = LoadFloat(dtype, values, i);
    return !(value - value == 0.0f);
  };
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    int64_t i = begin;
    if (dtype == DType::kF32) {
      const auto* words = static_cast<const uint32_t*>(values);
      const VU mask = hn::Set(U(), 0x7f800000u);
      VU largest = hn::Zero(U());
      for (; i + kLanes <= end; i += kLanes) {
        largest = hn::Max(largest, hn::And(hn::LoadU(U(), words + i), mask));
      }
      if (!hn::AllFalse(U(), hn::Eq(largest, mask))) i = begin;
    } else if (dtype == DType::kF8_E4M3) {
      const auto* codes = static_cast<const uint8_t*>(values);
      const auto mask = hn::Set(Bytes(), uint8_t{0x7f});
      auto largest = hn::Zero(Bytes());
      for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
        largest = hn::Max(largest, hn::And(hn::LoadU(Bytes(), codes + i), mask));
      }
      if (!hn::AllFalse(Bytes(), hn::Eq(largest, mask))) i = begin;
    } else {
      using W = hn::CappedTag<uint16_t, kLanes * 2>;
      const auto* words = static_cast<const uint16_t*>(values);
      const auto mask = hn::Set(W(), dtype == DType::kBF16 ? uint16_t{0x7f80} : uint16_t{0x7c00});
      auto largest = hn::Zero(W());
      for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
        largest = hn::Max(largest, hn::And(hn::LoadU(W(), words + i), mask));
      }
      if (!hn::AllFalse(W(), hn::Eq(largest, mask))) i = begin;
    }
    for (; i < end; ++i) {
      if (not_finite(i)) return i;
    }
  }
  return -1;
}

}  // namespace

Kernels MakeKernels() {
  Kernels kernels;
  kernels.f32 = MakePlain<LinesF32>();
  kernels.bf16 = MakePlain<LinesBF16>();
  kernels.f16 = MakePlain<LinesF16>();
  kernels.fp8_block = MakeQuantised<LinesFp8, true>(kFp8BlockK);
  kernels.fp8 = MakeQuantised<LinesFp8, false>(256);
  kernels.mxfp4 = MakeQuantised<LinesMxfp4, false>(256);
  kernels.mxfp8 = MakeQuantised<LinesMxfp8, false>(256);
  kernels.scale_columns = ScaleColumns;
  kernels.pack_lines = PackLines;
  kernels.widen = Widen;
  kernels.widen_codes = WidenCodeRow;
  kernels.weigh = Weigh;
  kernels.add_bias = AddBias;
  kernels.activate = ActivateAny;
  kernels.store = StoreBlock;
  kernels.combine = Combine;
  kernels.find_not_finite = FindNotFinite;
  return kernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace expertmesh
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET

#if HWY_ONCE
namespace expertmesh {

const Kernels& KernelsOf(Isa isa) {
  static const Kernels avx2 = N_AVX2::MakeKernels();
  static const Kernels avx512 = N_AVX3::MakeKernels();
  static const Kernels avx512bf16 = [] {
    Kernels kernels = avx512;
    AddDotProductKernels(&kernels);
    return kernels;
  }();
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512bf16;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      break;
  }
  return avx2;
}

}  // namespace expertmesh
#endif  // HWY_ONCE
