// The kernels by Highway: this file is compiled once for AVX2 and once for AVX-512.
//
// Nothing between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE may instantiate a template of the
// standard library: it would be compiled for that instruction set, and the linker might keep that
// copy for everybody.
#include "common/kernels/kernels.h"

#include "common/kernels/dot_product_kernels.h"

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
using HalfWords = hn::Rebind<uint16_t, F>;
using HalfFloats = hn::Rebind<hwy::float16_t, F>;
using VF = hn::Vec<F>;
using VU = hn::Vec<U>;
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

template <class Lines, int kRows, int kPanels>
HWY_NOINLINE void Tile(const TileArgs& args) {
  VF acc[kPanels][kRows][kVectors];
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        acc[p][r][v] =
            args.from_zero
                ? hn::Zero(F())
                : hn::Load(F(), args.c + p * args.c_stride + r * kPanelColumns + v * kLanes);
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
        __builtin_prefetch(prefetch + p * panel_bytes, 0, 2);
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
  UNROLL for (int p = 0; p < kPanels; ++p) {
    UNROLL for (int r = 0; r < kRows; ++r) {
      UNROLL for (int v = 0; v < kVectors; ++v) {
        hn::Store(acc[p][r][v], F(), args.c + p * args.c_stride + r * kPanelColumns + v * kLanes);
      }
    }
  }
}

// As many accumulators as there are registers for, beside the weights and a broadcast.
constexpr int PanelsFor(bool widened, int rows) {
  if (kManyRegisters || rows == 1) return 4;
  return rows == 2 || (rows == 3 && !widened) ? 2 : 1;
}

template <class Lines, int kRows>
void AddTile(TileKernels& kernels) {
  constexpr int kPanels = PanelsFor(Lines::kSteps > 1, kRows);
  kernels.tile[kRows] = Tile<Lines, kRows, kPanels>;
  kernels.panels[kRows] = kPanels;
}

template <class Lines>
TileKernels MakeTiles() {
  TileKernels kernels;
  AddTile<Lines, 1>(kernels);
  AddTile<Lines, 2>(kernels);
  AddTile<Lines, 3>(kernels);
  AddTile<Lines, 4>(kernels);
  AddTile<Lines, 5>(kernels);
  AddTile<Lines, 6>(kernels);
  kernels.single_pass_rows = kManyRegisters ? 6 : 2;
  kernels.chunk_lines = kManyRegisters ? 1024 : 512;
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
  } else if constexpr (kKind == Activation::kGptOssGlu) {
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
    case Activation::kGptOssGlu:
      return ActivateBlock<Activation::kGptOssGlu>(function, c, rows, columns, format, h, stride);
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

int64_t FindNotFinite(DType dtype, const void* values, int64_t n) {
  // The exponent's bits all set: infinity or NaN.
  constexpr int64_t kBlock = 256;  // elements between two looks at what was collected
  const auto not_finite = [dtype, values](int64_t i) {
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
  kernels.f32 = MakeTiles<LinesF32>();
  kernels.bf16 = MakeTiles<LinesBF16>();
  kernels.f16 = MakeTiles<LinesF16>();
  kernels.widen = Widen;
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
    kernels.bf16_pairs = MakeDotProductTiles();
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
