// Vec: sixteen float lanes, the unit of all fp32 arithmetic of the kernels.
//
// Every instruction set implements the same operations on the same sixteen lanes, with one rounding
// for a fused multiply-add and a fixed tree for the sum over lanes, so that a kernel written once on
// Vec gives the same bits everywhere. A file that includes this is compiled once for each set; all of
// it lies in a namespace of its own so that the linker never mixes code of different sets.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#define SHOAL_ISA_NAMESPACE isa_amx
#elif defined(__AVX512F__)
#include <immintrin.h>
#define SHOAL_ISA_NAMESPACE isa_avx512
#elif defined(__AVX2__)
#include <immintrin.h>
#define SHOAL_ISA_NAMESPACE isa_avx2
#else
#define SHOAL_ISA_NAMESPACE isa_portable
#endif

#define SHOAL_INLINE inline __attribute__((always_inline))

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kLanes = 16;

SHOAL_INLINE float bits_to_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
SHOAL_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

#if defined(__AVX512F__)

struct Vec {
  __m512 v;

  static SHOAL_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
  static SHOAL_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static SHOAL_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static SHOAL_INLINE Vec load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static SHOAL_INLINE Vec load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  SHOAL_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  SHOAL_INLINE void store_half(uint16_t* p) const {  // rounds to nearest, ties to even
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Rounds to the nearest integer (ties to even) and stores it as int8; |lane| <= 127.
  SHOAL_INLINE void store_int8(int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
};

SHOAL_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
SHOAL_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
SHOAL_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
SHOAL_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
SHOAL_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a*b + c
SHOAL_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // a > b ? a : b
SHOAL_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // a < b ? a : b
SHOAL_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
// Lanes of `a` where `x >= limit`, zero elsewhere.
SHOAL_INLINE Vec keep_if_ge(Vec x, Vec limit, Vec a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), a.v)};
}
// p * 2^n, n the integer in the low bits of `biased` (see exp below).
SHOAL_INLINE Vec scale_by_power(Vec p, Vec biased) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v),
                                               _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23)))};
}
// Lanes i and i+8, then i and i+4, i and i+2, i and i+1.
SHOAL_INLINE float reduce_add(Vec a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
SHOAL_INLINE float reduce_max(Vec a) {
  const __m256 s8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;

  static SHOAL_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static SHOAL_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static SHOAL_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static SHOAL_INLINE Vec load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  static SHOAL_INLINE Vec load_bf16(const uint16_t* p) {
    const auto widen = [](const uint16_t* q) __attribute__((always_inline)) {
      const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    };
    return {widen(p), widen(p + 8)};
  }
  SHOAL_INLINE void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  SHOAL_INLINE void store_half(uint16_t* p) const {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, kNearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(hi, kNearest));
  }
  SHOAL_INLINE void store_int8(int8_t* p) const {
    const __m256i a = _mm256_cvtps_epi32(lo), b = _mm256_cvtps_epi32(hi);
    const __m128i a16 = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i b16 = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(a16, b16));
  }
};

SHOAL_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SHOAL_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SHOAL_INLINE Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
SHOAL_INLINE Vec keep_if_ge(Vec x, Vec limit, Vec a) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_GE_OQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_GE_OQ), a.hi)};
}
SHOAL_INLINE Vec scale_by_power(Vec p, Vec biased) {
  const auto scale = [](__m256 x, __m256 b) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(b), 23)));
  };
  return {scale(p.lo, biased.lo), scale(p.hi, biased.hi)};
}
SHOAL_INLINE float reduce_add(Vec a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
SHOAL_INLINE float reduce_max(Vec a) {
  const __m256 s8 = _mm256_max_ps(a.lo, a.hi);
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}

#else

float half_to_float(uint16_t h);
uint16_t float_to_half(float x);
float bits_to_float(uint32_t bits);
uint32_t float_to_bits(float x);

struct Vec {
  float lane[kLanes];

  template <typename F>
  static SHOAL_INLINE Vec each(F&& f) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
    return r;
  }
  static SHOAL_INLINE Vec zero() { return broadcast(0.0f); }
  static SHOAL_INLINE Vec broadcast(float x) { return each([&](int) { return x; }); }
  static SHOAL_INLINE Vec load(const float* p) { return each([&](int i) { return p[i]; }); }
  static SHOAL_INLINE Vec load_half(const uint16_t* p) { return each([&](int i) { return half_to_float(p[i]); }); }
  static SHOAL_INLINE Vec load_bf16(const uint16_t* p) {
    return each([&](int i) { return bits_to_float(static_cast<uint32_t>(p[i]) << 16); });
  }
  SHOAL_INLINE void store(float* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = lane[i];
  }
  SHOAL_INLINE void store_half(uint16_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(lane[i]);
  }
  SHOAL_INLINE void store_int8(int8_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(__builtin_rintf(lane[i]));
  }
};

SHOAL_INLINE Vec operator+(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] + b.lane[i]; }); }
SHOAL_INLINE Vec operator-(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] - b.lane[i]; }); }
SHOAL_INLINE Vec operator*(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] * b.lane[i]; }); }
SHOAL_INLINE Vec operator/(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] / b.lane[i]; }); }
SHOAL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return Vec::each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
SHOAL_INLINE Vec max(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
SHOAL_INLINE Vec min(Vec a, Vec b) { return Vec::each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
SHOAL_INLINE Vec abs(Vec a) { return Vec::each([&](int i) { return __builtin_fabsf(a.lane[i]); }); }
SHOAL_INLINE Vec keep_if_ge(Vec x, Vec limit, Vec a) {
  return Vec::each([&](int i) { return x.lane[i] >= limit.lane[i] ? a.lane[i] : 0.0f; });
}
SHOAL_INLINE Vec scale_by_power(Vec p, Vec biased) {
  return Vec::each([&](int i) { return bits_to_float(float_to_bits(p.lane[i]) + (float_to_bits(biased.lane[i]) << 23)); });
}
SHOAL_INLINE float reduce_add(Vec a) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] + a.lane[i + width];
  }
  return a.lane[0];
}
SHOAL_INLINE float reduce_max(Vec a) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] > a.lane[i + width] ? a.lane[i] : a.lane[i + width];
  }
  return a.lane[0];
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 0x1f;
  const uint32_t mantissa = h & 0x3ff;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                       // below 2^-14: a multiple of 2^-24
    const float scaled = __builtin_rintf(bits_to_float(magnitude) * 0x1p24f);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(scaled));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

#endif

SHOAL_INLINE Vec& operator+=(Vec& a, Vec b) { return a = a + b; }

// e^x to about 1 ulp for x <= 88; zero for x < -87 (so that a masked score of -inf weighs nothing).
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Cephes); then scaled by 2^n.
SHOAL_INLINE Vec exp(Vec x) {
  const Vec lowest = Vec::broadcast(-87.0f);
  const Vec clamped = min(max(x, lowest), Vec::broadcast(88.0f));
  const Vec shift = Vec::broadcast(0x1.8p23f);  // adding it rounds to an integer in the low bits
  const Vec biased = fma(clamped, Vec::broadcast(1.44269504f), shift);
  const Vec n = biased - shift;
  Vec r = fma(n, Vec::broadcast(-0.693359375f), clamped);
  r = fma(n, Vec::broadcast(2.12194440e-4f), r);
  Vec p = Vec::broadcast(1.9875691500e-4f);
  p = fma(p, r, Vec::broadcast(1.3981999507e-3f));
  p = fma(p, r, Vec::broadcast(8.3334519073e-3f));
  p = fma(p, r, Vec::broadcast(4.1665795894e-2f));
  p = fma(p, r, Vec::broadcast(1.6666665459e-1f));
  p = fma(p, r, Vec::broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + Vec::broadcast(1.0f);
  return keep_if_ge(x, lowest, scale_by_power(p, biased));
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE
