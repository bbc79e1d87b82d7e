// Packed weights to bf16 tiles.
//
// A half keeps five bits of exponent where bf16 has eight. Moving its bits three places to the right is
// therefore a bf16 of 2^-112 times the value; the factor of the activations makes up for it.
#pragma once

#include "linear_kernels.h"
#include "tile_table.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Weights in half precision as bf16 of 2^-112 times their value.
SHOAL_INLINE __m512i cut_to_bf16(__m512h w) {
  const __m512i moved = _mm512_srai_epi16(_mm512_castph_si512(w), 3);
  return _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

// Lanes first, first, first + 1, first + 1, ... of `halves`: what a row of 32 weights needs.
SHOAL_INLINE __m512h twice_from(__m512i halves, int first) {
  // As bytes: a permutation of words takes both vector ports, one of bytes takes one.
  const __m512i pairs = _mm512_set_epi32(
      0x1f1e1f1e, 0x1d1c1d1c, 0x1b1a1b1a, 0x19181918, 0x17161716, 0x15141514, 0x13121312, 0x11101110,
      0x0f0e0f0e, 0x0d0c0d0c, 0x0b0a0b0a, 0x09080908, 0x07060706, 0x05040504, 0x03020302, 0x01000100);
  const __m512i index = _mm512_add_epi8(pairs, _mm512_set1_epi8(static_cast<char>(2 * first)));
  return _mm512_castsi512_ph(_mm512_permutexvar_epi8(index, halves));
}

// Quants of four bits less 8, in half precision, from bits 8 to 11 of each lane: the high bytes are looked up,
// the low ones are zero. The table is there four times, as a permutation looks at six bits.
static_assert(kQuantOfMin == 8);
SHOAL_INLINE __m512h nibbles_less_8(__m512i lanes) {
  const __m512i high_bytes = _mm512_set4_epi32(0x47464544, 0x42403c00, 0xbcc0c2c4, 0xc5c6c7c8);
  return _mm512_castsi512_ph(
      _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, lanes, high_bytes));
}

template <typename F>
inline constexpr int kNumHalves = F::kHalves + (F::kHasMin ? 1 : 0);
template <typename F>
inline constexpr int64_t kPackedTileBytes = packed_tile_bytes(F::kBits, kNumHalves<F>);

// Unpacks one tile of one group: 16 rows of 64 bytes.
template <typename F>
SHOAL_INLINE void unpack_tile(const uint8_t* packed, uint8_t* out) {
  static_assert(F::kHalves == 1 || !F::kHasMin);
  constexpr bool two = kNumHalves<F> == 2;
  const uint8_t* quants = packed + packed_tile_bytes(0, kNumHalves<F>);
  const __m512i halves =
      two ? _mm512_loadu_si512(packed)
          : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
  const __m512h first = twice_from(halves, 0), second = two ? twice_from(halves, 16) : first;
  const __m512h m = second, d[2] = {first, F::kHasMin ? first : second};
  const auto finish = [&](__m512h q, int row) __attribute__((always_inline)) {
    const __m512h scale = d[row / 8];
    const __m512h w = F::kHasMin ? _mm512_fmadd_ph(q, scale, m) : _mm512_mul_ph(q, scale);
    _mm512_store_si512(out + row * 64, cut_to_bf16(w));
  };
  if constexpr (F::kBits == 4) {
    for (int t = 0; t < 4; ++t) {
      // Low bytes as high ones: a load from one byte before instead of a shift. The byte that it takes in
      // from outside is a low one.
      const __m512i lower = _mm512_loadu_si512(quants + t * 64 - 1);
      finish(nibbles_less_8(lower), 4 * t);
      finish(nibbles_less_8(_mm512_srli_epi16(lower, 4)), 4 * t + 1);
      const __m512i upper = _mm512_loadu_si512(quants + t * 64);
      finish(nibbles_less_8(upper), 4 * t + 2);
      finish(nibbles_less_8(_mm512_srli_epi16(upper, 4)), 4 * t + 3);
    }
  } else {
    for (int row = 0; row < 16; ++row) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + row * 32));
      finish(_mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(q)), row);
    }
  }
}

// Bytes of packed weights that are fetched ahead, first into the second-level cache, then into the first as
// what is used once: it is for activations.
inline constexpr int64_t kFetchFar = 8192;
inline constexpr int64_t kFetchNear = 1024;

template <int64_t kBytes>
SHOAL_INLINE void fetch_ahead(const uint8_t* packed) {
#pragma GCC unroll 16
  for (int64_t byte = 0; byte < kBytes; byte += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(packed + byte + kFetchFar), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(packed + byte + kFetchNear), _MM_HINT_NTA);
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
