// Activations as integers, written once on Vec; linear_table.h describes what comes out.
#pragma once

#include <cstddef>

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr float kLevels = 127.0f;
inline constexpr float kLeastLargest = 1e-30f;  // below it levels / x could overflow

SHOAL_INLINE Vec round_to_integer(Vec x) {
  const Vec shift = Vec::broadcast(0x1.8p23f);  // adding and subtracting it rounds
  return (x + shift) - shift;
}

SHOAL_INLINE int32_t sum_of_16(const int8_t* q) {
#if defined(__AVX2__)
  const __m128i from_zero =
      _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(from_zero, _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += q[i];
  return sum;
#endif
}

// The largest magnitude of a row; NaN if not all are finite.
SHOAL_INLINE float largest_of_row(const float* x, int64_t inputs) {
  Vec largest = Vec::zero(), poison = Vec::zero();
  for (int64_t k = 0; k < inputs; k += kLanes) {
    const Vec lanes = Vec::load(x + k);
    largest = max(largest, abs(lanes));
    poison = fma(lanes, Vec::zero(), poison);
  }
  return reduce_max(largest) + reduce_add(poison);
}

// The shift of a group: how often the row's largest can be halved without falling below the group's decides.
SHOAL_INLINE int32_t shift_of(float of_row, float of_group) {
  if (of_group == 0.0f) return 0;
  // Bits of positive floats are in their order; where the group's mantissa is the larger, one less comes out.
  const auto difference = static_cast<int32_t>(float_to_bits(of_row) - float_to_bits(of_group));
  const int32_t shift = kMostShift - (difference >> 23);
  return shift > kLeastShift ? shift : kLeastShift;
}

// Rounds the integers of one plane of a group; returns their sum.
SHOAL_INLINE int32_t store_plane(Vec low, Vec high, const QuantizeArgs& args, QuantizedGroup& out) {
  low.store_int8(out.q);
  high.store_int8(out.q + kLanes);
  const int32_t of_low = sum_of_16(out.q), of_high = sum_of_16(out.q + kLanes);
  out.start[0] = -args.zero * (args.halves ? of_low : of_low + of_high);
  out.start[1] = -args.zero * of_high;
  return of_low + of_high;
}

// The integers of a group whose shift is known already; `inverse` is that of the unit at the largest shift.
template <bool kWide>
SHOAL_INLINE void quantize_group(const float* x, float inverse, const QuantizeArgs& args,
                                 QuantizedGroup* out) {
  const Vec factor = Vec::broadcast(inverse * static_cast<float>(1 << (kMostShift - out->shift)));
  const Vec low = Vec::load(x) * factor, high = Vec::load(x + kLanes) * factor;
  if constexpr (!kWide) {
    out->sum = store_plane(low, high, args, *out);
    return;
  }
  const Vec coarse_low = round_to_integer(low), coarse_high = round_to_integer(high);
  const int32_t sum = 16 * store_plane(coarse_low, coarse_high, args, out[0]);
  Vec fine_low = Vec::zero(), fine_high = Vec::zero();
  if (out->shift == kMostShift) {
    const Vec sixteen = Vec::broadcast(16.0f);
    fine_low = (low - coarse_low) * sixteen;
    fine_high = (high - coarse_high) * sixteen;
  }
  out->sum = sum + store_plane(fine_low, fine_high, args, out[1]);
}

// The sums of all groups, in a power of two that brings the largest to the bits of kLargestSum; zero where
// the shift is negative, as they would be lost.
template <int kPlanes>
SHOAL_INLINE void quantize_sums(const QuantizedGroup* groups, const QuantizedRows& out, int64_t row) {
  const auto sum_of = [&](int64_t g) __attribute__((always_inline)) {
    const QuantizedGroup& group = groups[g * kPlanes];
    return group.shift < 0 ? 0 : group.sum << group.shift;
  };
  bool has_small = false;
  uint32_t bits = 0;  // those that any sum has
  for (int64_t g = 0; g < out.groups; ++g) {
    has_small |= groups[g * kPlanes].shift < 0;
    const int32_t sum = sum_of(g);
    bits |= static_cast<uint32_t>(sum < 0 ? -sum : sum);
  }
  int shift = 0;
  while (bits >> shift >= kLargestSum) ++shift;
  const int32_t half = shift > 0 ? 1 << (shift - 1) : 0;
  int16_t* const sums = out.sums(row);
  for (int64_t g = 0; g < out.groups; ++g) sums[g] = static_cast<int16_t>((sum_of(g) + half) >> shift);
  if (out.groups % 2 == 1) sums[out.groups] = 0;
  out.row(row).sum_unit = static_cast<float>(1 << shift);
  out.row(row).has_small_groups = has_small;
}

// A row of one number: of zeros, or of NaN.
SHOAL_INLINE void fill_row(float unit, const QuantizedRows& out, int64_t row) {
  __builtin_memset(&out.row(row), 0, static_cast<std::size_t>(out.stride()));
  out.row(row).unit = unit;
}

template <bool kWide>
SHOAL_INLINE void quantize_row(const float* x, const QuantizeArgs& args, const QuantizedRows& out,
                               int64_t row) {
  constexpr int kPlanes = kWide ? 2 : 1;
  constexpr float kUnits = kLevels * (1 << kMostShift) * (kWide ? 16 : 1);  // of the row's largest
  const float largest = largest_of_row(x, out.groups * kGroup);
  if (largest != largest) return fill_row(largest, out, row);
  if (largest <= kLeastLargest) return fill_row(0.0f, out, row);
  QuantizedGroup* const groups = out.group(row);
  // In two passes: in one, each group would wait for its own largest.
  for (int64_t g = 0; g < out.groups; ++g) {
    const Vec low = abs(Vec::load(x + g * kGroup)), high = abs(Vec::load(x + g * kGroup + kLanes));
    groups[g * kPlanes].shift = shift_of(largest, reduce_max(max(low, high)));
  }
  for (int64_t g = 0; g < out.groups; ++g) {
    quantize_group<kWide>(x + g * kGroup, kLevels / largest, args, groups + g * kPlanes);
  }
  quantize_sums<kPlanes>(groups, out, row);
  out.row(row).unit = largest / kUnits;
}

inline void quantize_rows(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                          const QuantizeArgs& args, const QuantizedRows& out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (out.wide) {
      quantize_row<true>(x + row * x_stride, args, out, row);
    } else {
      quantize_row<false>(x + row * x_stride, args, out, row);
    }
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
