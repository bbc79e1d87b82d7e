// Activations as integers, written once on Vec; linear_table.h describes what comes out.
#pragma once

#include <cstddef>

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr float kLevels = 127.0f;
inline constexpr float kLeastLargest = 1e-27f;  // below it levels / x * 2^halvings could overflow

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

// How often the row's largest can be halved without falling below the group's.
SHOAL_INLINE int32_t halvings_of(float of_row, float of_group, int32_t most) {
  // Bits of positive floats are in their order; where the group's mantissa is the larger, one less comes out.
  const auto halvings = static_cast<int32_t>((float_to_bits(of_row) - float_to_bits(of_group)) >> 23);
  return halvings < most ? halvings : most;
}

// Rounds the integers of a group and finds where their products start.
template <typename Group>
SHOAL_INLINE void store_group(Vec low, Vec high, const QuantizedFormat& format, Group& out) {
  low.store_int8(out.q);
  high.store_int8(out.q + kLanes);
  const int32_t of_low = sum_of_16(out.q), of_high = sum_of_16(out.q + kLanes);
  const int32_t sum = of_low + of_high, rounding = (1 << format.fit) / 2;
  out.start[0] = rounding - format.zero * (format.halves == 2 ? of_low : sum);
  out.start[1] = rounding - format.zero * of_high;
  if (format.has_min) out.start[0] += sum * kMinUnits * (1 << 16);
}

// A row of one number: of zeros, or of NaN.
SHOAL_INLINE void fill_row(float unit, const QuantizedRows& out, int64_t row) {
  __builtin_memset(&out.row(row), 0, static_cast<std::size_t>(out.stride()));
  out.row(row).unit = unit;
}

SHOAL_INLINE void quantize_row(const float* x, const QuantizedFormat& format, const QuantizedRows& out,
                               int64_t row) {
  const float largest = largest_of_row(x, out.groups * kGroup);
  if (largest != largest) return fill_row(largest, out, row);
  if (largest <= kLeastLargest) return fill_row(0.0f, out, row);
  const float inverse = kLevels / largest;
  QuantizedGroup* const groups = out.group(row);
  // In two passes: in one, each group would wait for its own largest.
  for (int64_t g = 0; g < out.groups; ++g) {
    const Vec low = abs(Vec::load(x + g * kGroup)), high = abs(Vec::load(x + g * kGroup + kLanes));
    const float of_group = reduce_max(max(low, high));
    groups[g].count = out.headroom + halvings_of(largest, of_group, kMostCount - out.headroom);
    groups[g].half = (1 << groups[g].count) / 2;
  }
  FineGroup* fine = out.fine(row);
  for (int64_t g = 0; g < out.groups; ++g, x += kGroup) {
    const int32_t halvings = groups[g].count - out.headroom;
    const Vec factor = Vec::broadcast(inverse * static_cast<float>(1 << halvings));
    const Vec low = Vec::load(x) * factor, high = Vec::load(x + kLanes) * factor;
    store_group(low, high, format, groups[g]);
    if (out.wide && halvings == 0) {
      const Vec units = Vec::broadcast(1 << kFineHalvings);
      store_group((low - round_to_integer(low)) * units, (high - round_to_integer(high)) * units, format, *fine);
      fine->index = static_cast<int32_t>(g);
      ++fine;
    }
  }
  out.row(row).num_fine = static_cast<int32_t>(fine - out.fine(row));
  out.row(row).unit = largest / kLevels;
}

inline void quantize_rows(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                          const QuantizedFormat& format, const QuantizedRows& out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    quantize_row(x + row * x_stride, format, out, row);
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
