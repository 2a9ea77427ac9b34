// Quantisation by Highway: this file is compiled once for AVX2 and once for AVX-512, under the
// rules that kernels.cc states.
#include "common/kernels/quantize.h"

#include "common/numerics/keep_denormals.h"
#include "common/numerics/quantize.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/kernels/quantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace expertmesh {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using Codes = hn::Rebind<uint8_t, F>;
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
using VU = hn::Vec<U>;
constexpr int64_t kLanes = HWY_TARGET == HWY_AVX2 ? 8 : 16;

// The values of a dtype: their bits, of which the magnitudes are ordered as integers, and vectors
// of them as floats.
template <DType kDType>
struct Values;
template <>
struct Values<DType::kF32> {
  using Word = uint32_t;
  static HWY_INLINE VF Load(const Word* words) {
    return hn::LoadU(F(), reinterpret_cast<const float*>(words));
  }
};
template <>
struct Values<DType::kBF16> {
  using Word = uint16_t;
  static HWY_INLINE VF Load(const Word* words) {
    const VU wide = hn::PromoteTo(U(), hn::LoadU(hn::Rebind<Word, F>(), words));
    return hn::BitCast(F(), hn::ShiftLeft<16>(wide));
  }
};
template <>
struct Values<DType::kF16> {
  using Word = uint16_t;
  static HWY_INLINE VF Load(const Word* words) {
    return hn::PromoteTo(F(), hn::LoadU(hn::Rebind<hwy::float16_t, F>(),
                                        reinterpret_cast<const hwy::float16_t*>(words)));
  }
};

// The largest lane.
HWY_INLINE uint32_t LargestLane(VU v) { return hn::GetLane(hn::MaxOfLanes(U(), v)); }
HWY_INLINE uint32_t LargestLane(hn::Vec<hn::Repartition<uint16_t, F>> v) {
  const VU pairs = hn::BitCast(U(), v);
  return LargestLane(hn::Max(hn::And(pairs, hn::Set(U(), 0xffffu)), hn::ShiftRight<16>(pairs)));
}

// The bits of the largest magnitude of n values.
template <typename Word>
HWY_INLINE Word LargestMagnitude(const Word* words, int64_t n) {
  constexpr Word kMagnitude = static_cast<Word>(~Word{0}) >> 1;
  using W = hn::Repartition<Word, F>;
  constexpr int64_t kWords = kLanes * static_cast<int64_t>(sizeof(float) / sizeof(Word));
  const auto mask = hn::Set(W(), kMagnitude);
  auto largest = hn::Zero(W());
  int64_t i = 0;
  for (; i + kWords <= n; i += kWords) {
    largest = hn::Max(largest, hn::And(hn::LoadU(W(), words + i), mask));
  }
  Word result = i == 0 ? Word{0} : static_cast<Word>(LargestLane(largest));
  for (; i < n; ++i) {
    const auto magnitude = static_cast<Word>(words[i] & kMagnitude);
    if (magnitude > result) result = magnitude;
  }
  return result;
}

// RoundToE4M3 of magnitudes. For small ones the addition rounds: the floats of 2^14 are 2^-9 apart.
HWY_INLINE VI RoundToE4M3Vector(VF magnitude) {
  const U u;
  const VU bits = hn::BitCast(u, magnitude);
  const VU odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(u, 1u));
  const VU normal =
      hn::ShiftRight<20>(hn::Add(hn::Add(bits, hn::Set(u, 0x7ffffu - (120u << 23))), odd));
  const VF magic = hn::Set(F(), 0x1p14f);
  const VU small = hn::Sub(hn::BitCast(u, hn::Add(magnitude, magic)), hn::BitCast(u, magic));
  const auto is_small = hn::Lt(magnitude, hn::Set(F(), 0x1p-6f));
  return hn::BitCast(I(), hn::IfThenElse(hn::RebindMask(u, is_small), small, normal));
}

// What a format stores of a BlockScale.
HWY_INLINE void StoreScale(const BlockScale& scale, float* to) { *to = scale.scale; }
HWY_INLINE void StoreScale(const BlockScale& scale, uint8_t* to) { *to = scale.exponent; }
template <bool kExponent>
struct Stored {
  using Type = float;
};
template <>
struct Stored<true> {
  using Type = uint8_t;
};

// The codes of n values; returns how many are saturated.
template <DType kDType, QuantizedFormat kFormat>
HWY_INLINE int64_t Encode(const typename Values<kDType>::Word* words, int64_t n,
                          const BlockScale& scale, uint8_t* codes) {
  constexpr bool kDivide = kFormat == QuantizedFormat::kFp8Block128;
  const I i32;
  const VF factor = hn::Set(F(), scale.factor);
  const VI largest = hn::Set(i32, scale.largest_code);
  int64_t saturated = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VF x = Values<kDType>::Load(words + i);
    const VF scaled = kDivide ? hn::Div(x, factor) : hn::Mul(x, factor);
    const VI code = RoundToE4M3Vector(hn::Abs(scaled));
    saturated += static_cast<int64_t>(hn::CountTrue(i32, hn::Gt(code, largest)));
    const VU sign =
        hn::And(hn::ShiftRight<24>(hn::BitCast(U(), scaled)), hn::Set(U(), uint32_t{kE4M3Sign}));
    hn::StoreU(hn::TruncateTo(Codes(), hn::Or(hn::BitCast(U(), hn::Min(code, largest)), sign)),
               Codes(), codes + i);
  }
  for (; i < n; ++i) {
    const float x = LoadFloat(kDType, words, i);
    const float scaled = kDivide ? x / scale.factor : x * scale.factor;
    uint32_t code = RoundToE4M3(__builtin_fabsf(scaled));
    if (code > scale.largest_code) {
      ++saturated;
      code = scale.largest_code;
    }
    codes[i] = static_cast<uint8_t>(code | (__builtin_signbit(x) ? kE4M3Sign : 0));
  }
  return saturated;
}

// Rows that share their scales: at most kFp8BlockRows.
template <DType kDType, QuantizedFormat kFormat>
HWY_INLINE void QuantizeGroup(const QuantizeArgs& args, int64_t first, int64_t rows,
                              QuantizeCounts* counts) {
  using Word = typename Values<kDType>::Word;
  using Scale = typename Stored<ScaleDType(kFormat) == DType::kF8_E8M0>::Type;
  // Blocks that are looked at before the first of them is encoded, which hides the latency of
  // their scales.
  constexpr int64_t kBlocks = 16;
  const int64_t channels = ChannelsPerScale(kFormat, args.k);
  const int64_t scales_per_row = ScalesPerRow(kFormat, args.k);
  const Word* const words = static_cast<const Word*>(args.values) + first * args.k;
  uint8_t* const codes = args.codes + first * args.k;
  Scale* const scales = static_cast<Scale*>(args.scales) + first * scales_per_row;
  bool zero[kFp8BlockRows];
  int64_t saturated[kFp8BlockRows];
  for (int64_t r = 0; r < rows; ++r) {
    zero[r] = true;
    saturated[r] = 0;
  }
  for (int64_t begin = 0; begin < scales_per_row; begin += kBlocks) {
    const int64_t end = begin + kBlocks < scales_per_row ? begin + kBlocks : scales_per_row;
    const auto width = [&](int64_t block) {  // the last one may be narrower
      return block + 1 < scales_per_row ? channels : args.k - block * channels;
    };
    Word amax[kBlocks] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const Word* const row = words + r * args.k;
      Word all = 0;
      for (int64_t block = begin; block < end; ++block) {
        const Word largest = LargestMagnitude(row + block * channels, width(block));
        all |= largest;
        if (largest > amax[block - begin]) amax[block - begin] = largest;
      }
      if (all != 0) zero[r] = false;
    }
    BlockScale block_scales[kBlocks];
    for (int64_t i = 0; i < end - begin; ++i) {
      block_scales[i] = ScaleOf(kFormat, LoadFloat(kDType, amax, i));
    }
    for (int64_t r = 0; r < rows; ++r) {
      int64_t count = 0;
      for (int64_t block = begin; block < end; ++block) {
        const BlockScale& scale = block_scales[block - begin];
        const int64_t at = r * args.k + block * channels;
        StoreScale(scale, &scales[r * scales_per_row + block]);
        count += Encode<kDType, kFormat>(words + at, width(block), scale, codes + at);
      }
      saturated[r] += count;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    counts->saturated_values += saturated[r];
    counts->saturated_rows += saturated[r] > 0;
    counts->zero_rows += zero[r];
  }
}

template <DType kDType, QuantizedFormat kFormat>
HWY_NOINLINE QuantizeCounts QuantizeAll(const QuantizeArgs& args, int64_t rows_per_scale) {
  QuantizeCounts counts;
  for (int64_t r = 0; r < args.rows; r += rows_per_scale) {
    const int64_t left = args.rows - r;
    QuantizeGroup<kDType, kFormat>(args, r, left < rows_per_scale ? left : rows_per_scale, &counts);
  }
  return counts;
}

template <DType kDType>
QuantizeCounts QuantizeDType(const QuantizeArgs& args, int64_t rows_per_scale) {
  switch (args.format) {
    case QuantizedFormat::kFp8Rowwise:
      return QuantizeAll<kDType, QuantizedFormat::kFp8Rowwise>(args, rows_per_scale);
    case QuantizedFormat::kFp8Block128:
      return QuantizeAll<kDType, QuantizedFormat::kFp8Block128>(args, rows_per_scale);
    case QuantizedFormat::kMxfp8:
      return QuantizeAll<kDType, QuantizedFormat::kMxfp8>(args, rows_per_scale);
    case QuantizedFormat::kMxfp8Rceil:
      break;
  }
  return QuantizeAll<kDType, QuantizedFormat::kMxfp8Rceil>(args, rows_per_scale);
}

}  // namespace

QuantizeCounts Quantize(const QuantizeArgs& args, int64_t rows_per_scale) {
  switch (args.dtype) {
    case DType::kBF16:
      return QuantizeDType<DType::kBF16>(args, rows_per_scale);
    case DType::kF16:
      return QuantizeDType<DType::kF16>(args, rows_per_scale);
    default:
      return QuantizeDType<DType::kF32>(args, rows_per_scale);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace expertmesh
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET

#if HWY_ONCE
namespace expertmesh {
namespace {

QuantizeCounts Quantize(Isa isa, const QuantizeArgs& args, int64_t rows_per_scale) {
  const ScopedKeepDenormals keep;
  return isa == Isa::kAvx2 ? N_AVX2::Quantize(args, rows_per_scale)
                           : N_AVX3::Quantize(args, rows_per_scale);
}

}  // namespace

QuantizeCounts QuantizeRows(Isa isa, const QuantizeArgs& args) { return Quantize(isa, args, 1); }

QuantizeCounts QuantizeWeights(Isa isa, const QuantizeArgs& args) {
  return Quantize(isa, args, WeightRowsPerScale(args.format));
}

}  // namespace expertmesh
#endif  // HWY_ONCE
