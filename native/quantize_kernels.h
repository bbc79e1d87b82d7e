// Activations as integers, written once on Vec; linear_table.h describes what comes out.
#pragma once

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

// How often `largest` can be halved without falling below `of_group`, up to kMostShift.
SHOAL_INLINE int32_t halvings(float largest, float of_group) {
  const auto difference = static_cast<int32_t>(float_to_bits(largest) - float_to_bits(of_group));
  const int32_t count = difference >> 23;  // of exponents, one less where the mantissa is larger
  return count < kMostShift ? count : kMostShift;
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
    out->sum = store_plane(low, high, args, *out) << out->shift;
    return;
  }
  const Vec coarse_low = round_to_integer(low), coarse_high = round_to_integer(high);
  int32_t sum = 16 * store_plane(coarse_low, coarse_high, args, out[0]);
  out[1].shift = out[0].shift == kMostShift;
  Vec fine_low = Vec::zero(), fine_high = Vec::zero();
  if (out[1].shift) {
    const Vec sixteen = Vec::broadcast(16.0f);
    fine_low = (low - coarse_low) * sixteen;
    fine_high = (high - coarse_high) * sixteen;
  }
  sum += store_plane(fine_low, fine_high, args, out[1]);
  out->sum = sum << out->shift;
}

// The sums of all groups, in a power of two that brings the largest to the bits of kLargestSum.
template <int kPlanes>
SHOAL_INLINE void quantize_sums(const QuantizedGroup* groups, const QuantizedRows& out, int64_t row) {
  uint32_t bits = 0;  // those that any sum has
  for (int64_t g = 0; g < out.groups; ++g) {
    const int32_t sum = groups[g * kPlanes].sum;
    bits |= static_cast<uint32_t>(sum < 0 ? -sum : sum);
  }
  int shift = 0;
  while (bits >> shift >= kLargestSum) ++shift;
  const int32_t half = shift > 0 ? 1 << (shift - 1) : 0;
  int16_t* const sums = out.sums(row);
  for (int64_t g = 0; g < out.groups; ++g) {
    sums[g] = static_cast<int16_t>((groups[g * kPlanes].sum + half) >> shift);
  }
  if (out.groups % 2 == 1) sums[out.groups] = 0;
  out.row(row).sum_unit = static_cast<float>(1 << shift);
}

template <bool kWide>
SHOAL_INLINE void quantize_row(const float* x, const QuantizeArgs& args, const QuantizedRows& out,
                               int64_t row) {
  constexpr float kUnits = kLevels * (1 << kMostShift) * (kWide ? 16 : 1);  // of the row's largest
  const float largest = largest_of_row(x, out.groups * kGroup);
  const bool is_any = largest > kLeastLargest;
  const float inverse = is_any ? kLevels / largest : 0.0f;
  constexpr int kPlanes = kWide ? 2 : 1;
  QuantizedGroup* const groups = out.group(row);
  // In two passes: in one, each group would wait for its own largest.
  for (int64_t g = 0; g < out.groups; ++g) {
    const Vec low = abs(Vec::load(x + g * kGroup)), high = abs(Vec::load(x + g * kGroup + kLanes));
    groups[g * kPlanes].shift = kMostShift - halvings(largest, reduce_max(max(low, high)));
  }
  for (int64_t g = 0; g < out.groups; ++g) {
    quantize_group<kWide>(x + g * kGroup, inverse, args, groups + g * kPlanes);
  }
  quantize_sums<kPlanes>(groups, out, row);
  out.row(row).unit = is_any || largest != largest ? largest / kUnits : 0.0f;
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
