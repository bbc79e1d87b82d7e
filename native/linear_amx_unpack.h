// Packed weights to bf16 tiles.
//
// A half keeps five bits of exponent where bf16 has eight. Moving its bits three places to the right is
// therefore a bf16 of 2^-112 times the value; the factor of the activations makes up for it.
#pragma once

#include "linear_kernels.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Weights in half precision as bf16 of 2^-112 times their value.
SHOAL_INLINE __m512i cut_to_bf16(__m512h w) {
  const __m512i moved = _mm512_srai_epi16(_mm512_castph_si512(w), 3);
  return _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

// Lanes first, first, first + 1, first + 1, ... of `halves`: what a row of 32 weights needs.
SHOAL_INLINE __m512h twice_from(__m512i halves, int first) {
  const __m512i places = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8,
                                          8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const auto offset = static_cast<int16_t>(first);
  const __m512i index = _mm512_add_epi16(places, _mm512_set1_epi16(offset));
  return _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, halves));
}

// The 16 values of a quant of 4 bits, twice: a permutation looks at five bits of its index.
template <int kZero>
SHOAL_INLINE __m512i nibble_values() {
  const __m512i places = _mm512_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 15,
                                          14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_castph_si512(
      _mm512_cvtepi16_ph(_mm512_sub_epi16(places, _mm512_set1_epi16(kZero))));
}

// Unpacks one tile of one group: 16 rows of 64 bytes.
template <typename F>
SHOAL_INLINE void unpack_tile(const uint8_t* packed, uint8_t* out) {
  constexpr int kQuantBytes = F::kBits == 4 ? 256 : 512;
  static_assert(F::kHalves == 1 || !F::kHasMin);
  const uint8_t* scales = packed + kQuantBytes;
  const bool two = F::kHalves == 2 || F::kHasMin;  // 32 halves, else 16
  const __m512i halves =
      two ? _mm512_loadu_si512(scales)
          : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
  const __m512h first = twice_from(halves, 0), second = two ? twice_from(halves, 16) : first;
  const __m512h m = second, d[2] = {first, F::kHasMin ? first : second};
  const auto finish = [&](__m512h q, int row) __attribute__((always_inline)) {
    const __m512h scale = d[row / 8];
    const __m512h w = F::kHasMin ? _mm512_fmadd_ph(q, scale, m) : _mm512_mul_ph(q, scale);
    _mm512_store_si512(out + row * 64, cut_to_bf16(w));
  };
  if constexpr (F::kBits == 4) {
    const __m512i values = nibble_values<F::kZero>();
    for (int t = 0; t < 4; ++t) {
      const __m512i line = _mm512_loadu_si512(packed + t * 64);
      const auto look_up = [&](__m512i index) __attribute__((always_inline)) {
        return _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, values));
      };
      finish(look_up(line), 4 * t);
      finish(look_up(_mm512_srli_epi16(line, 4)), 4 * t + 1);
      // A lane's high byte as the low one of another lane: a load instead of a shift. The last byte is of
      // the scales, which follow; a permutation ignores the bits that it goes to.
      const __m512i upper = _mm512_loadu_si512(packed + t * 64 + 1);
      finish(look_up(upper), 4 * t + 2);
      finish(look_up(_mm512_srli_epi16(upper, 4)), 4 * t + 3);
    }
  } else {
    for (int row = 0; row < 16; ++row) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + row * 32));
      finish(_mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(q)), row);
    }
  }
}

// Bytes of packed weights that are fetched ahead, first into the second-level cache, then into the first.
inline constexpr int64_t kFetchFar = 8192;
inline constexpr int64_t kFetchNear = 1024;

SHOAL_INLINE void fetch_ahead(const uint8_t* packed, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(packed + byte + kFetchFar), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(packed + byte + kFetchNear), _MM_HINT_T0);
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
