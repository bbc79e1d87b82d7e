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
  SHOAL_INLINE Vec keep(Vec x, Vec) const { return x; }
};
struct SomeLanes {
  __mmask16 mask;
  SHOAL_INLINE Vec keep(Vec x, Vec otherwise) const {
    return {_mm512_mask_mov_ps(otherwise.v, mask, x.v)};
  }
};

SHOAL_INLINE float scale_by_power(float x, float power) {
  return _mm_cvtss_f32(_mm_scalef_ss(_mm_set_ss(x), _mm_set_ss(power)));
}

// The places [first, last) of 64, as bits.
SHOAL_INLINE uint64_t bits_between(int64_t first, int64_t last) {
  const uint64_t above = first > 0 ? ~uint64_t{0} << first : ~uint64_t{0};
  const uint64_t below = last < 64 ? ~(~uint64_t{0} << last) : ~uint64_t{0};
  return above & below;
}

// A state's next 16 accumulators, from the sums of both planes: at most 65,535 x 127 x 256 in magnitude,
// hence exact in int32 also together.
SHOAL_INLINE void store_accumulators(__m512i high, __m512i low, float power, float* out) {
  const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  _mm512_storeu_ps(out, _mm512_scalef_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(-power)));
}

// One row and the keys [first, last) of the chunk that it sees: from products to weights.
struct WeightRow {
  float* scores;            // [kChunkTokens]: products, in int32, then scores
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
        const int64_t i = begin + block * kLanes;
        const Vec product = {_mm512_cvtepi32_ps(_mm512_loadu_si512(scores + i))};
        const Vec score = cap(product * Vec::load(key_scales + i));
        score.store(scores + i);
        largest[block % 2] = max(largest[block % 2], seen[block].keep(score, Vec::broadcast(kMasked)));
      }
    });
    return reduce_max(max(largest[0], largest[1]));
  }

  // The power of two that brings the largest scaled weight to 15 or 16 bits.
  float power() const {
    Vec largest = Vec::broadcast(kLeastScale);
    for_groups([&](int64_t begin, const auto* seen) __attribute__((always_inline)) {
      for (int block = 0; block < 4; ++block) {
        const Vec scale = Vec::load(value_scales + begin + block * kLanes);
        largest = max(largest, seen[block].keep(scale, Vec::zero()));
      }
    });
    const __m128 scale = _mm_set_ss(reduce_max(largest));
    return 15.0f - _mm_cvtss_f32(_mm_getexp_ss(scale, scale));
  }

  // Writes the weights exp((score - maximum) * scale) * 2^power, times the scales of the values, for the
  // groups [begin, end). Returns the sum of exp(..) * 2^power; NaN if a score is.
  float weigh(float maximum, float scale, float power, int64_t begin, int64_t end) const {
    const Vec factor = Vec::broadcast(scale * 1.44269504f), highest = Vec::broadcast(maximum);
    const Vec powers = Vec::broadcast(power);
    Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    clear(begin, first_group());
    for_groups([&](int64_t start, const auto* seen) __attribute__((always_inline)) {
      __m512i weights[4];
      for (int block = 0; block < 4; ++block) {
        const int64_t i = start + block * kLanes;
        const Vec exponent = fma(Vec::load(scores + i) - highest, factor, powers);
        const Vec weight = seen[block].keep(exp2(exponent), Vec::zero());
        sums[block] += weight;
        weights[block] = _mm512_cvtps_epi32((weight * Vec::load(value_scales + i)).v);
      }
      store_planes(start, weights);
    });
    clear(end_group(), end);
    return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
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
  // zero or NaN becomes zero.
  void store_planes(int64_t start, const __m512i (&weights)[4]) const {
    const __m512i a = _mm512_packus_epi32(weights[0], weights[1]);
    const __m512i b = _mm512_packus_epi32(weights[2], weights[3]);
    const __m512i byte = _mm512_set1_epi16(0xff);
    _mm512_storeu_si512(low + start, _mm512_packus_epi16(_mm512_and_si512(a, byte),
                                                         _mm512_and_si512(b, byte)));
    _mm512_storeu_si512(high + start, _mm512_packus_epi16(_mm512_srli_epi16(a, 8),
                                                          _mm512_srli_epi16(b, 8)));
  }

  void clear(int64_t begin, int64_t end) const {
    for (int64_t group = begin; group < end; ++group) {
      _mm512_storeu_si512(low + group * kDepth, _mm512_setzero_si512());
      _mm512_storeu_si512(high + group * kDepth, _mm512_setzero_si512());
    }
  }
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
