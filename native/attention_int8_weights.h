// The weights of one row of attention in int8: from the products of its query with keys to bytes that
// multiply values.
#pragma once

#include "attention_kernels.h"
#include "exp2.h"
#include "kv_int8_kernels.h"

#if defined(__AVX512VNNI__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kDepth = 64;        // terms of a product; also bytes of a line of a B tile

// Lanes of a vector, or all of them.
struct AllLanes {
  static constexpr bool none() { return false; }
  SHOAL_INLINE Vec keep(Vec x, Vec) const { return x; }
};
struct SomeLanes {
  __mmask16 mask;
  bool none() const { return mask == 0; }
  SHOAL_INLINE Vec keep(Vec x, Vec otherwise) const {
    return {_mm512_mask_mov_ps(otherwise.v, mask, x.v)};
  }
};

// The places [first, last) of 64, as bits.
SHOAL_INLINE uint64_t bits_between(int64_t first, int64_t last) {
  const uint64_t above = first > 0 ? ~uint64_t{0} << first : ~uint64_t{0};
  const uint64_t below = last < 64 ? ~(~uint64_t{0} << last) : ~uint64_t{0};
  return above & below;
}

// Of the sum of a row's weights, times the scales of their values: what is rounded is then the same small part
// of an answer whether it rests on one key or on all, and few of the weights pass 255.
inline constexpr float kWeightBits = 12.0f;

// A state's next 16 accumulators, from the sums of both planes: about 2^13 x 127 in magnitude together at most, or
// 2^21 x 127 where the sum of the scaled weights overflows.
SHOAL_INLINE void store_accumulators(__m512i high, __m512i low, float power, float* out) {
  const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  _mm512_storeu_ps(out, _mm512_scalef_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(-power)));
}

// One row and the keys [first, last) of the chunk that it sees: from products to weights.
struct WeightRow {
  float* scores;            // [kChunkTokens]: products, in int32, then scores, then scaled weights
  uint8_t* high;            // [kChunkTokens]: the upper halves of the weights; bytes in the order of V
  uint8_t* low;             // [kChunkTokens]
  const float* key_scales;  // [kChunkTokens]
  const float* value_scales;
  int64_t first, last;

  int64_t first_group() const { return first / kDepth; }
  int64_t end_group() const { return (last + kDepth - 1) / kDepth; }

  // Turns products into scores, capped if `soft_cap` is not 0. Returns the largest that the row sees.
  float score(float factor, float soft_cap) const {
    if (soft_cap > 0.0f) {
      return score([&](Vec x) __attribute__((always_inline)) {
        return cap_scores(x * Vec::broadcast(factor), soft_cap);
      });
    }
    return score([](Vec x) __attribute__((always_inline)) { return x; });
  }
  template <typename Cap>
  SHOAL_INLINE float score(Cap&& cap) const {
    Vec largest[2] = {Vec::broadcast(kMasked), Vec::broadcast(kMasked)};
    for_groups([&](int64_t begin, const auto* seen) __attribute__((always_inline)) {
      for (int block = 0; block < 4; ++block) {
        if (seen[block].none()) continue;
        const int64_t i = begin + block * kLanes;
        const Vec product = {_mm512_cvtepi32_ps(_mm512_loadu_si512(scores + i))};
        const Vec score = cap(product * Vec::load(key_scales + i));
        score.store(scores + i);
        largest[block % 2] = max(largest[block % 2], seen[block].keep(score, Vec::broadcast(kMasked)));
      }
    });
    return reduce_max(max(largest[0], largest[1]));
  }

  struct Sums {
    float weights;  // NaN if a score is
    float scaled;   // times the scales of the values
  };

  // Turns scores into weights exp((score - maximum) * scale), times the scales of the values.
  Sums weigh(float maximum, float scale) const {
    const Vec factor = Vec::broadcast(scale * 1.44269504f), highest = Vec::broadcast(maximum);
    Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()}, scaled_sum = Vec::zero();
    for_groups([&](int64_t begin, const auto* seen) __attribute__((always_inline)) {
      for (int block = 0; block < 4; ++block) {
        if (seen[block].none()) continue;
        const int64_t i = begin + block * kLanes;
        const Vec weight = seen[block].keep(exp2((Vec::load(scores + i) - highest) * factor), Vec::zero());
        const Vec scaled = weight * Vec::load(value_scales + i);
        scaled.store(scores + i);
        sums[block] += weight;
        scaled_sum += scaled;
      }
    });
    return {reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])), reduce_add(scaled_sum)};
  }

  // Rounds the weights, times 2^power, for the groups [begin, end). Returns the places of those above 255:
  // bit 16 g + p for bytes 4 p to 4 p + 3 of group g.
  uint64_t round(float power, int64_t begin, int64_t end) const {
    if (first >= last) {  // then `first` may lie beyond the chunk
      clear(begin, end);
      return 0;
    }
    const Vec factor = {_mm512_scalef_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(power))};
    uint64_t large = 0;
    clear(begin, first_group());
    for_groups([&](int64_t start, const auto* seen) __attribute__((always_inline)) {
      __m512i weights[4];
      for (int block = 0; block < 4; ++block) {
        weights[block] = _mm512_setzero_si512();
        if (seen[block].none()) continue;
        weights[block] = _mm512_cvtps_epi32((Vec::load(scores + start + block * kLanes) * factor).v);
      }
      large |= uint64_t{store_planes(start, weights)} << start / 4;
    });
    clear(end_group(), end);
    return large;
  }

  // Calls step(first key, the lanes of its four blocks that the row sees) for each group.
  template <typename Step>
  SHOAL_INLINE void for_groups(Step&& step) const {
    for (int64_t group = first_group(); group < end_group(); ++group) {
      const int64_t begin = group * kDepth;
      const uint64_t seen = bits_between(first - begin, last - begin);
      if (seen == ~uint64_t{0}) {
        constexpr AllLanes kAll[4] = {};
        step(begin, kAll);
      } else {
        const auto lanes = [&](int block) { return static_cast<__mmask16>(seen >> block * kLanes); };
        const SomeLanes some[4] = {{lanes(0)}, {lanes(1)}, {lanes(2)}, {lanes(3)}};
        step(begin, some);
      }
    }
  }

  // Packing goes by parts of 128 bits: bytes 16 p + 4 b + i are token 4 p + i of block b. What is below
  // zero or NaN becomes zero. Returns which quadruples of bytes are not zero in the upper plane.
  __mmask16 store_planes(int64_t start, const __m512i (&weights)[4]) const {
    const __m512i a = _mm512_packus_epi32(weights[0], weights[1]);
    const __m512i b = _mm512_packus_epi32(weights[2], weights[3]);
    const __m512i byte = _mm512_set1_epi16(0xff);
    _mm512_storeu_si512(low + start, _mm512_packus_epi16(_mm512_and_si512(a, byte),
                                                         _mm512_and_si512(b, byte)));
    const __m512i upper =
        _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    _mm512_storeu_si512(high + start, upper);
    return _mm512_test_epi32_mask(upper, upper);
  }

  void clear(int64_t begin, int64_t end) const {
    for (int64_t group = begin; group < end; ++group) {
      _mm512_storeu_si512(low + group * kDepth, _mm512_setzero_si512());
      _mm512_storeu_si512(high + group * kDepth, _mm512_setzero_si512());
    }
  }
};

// The power of two by which scaled weights of such a sum are multiplied before they are rounded.
SHOAL_INLINE float weight_power(float scaled_sum) {
  const float least = scaled_sum < kLeastScale ? kLeastScale : scaled_sum;
  // Finite for NaN too: then the sum of the row's weights is NaN, or becomes it.
  const __m128 sum = _mm_set_ss(least < __FLT_MAX__ ? least : __FLT_MAX__);
  return kWeightBits - _mm_cvtss_f32(_mm_getexp_ss(sum, sum));
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
