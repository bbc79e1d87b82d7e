// Int: sixteen int32 lanes. Words: sixteen pairs of int16. Their products, which add to Int.
//
// Integer sums are exact, so that every instruction set gives the same lanes whatever its own order.
#pragma once

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Arithmetic on Words is modulo 2^16, shifts to the right keep the sign unless they say otherwise.
#if defined(__AVX512F__)

struct Words {
  __m512i v;
  static SHOAL_INLINE Words broadcast(int16_t x) { return {_mm512_set1_epi16(x)}; }
  static SHOAL_INLINE Words load(const void* p) { return {_mm512_loadu_si512(p)}; }
  // Each of sixteen int16 twice.
  static SHOAL_INLINE Words load_pairs(const int16_t* p) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16))};
  }
  SHOAL_INLINE void store(int16_t* p) const { _mm512_storeu_si512(p, v); }
};
template <int kBits>
SHOAL_INLINE Words shift_left(Words a) { return {_mm512_slli_epi16(a.v, kBits)}; }
template <int kBits>
SHOAL_INLINE Words shift_right(Words a) { return {_mm512_srai_epi16(a.v, kBits)}; }
template <int kBits>
SHOAL_INLINE Words shift_right_unsigned(Words a) { return {_mm512_srli_epi16(a.v, kBits)}; }
SHOAL_INLINE Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
SHOAL_INLINE Words operator+(Words a, Words b) { return {_mm512_add_epi16(a.v, b.v)}; }
SHOAL_INLINE Words operator*(Words a, Words b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
// (a * b + 2^14) / 2^15, rounded down.
SHOAL_INLINE Words multiply_high(Words a, Words b) { return {_mm512_mulhrs_epi16(a.v, b.v)}; }

struct Int {
  __m512i v;
  static SHOAL_INLINE Int zero() { return {_mm512_setzero_si512()}; }
  SHOAL_INLINE Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};
// acc[i] += w[2i] * x[0] + w[2i + 1] * x[1].
SHOAL_INLINE Int dot2(Int acc, Words w, const int16_t* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(pair))};
}

#elif defined(__AVX2__)

struct Words {
  __m256i lo, hi;
  static SHOAL_INLINE Words broadcast(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
  static SHOAL_INLINE Words load(const void* p) {
    const auto* from = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
  }
  static SHOAL_INLINE Words load_pairs(const int16_t* p) {
    const auto twice = [](const int16_t* q) __attribute__((always_inline)) {
      const __m256i wide =
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
      return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
    };
    return {twice(p), twice(p + 8)};
  }
  SHOAL_INLINE void store(int16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), hi);
  }
};
template <int kBits>
SHOAL_INLINE Words shift_left(Words a) {
  return {_mm256_slli_epi16(a.lo, kBits), _mm256_slli_epi16(a.hi, kBits)};
}
template <int kBits>
SHOAL_INLINE Words shift_right(Words a) {
  return {_mm256_srai_epi16(a.lo, kBits), _mm256_srai_epi16(a.hi, kBits)};
}
template <int kBits>
SHOAL_INLINE Words shift_right_unsigned(Words a) {
  return {_mm256_srli_epi16(a.lo, kBits), _mm256_srli_epi16(a.hi, kBits)};
}
SHOAL_INLINE Words operator&(Words a, Words b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
SHOAL_INLINE Words operator+(Words a, Words b) {
  return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
}
SHOAL_INLINE Words operator*(Words a, Words b) {
  return {_mm256_mullo_epi16(a.lo, b.lo), _mm256_mullo_epi16(a.hi, b.hi)};
}
SHOAL_INLINE Words multiply_high(Words a, Words b) {
  return {_mm256_mulhrs_epi16(a.lo, b.lo), _mm256_mulhrs_epi16(a.hi, b.hi)};
}

struct Int {
  __m256i lo, hi;
  static SHOAL_INLINE Int zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  SHOAL_INLINE Vec to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};
SHOAL_INLINE Int dot2(Int acc, Words w, const int16_t* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  const __m256i xs = _mm256_set1_epi32(pair);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, xs)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, xs))};
}

#else

struct Words {
  int16_t w[2 * kLanes];
  template <typename F>
  static SHOAL_INLINE Words each(F&& f) {
    Words r;
    for (int i = 0; i < 2 * kLanes; ++i) r.w[i] = static_cast<int16_t>(f(i));
    return r;
  }
  static SHOAL_INLINE Words broadcast(int16_t x) { return each([&](int) { return x; }); }
  static SHOAL_INLINE Words load(const void* p) {
    Words r;
    __builtin_memcpy(r.w, p, sizeof r.w);
    return r;
  }
  static SHOAL_INLINE Words load_pairs(const int16_t* p) { return each([&](int i) { return p[i / 2]; }); }
  SHOAL_INLINE void store(int16_t* p) const { __builtin_memcpy(p, w, sizeof w); }
};
template <int kBits>
SHOAL_INLINE Words shift_left(Words a) { return Words::each([&](int i) { return a.w[i] * (1 << kBits); }); }
template <int kBits>
SHOAL_INLINE Words shift_right(Words a) { return Words::each([&](int i) { return a.w[i] >> kBits; }); }
template <int kBits>
SHOAL_INLINE Words shift_right_unsigned(Words a) {
  return Words::each([&](int i) { return static_cast<uint16_t>(a.w[i]) >> kBits; });
}
SHOAL_INLINE Words operator&(Words a, Words b) { return Words::each([&](int i) { return a.w[i] & b.w[i]; }); }
SHOAL_INLINE Words operator+(Words a, Words b) { return Words::each([&](int i) { return a.w[i] + b.w[i]; }); }
SHOAL_INLINE Words operator*(Words a, Words b) { return Words::each([&](int i) { return a.w[i] * b.w[i]; }); }
SHOAL_INLINE Words multiply_high(Words a, Words b) {
  return Words::each([&](int i) { return (a.w[i] * b.w[i] + (1 << 14)) >> 15; });
}

struct Int {
  int32_t lane[kLanes];
  static SHOAL_INLINE Int zero() { return {}; }
  SHOAL_INLINE Vec to_float() const {
    return Vec::each([this](int i) { return static_cast<float>(lane[i]); });
  }
};
SHOAL_INLINE Int dot2(Int acc, const Words& w, const int16_t* x) {
  for (int i = 0; i < kLanes; ++i) acc.lane[i] += w.w[2 * i] * x[0] + w.w[2 * i + 1] * x[1];
  return acc;
}

#endif

}  // namespace shoal::SHOAL_ISA_NAMESPACE
