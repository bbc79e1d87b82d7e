// Int: sixteen int32 lanes, and the dot products of bytes and of int16 that add to them.
//
// Integer sums are exact, so that every instruction set gives the same lanes whatever its own order. What is
// halved is rounded down.
#pragma once

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Bytes: 16 x 4 unsigned bytes, what one multiply-accumulate takes from the weights.
#if defined(__AVX512F__)

using Bytes = __m512i;
struct Int {
  // Not __m512i: GCC 12 would keep what a loop adds up twice, as that and as int32, and run out of registers.
  using Lanes = int32_t __attribute__((vector_size(64)));
  Lanes v;
  static SHOAL_INLINE Int of(__m512i x) { return {Lanes(x)}; }
  static SHOAL_INLINE Int broadcast(int32_t x) { return of(_mm512_set1_epi32(x)); }
  static SHOAL_INLINE Int load(const int16_t* p) { return of(_mm512_loadu_si512(p)); }  // two in a lane
  static SHOAL_INLINE Int load_lower(const int16_t* p) {  // one in a lane, and above it zero
    return of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  SHOAL_INLINE __m512i bits() const { return __m512i(v); }
  SHOAL_INLINE Int halved(int32_t n) const {  // n times
    return of(_mm512_srav_epi32(bits(), _mm512_set1_epi32(n)));
  }
  template <int n>
  SHOAL_INLINE Int halved() const {
    return of(_mm512_srai_epi32(bits(), n));
  }
  SHOAL_INLINE Vec to_float() const { return {_mm512_cvtepi32_ps(bits())}; }
};
SHOAL_INLINE Int operator+(Int a, Int b) { return {a.v + b.v}; }
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
SHOAL_INLINE void store_bytes(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }
SHOAL_INLINE Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(0x0f)); }
SHOAL_INLINE Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
// acc[i] += sum of w[4i + j] * x[j] over the four bytes at x.
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, Bytes w, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  return Int::of(_mm512_dpbusd_epi32(acc.bits(), w, _mm512_set1_epi32(quad)));
}
// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of int16.
SHOAL_INLINE Int dot2(Int acc, Int a, Int b) {
  return Int::of(_mm512_dpwssd_epi32(acc.bits(), a.bits(), b.bits()));
}

#elif defined(__AVX2__)

struct Bytes {
  __m256i lo, hi;
};
struct Int {
  __m256i lo, hi;
  static SHOAL_INLINE Int broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static SHOAL_INLINE Int load(const int16_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
  }
  static SHOAL_INLINE Int load_lower(const int16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  SHOAL_INLINE Int halved(int32_t n) const {
    const __m256i count = _mm256_set1_epi32(n);
    return {_mm256_srav_epi32(lo, count), _mm256_srav_epi32(hi, count)};
  }
  template <int n>
  SHOAL_INLINE Int halved() const {
    return {_mm256_srai_epi32(lo, n), _mm256_srai_epi32(hi, n)};
  }
  SHOAL_INLINE Vec to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};
SHOAL_INLINE Int operator+(Int a, Int b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
SHOAL_INLINE void store_bytes(uint8_t* p, Bytes b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), b.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), b.hi);
}
SHOAL_INLINE __m256i and_bytes(__m256i b, int mask) {
  return _mm256_and_si256(b, _mm256_set1_epi8(static_cast<char>(mask)));
}
SHOAL_INLINE Bytes low_nibbles(Bytes b) { return {and_bytes(b.lo, 0x0f), and_bytes(b.hi, 0x0f)}; }
SHOAL_INLINE Bytes high_nibbles(Bytes b) {
  return {and_bytes(_mm256_srli_epi16(b.lo, 4), 0x0f), and_bytes(_mm256_srli_epi16(b.hi, 4), 0x0f)};
}
// Exact while two products of w and x fit int16: w <= 127.
SHOAL_INLINE __m256i dot4_small(__m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
template <int kBits>
SHOAL_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
  if constexpr (kBits <= 4) return _mm256_add_epi32(acc, dot4_small(w, x));
  // A byte is 128 * its top bit + the rest, so that neither part can saturate.
  const __m256i top = and_bytes(_mm256_srli_epi16(w, 7), 0x01);
  const __m256i rest = dot4_small(and_bytes(w, 0x7f), x);
  return _mm256_add_epi32(acc, _mm256_add_epi32(rest, _mm256_slli_epi32(dot4_small(top, x), 7)));
}
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, Bytes w, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  const __m256i xs = _mm256_set1_epi32(quad);
  return {dot4_half<kBits>(acc.lo, w.lo, xs), dot4_half<kBits>(acc.hi, w.hi, xs)};
}
SHOAL_INLINE Int dot2(Int acc, Int a, Int b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}

#else

struct Bytes {
  uint8_t b[4 * kTile];
};
struct Int {
  int32_t lane[kLanes];
  static SHOAL_INLINE Int broadcast(int32_t x) {
    return each([x](int) { return x; });
  }
  template <typename F>
  static SHOAL_INLINE Int each(F&& f) {
    Int r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
    return r;
  }
  static SHOAL_INLINE Int load(const int16_t* p) {
    Int r;
    __builtin_memcpy(r.lane, p, sizeof r.lane);
    return r;
  }
  static SHOAL_INLINE Int load_lower(const int16_t* p) {
    return each([p](int i) { return p[i] & 0xffff; });
  }
  SHOAL_INLINE Int halved(int32_t n) const {
    return each([this, n](int i) { return lane[i] >> n; });
  }
  template <int n>
  SHOAL_INLINE Int halved() const {
    return halved(n);
  }
  SHOAL_INLINE Vec to_float() const {
    return Vec::each([this](int i) { return static_cast<float>(lane[i]); });
  }
};
SHOAL_INLINE Int operator+(const Int& a, const Int& b) {
  return Int::each([&](int i) { return a.lane[i] + b.lane[i]; });
}
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  __builtin_memcpy(r.b, p, sizeof r.b);
  return r;
}
SHOAL_INLINE void store_bytes(uint8_t* p, const Bytes& w) { __builtin_memcpy(p, w.b, sizeof w.b); }
SHOAL_INLINE Bytes low_nibbles(Bytes w) {
  for (uint8_t& b : w.b) b &= 0x0f;
  return w;
}
SHOAL_INLINE Bytes high_nibbles(Bytes w) {
  for (uint8_t& b : w.b) b >>= 4;
  return w;
}
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, const Bytes& w, const int8_t* x) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) acc.lane[i] += w.b[4 * i + j] * x[j];
  }
  return acc;
}
SHOAL_INLINE Int dot2(Int acc, const Int& a, const Int& b) {
  for (int i = 0; i < kLanes; ++i) {
    const auto lower = static_cast<int16_t>(a.lane[i]) * static_cast<int16_t>(b.lane[i]);
    acc.lane[i] += lower + (a.lane[i] >> 16) * (b.lane[i] >> 16);
  }
  return acc;
}

#endif

}  // namespace shoal::SHOAL_ISA_NAMESPACE
