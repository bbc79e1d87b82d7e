// Activations as integers, written once on Vec; linear_table.h describes what comes out.
#pragma once

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr float kLevels = 127.0f;
inline constexpr float kLeastLargest = 1e-30f;  // below it levels / x could overflow
inline constexpr float kRoundToInteger = 0x1.8p23f;  // adding and subtracting it does

SHOAL_INLINE Vec round_to_integer(Vec x) {
  const Vec shift = Vec::broadcast(kRoundToInteger);
  return (x + shift) - shift;
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

// Integers of one plane of a group, and what a kernel starts from.
SHOAL_INLINE int32_t store_plane(Vec low, Vec high, const QuantizeArgs& args, QuantizedGroup& out) {
  low.store_int8(out.q);
  high.store_int8(out.q + kLanes);
  const auto sum = static_cast<int32_t>(reduce_add(low + high));  // exact: integers below 2^24
  const int32_t of_low = args.halves ? static_cast<int32_t>(reduce_add(low)) : sum;
  out.start[0] = -args.zero * of_low;
  out.start[1] = -args.zero * (sum - of_low);
  return sum;
}

template <bool kWide>
SHOAL_INLINE void quantize_group(const float* x, float largest, float inverse,
                                 const QuantizeArgs& args, QuantizedGroup* out) {
  Vec low = Vec::load(x), high = Vec::load(x + kLanes);
  const int32_t count = halvings(largest, reduce_max(max(abs(low), abs(high))));
  const Vec factor = Vec::broadcast(inverse * static_cast<float>(1 << count));
  const int32_t shift = kMostShift - count;
  low = low * factor;
  high = high * factor;
  const Vec coarse_low = round_to_integer(low), coarse_high = round_to_integer(high);
  out->shift = shift;
  if constexpr (!kWide) {
    out->sum = store_plane(coarse_low, coarse_high, args, *out) << shift;
  } else {
    int32_t sum = 16 * store_plane(coarse_low, coarse_high, args, out[0]);
    out[1].shift = count <= kFineHalvings;
    Vec fine_low = Vec::zero(), fine_high = Vec::zero();
    if (out[1].shift) {
      const Vec sixteen = Vec::broadcast(16.0f);
      fine_low = round_to_integer((low - coarse_low) * sixteen);
      fine_high = round_to_integer((high - coarse_high) * sixteen);
    }
    sum += store_plane(fine_low, fine_high, args, out[1]);
    out->sum = sum << shift;
  }
}

// The sums of all groups in int16, with a unit that they share.
SHOAL_INLINE void quantize_sums(const QuantizedGroup* groups, int planes, const QuantizedRows& out,
                                int64_t row) {
  int32_t largest = 0;
  for (int64_t g = 0; g < out.groups; ++g) {
    const int32_t sum = groups[g * planes].sum;
    largest = sum > largest ? sum : -sum > largest ? -sum : largest;
  }
  const float to_unit = largest > 0 ? kLargestSum / static_cast<float>(largest) : 0.0f;
  int16_t* const sums = out.sums(row);
  for (int64_t g = 0; g < out.groups; ++g) {
    const float sum = static_cast<float>(groups[g * planes].sum) * to_unit;
    sums[g] = static_cast<int16_t>((sum + kRoundToInteger) - kRoundToInteger);
  }
  if (out.groups % 2 == 1) sums[out.groups] = 0;
  out.row(row).sum_unit = static_cast<float>(largest) / kLargestSum;
}

template <bool kWide>
SHOAL_INLINE void quantize_row(const float* x, const QuantizeArgs& args, const QuantizedRows& out,
                               int64_t row) {
  constexpr int kPlanes = kWide ? 2 : 1;
  constexpr float kUnits = kLevels * (1 << kMostShift) * (kWide ? 16 : 1);  // of the row's largest
  const float largest = largest_of_row(x, out.groups * kGroup);
  const bool is_any = largest > kLeastLargest;
  QuantizedGroup* const groups = out.group(row);
  for (int64_t g = 0; g < out.groups; ++g) {
    quantize_group<kWide>(x + g * kGroup, largest, is_any ? kLevels / largest : 0.0f, args,
                          groups + g * kPlanes);
  }
  out.row(row).unit = is_any || largest != largest ? largest / kUnits : 0.0f;
  quantize_sums(groups, kPlanes, out, row);
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
