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
  constexpr int kChains = 4;  // else each vector would wait for the one before
  Vec largest[kChains], poison[kChains];
  for (int i = 0; i < kChains; ++i) largest[i] = poison[i] = Vec::zero();
  const auto look_at = [&](int i, const float* at) __attribute__((always_inline)) {
    const Vec lanes = Vec::load(at);
    largest[i] = max(largest[i], abs(lanes));
    poison[i] = fma(lanes, Vec::zero(), poison[i]);
  };
  int64_t k = 0;
  for (; k + kChains * kLanes <= inputs; k += kChains * kLanes) {
    for (int i = 0; i < kChains; ++i) look_at(i, x + k + i * kLanes);
  }
  for (int i = 0; k < inputs; ++i, k += kLanes) look_at(i, x + k);
  return reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3]))) +
         reduce_add((poison[0] + poison[1]) + (poison[2] + poison[3]));
}

// How often the row's largest can be halved without falling below the group's.
SHOAL_INLINE int32_t halvings_of(float of_row, float of_group, int32_t most) {
  // Bits of positive floats are in their order; where the group's mantissa is the larger, one less comes out.
  const auto halvings = static_cast<int32_t>((float_to_bits(of_row) - float_to_bits(of_group)) >> 23);
  return halvings < most ? halvings : most;
}

// Where the products of a group start, from the sums of its halves: start[0] = constant + low[0] * of_low +
// high[0] * of_high, and so on.
struct StartFactors {
  int32_t constant, low[2], high[2];

  explicit StartFactors(const QuantizedFormat& format)
      : constant((1 << format.fit) / 2),
        low{-format.zero, 0},
        high{format.halves == 2 ? 0 : -format.zero, -format.zero} {
    if (!format.has_min) return;
    low[0] += kMinUnits * (1 << 16);
    high[0] += kMinUnits * (1 << 16);
  }
};

// Rounds the integers of a group and finds where their products start.
template <typename Group>
SHOAL_INLINE void store_group(Vec low, Vec high, const StartFactors& start, Group& out) {
  low.store_int8(out.q);
  high.store_int8(out.q + kLanes);
  const int32_t of_low = sum_of_16(out.q), of_high = sum_of_16(out.q + kLanes);
  for (int i = 0; i < 2; ++i) {
    out.start[i] = start.constant + start.low[i] * of_low + start.high[i] * of_high;
  }
}

// What the groups of a row share.
struct RowScale {
  float largest, inverse;  // levels / largest
  int32_t headroom;

  SHOAL_INLINE float factor(int32_t count) const {
    return inverse * static_cast<float>(1 << (count - headroom));
  }
};

// How often a group of this largest magnitude is halved.
SHOAL_INLINE void store_count(float of_group, const RowScale& scale, QuantizedGroup& out) {
  out.count = scale.headroom + halvings_of(scale.largest, of_group, kMostCount - scale.headroom);
  out.half = (1 << out.count) / 2;
}

inline void quantize_groups(const float* x, int64_t count, const RowScale& scale, const StartFactors& start,
                            QuantizedGroup* out) {
  // In two passes: in one, each group would wait for its own largest.
  for (int64_t g = 0; g < count; ++g) {
    const Vec low = abs(Vec::load(x + g * kGroup)), high = abs(Vec::load(x + g * kGroup + kLanes));
    store_count(reduce_max(max(low, high)), scale, out[g]);
  }
  for (int64_t g = 0; g < count; ++g, x += kGroup) {
    const Vec factor = Vec::broadcast(scale.factor(out[g].count));
    store_group(Vec::load(x) * factor, Vec::load(x + kLanes) * factor, start, out[g]);
  }
}

#if defined(__AVX512VNNI__)

inline constexpr int kGroupsAtOnce = 8;

// The largest magnitudes of 8 groups, as bits.
SHOAL_INLINE __m256i largest_of_groups(const float* x) {
  __m512 of[kGroupsAtOnce];
  for (int g = 0; g < kGroupsAtOnce; ++g, x += kGroup) {
    of[g] = max(abs(Vec::load(x)), abs(Vec::load(x + kLanes))).v;
  }
  // Each step puts what is left of two neighbours into one vector, until each has one lane.
  for (int i = 0; i < 4; ++i) {
    const __m512 a = of[2 * i], b = of[2 * i + 1];
    of[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(of[2 * i]), b = _mm512_castps_pd(of[2 * i + 1]);
    of[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                          _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 both = _mm512_max_ps(_mm512_shuffle_f32x4(of[0], of[1], 0x88),
                                    _mm512_shuffle_f32x4(of[0], of[1], 0xdd));
  const __m512 each = _mm512_max_ps(both, _mm512_shuffle_f32x4(both, both, 0xb1));  // 0-3, 0-3, 4-7, 4-7
  return _mm512_castsi512_si256(_mm512_castps_si512(_mm512_shuffle_f32x4(each, each, 0x08)));
}

// The integers of two groups, 64 bytes.
SHOAL_INLINE __m512i quants_of_two(const float* x, const float* factors) {
  __m512i q[4];
  for (int i = 0; i < 4; ++i) {
    q[i] = _mm512_cvtps_epi32((Vec::load(x + i * kLanes) * Vec::broadcast(factors[i / 2])).v);
  }
  const __m512i packed =
      _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
  // Packing goes by parts of 128 bits.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, packed);
}

// The sums of the halves of 8 groups whose pairs have these bytes: of the lower halves, then of the upper.
SHOAL_INLINE __m512i sums_of_halves(const __m512i (&quants)[4]) {
  __m512i sums[4];  // each of four bytes
  for (int i = 0; i < 4; ++i) {
    sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), quants[i]);
  }
  const auto add_pairs = [](__m512i a, __m512i b) __attribute__((always_inline)) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i a = add_pairs(sums[0], sums[1]), b = add_pairs(sums[2], sums[3]);
  const __m512i each = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  // In `each`: the lower halves of groups 0, 2, 4 and 6, their upper ones, then the same of the odd groups.
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  return _mm512_permutexvar_epi32(order, each);
}

// What quantize_groups does, for 8 groups together.
SHOAL_INLINE void quantize_8_groups(const float* x, const RowScale& scale, const StartFactors& start,
                                    QuantizedGroup* out) {
  const __m256i one = _mm256_set1_epi32(1), headroom = _mm256_set1_epi32(scale.headroom);
  const __m256i of_row = _mm256_castps_si256(_mm256_set1_ps(scale.largest));
  const __m256i below_row = _mm256_sub_epi32(of_row, largest_of_groups(x));
  const __m256i halvings = _mm256_min_epi32(_mm256_srli_epi32(below_row, 23),
                                            _mm256_set1_epi32(kMostCount - scale.headroom));
  const __m256i counts = _mm256_add_epi32(halvings, headroom);
  alignas(32) float factors[kGroupsAtOnce];
  _mm256_store_ps(factors, _mm256_mul_ps(_mm256_set1_ps(scale.inverse),
                                         _mm256_cvtepi32_ps(_mm256_sllv_epi32(one, halvings))));
  __m512i quants[4];
  for (int i = 0; i < 4; ++i) {
    quants[i] = quants_of_two(x + 2 * i * kGroup, factors + 2 * i);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[2 * i].q), _mm512_castsi512_si256(quants[i]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[2 * i + 1].q), _mm512_extracti64x4_epi64(quants[i], 1));
  }
  const __m512i sums = sums_of_halves(quants);
  const __m256i of_low = _mm512_castsi512_si256(sums), of_high = _mm512_extracti64x4_epi64(sums, 1);
  __m256i starts[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i low = _mm256_mullo_epi32(of_low, _mm256_set1_epi32(start.low[i]));
    const __m256i high = _mm256_mullo_epi32(of_high, _mm256_set1_epi32(start.high[i]));
    starts[i] = _mm256_add_epi32(_mm256_set1_epi32(start.constant), _mm256_add_epi32(low, high));
  }
  const __m256i halves = _mm256_srli_epi32(_mm256_sllv_epi32(one, counts), 1);
  // Four numbers of each group lie together.
  const __m256i a = _mm256_unpacklo_epi32(starts[0], starts[1]);
  const __m256i b = _mm256_unpackhi_epi32(starts[0], starts[1]);
  const __m256i c = _mm256_unpacklo_epi32(counts, halves), d = _mm256_unpackhi_epi32(counts, halves);
  const __m256i numbers[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                              _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
  for (int g = 0; g < 4; ++g) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out[g].start), _mm256_castsi256_si128(numbers[g]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out[g + 4].start), _mm256_extracti128_si256(numbers[g], 1));
  }
}

#endif

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
  const StartFactors start(format);
  const RowScale scale{largest, kLevels / largest, out.headroom};
  QuantizedGroup* const groups = out.group(row);
  int64_t done = 0;
#if defined(__AVX512VNNI__)
  for (; done + kGroupsAtOnce <= out.groups; done += kGroupsAtOnce) {
    quantize_8_groups(x + done * kGroup, scale, start, groups + done);
  }
#endif
  quantize_groups(x + done * kGroup, out.groups - done, scale, start, groups + done);
  FineGroup* fine = out.fine(row);
  for (int64_t g = 0; out.wide && g < out.groups; ++g) {
    if (groups[g].count != out.headroom) continue;
    const Vec factor = Vec::broadcast(scale.inverse);
    const Vec low = Vec::load(x + g * kGroup) * factor, high = Vec::load(x + g * kGroup + kLanes) * factor;
    const Vec units = Vec::broadcast(1 << kFineHalvings);
    store_group((low - round_to_integer(low)) * units, (high - round_to_integer(high)) * units, start, *fine);
    fine->index = static_cast<int32_t>(g);
    ++fine;
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
