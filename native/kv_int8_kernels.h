// Keys and values of 8 bits, as AMX and AVX-512 keep them: in the order of B tiles, which is that of VNNI
// too, with a scale for each token.
//
//   K: int8 [head_dim / 4][16 tokens][4 dimensions], V: int8 [head_dim / 16][4][16 dimensions][4 tokens],
//   scales of K: bf16 [16], scales of V: bf16 [16]
//
// A few dimensions of keys are far larger than the rest, whose bits a common scale would waste. A Hadamard
// rotation (as in QuaRot, Ashkboos et al., 2024) spreads them over all dimensions; queries are rotated too,
// which leaves their products with keys as they were, times the size of the rotation.
#pragma once

#include <cstddef>

#include "vec.h"

#if defined(__AVX512VNNI__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Entries that are rotated together: 16 times the largest power of two that divides head_dim / 16.
SHOAL_INLINE int64_t rotation_size(int64_t head_dim) { return head_dim & -head_dim; }

// The sums and differences of lanes that lie `kDistance` apart.
template <int kDistance>
SHOAL_INLINE Vec add_and_subtract_lanes(Vec x) {
  constexpr int kSwapNext = 0xb1, kSwapPairs = 0x4e;  // of four
  __m512 swapped;
  if constexpr (kDistance == 1) swapped = _mm512_permute_ps(x.v, kSwapNext);
  if constexpr (kDistance == 2) swapped = _mm512_permute_ps(x.v, kSwapPairs);
  if constexpr (kDistance == 4) swapped = _mm512_shuffle_f32x4(x.v, x.v, kSwapNext);
  if constexpr (kDistance == 8) swapped = _mm512_shuffle_f32x4(x.v, x.v, kSwapPairs);
  constexpr __mmask16 kUpper = kDistance == 1   ? 0xaaaa
                               : kDistance == 2 ? 0xcccc
                               : kDistance == 4 ? 0xf0f0
                                                : 0xff00;
  const __m512 sum = _mm512_add_ps(swapped, x.v);
  return {_mm512_mask_sub_ps(sum, kUpper, swapped, x.v)};
}

// Multiplies `size` entries, 16 to 256, by the Hadamard matrix: entries of 1 and -1.
SHOAL_INLINE void rotate_part(float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec lanes = add_and_subtract_lanes<1>(Vec::load(x + i));
    lanes = add_and_subtract_lanes<2>(lanes);
    lanes = add_and_subtract_lanes<4>(lanes);
    add_and_subtract_lanes<8>(lanes).store(x + i);
  }
  for (int64_t distance = kLanes; distance < size; distance *= 2) {
    for (int64_t begin = 0; begin < size; begin += 2 * distance) {
      for (int64_t i = begin; i < begin + distance; i += kLanes) {
        const Vec a = Vec::load(x + i), b = Vec::load(x + i + distance);
        (a + b).store(x + i);
        (a - b).store(x + i + distance);
      }
    }
  }
}

// Rotates n entries, whole heads, in place.
inline void rotate(float* x, int64_t n, int64_t head_dim) {
  const int64_t size = rotation_size(head_dim);
  for (int64_t i = 0; i < n; i += size) rotate_part(x + i, size);
}

inline constexpr int64_t kMaxHead = 256;  // dimensions
inline constexpr float kLargestQuant = 127.0f;
inline constexpr float kLeastScale = 0x1p-100f;  // of less than that, all quants are zero

// The largest magnitude of a head, or NaN if not all are finite.
SHOAL_INLINE float largest_magnitude(const float* x, int64_t head_dim) {
  __m512i bits = _mm512_setzero_si512();
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    bits = _mm512_max_epu32(bits, _mm512_castps_si512(abs(Vec::load(x + d)).v));
  }
  const uint32_t largest = _mm512_reduce_max_epu32(bits);
  return largest < 0x7f800000u ? bits_to_float(largest) : __builtin_nanf("");
}

// out = x / scale in the nearest integers, at most 127; anything if the scale is NaN.
SHOAL_INLINE void quantize(const float* x, int64_t head_dim, float scale, int8_t* out) {
  const Vec factor = Vec::broadcast(scale > kLeastScale ? 1.0f / scale : 0.0f);
  for (int64_t d = 0; d < head_dim; d += kLanes) (Vec::load(x + d) * factor).store_int8(out + d);
}

// The same by the least bf16 that will do, whose bits it returns.
SHOAL_INLINE uint16_t quantize_by_bf16(const float* x, int64_t head_dim, int8_t* out) {
  const float largest = largest_magnitude(x, head_dim);
  const bool is_finite = largest == largest;
  const uint32_t bits = is_finite ? float_to_bits(largest / kLargestQuant) + 0xffffu : 0x7fc00000u;
  quantize(x, head_dim, bits_to_float(bits & 0xffff0000u), out);
  return static_cast<uint16_t>(bits >> 16);
}

inline void write_kv_int8(const float* k, const float* v, uint16_t* block, int64_t offset,
                          int64_t head_dim) {
  alignas(64) float rotated[kMaxHead];
  alignas(64) int8_t quants[kMaxHead];
  auto* const keys = reinterpret_cast<uint8_t*>(block);
  uint8_t* const values = keys + kLanes * head_dim;
  uint16_t* const scales = block + kLanes * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) Vec::load(k + d).store(rotated + d);
  rotate(rotated, head_dim, head_dim);
  scales[offset] = quantize_by_bf16(rotated, head_dim, quants);
  for (int64_t d = 0; d < head_dim; d += 4) {
    __builtin_memcpy(keys + d * kLanes + 4 * offset, quants + d, 4);
  }
  scales[kLanes + offset] = quantize_by_bf16(v, head_dim, quants);
  const __mmask64 token = 0x1111111111111111u << (offset % 4);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const __m128i dims = _mm_load_si128(reinterpret_cast<const __m128i*>(quants + d));
    const __m512i four_times =
        _mm512_mullo_epi32(_mm512_cvtepu8_epi32(dims), _mm512_set1_epi32(0x01010101));
    _mm512_mask_storeu_epi8(values + d * kLanes + offset / 4 * 64, token, four_times);
  }
}

// Replaces each head of n entries by its quants after rotation, head_dim bytes, and their scale.
inline void prepare_queries(float* q, int64_t n, int64_t head_dim) {
  alignas(64) int8_t quants[kMaxHead];
  rotate(q, n, head_dim);
  for (float* head = q; head < q + n; head += head_dim) {
    const float scale = largest_magnitude(head, head_dim) / kLargestQuant;
    quantize(head, head_dim, scale, quants);
    __builtin_memcpy(head, quants, static_cast<std::size_t>(head_dim));
    head[head_dim / 4] = scale < kLeastScale ? kLeastScale : scale;  // NaN stays
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
