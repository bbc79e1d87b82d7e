// Keys and values as operands of AMX bf16 tiles, and the tile registers of attention.
#pragma once

#include "tile_config.h"
#include "vec.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kTileQueries = 16;    // rows of a tile
inline constexpr int kDepth = 2 * kLanes;  // terms of a product; also bf16 of a line of a B tile
inline constexpr int kTileHalves = kLanes * kDepth;

SHOAL_INLINE __m256i to_bf16(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)); }
SHOAL_INLINE __m512i to_bf16(Vec low, Vec high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

// A block holds, for one KV head, K as [head_dim / 2][16 tokens][2 dimensions] and V as
// [head_dim / 16][8][16 dimensions][2 tokens]: lines of B tiles of 16 columns.
inline void write_kv_tiles(const float* k, const float* v, uint16_t* block, int64_t offset,
                           int64_t head_dim) {
  uint16_t* values = block + kLanes * head_dim + offset / 2 * kDepth;
  const __mmask32 tokens = offset % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    alignas(32) uint32_t pairs[kLanes / 2];
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), to_bf16(Vec::load(k + d)));
    for (int i = 0; i < kLanes / 2; ++i) {
      __builtin_memcpy(block + (d / 2 + i) * kDepth + 2 * offset, &pairs[i], sizeof pairs[i]);
    }
    const __m512i value = _mm512_cvtepu16_epi32(to_bf16(Vec::load(v + d)));
    const __m512i twice = _mm512_or_si512(value, _mm512_slli_epi32(value, 16));
    _mm512_mask_storeu_epi16(values + d * kLanes, tokens, twice);
  }
}

// kRowTiles x kColumns accumulators. a and out have the rows one below the other, the given number of
// bytes apart; b(i) is a B tile for column i; columns are side by side in `out`.
template <int kRowTiles, int kColumns>
struct Accumulators;

template <int kColumns>
struct Accumulators<1, kColumns> {
  static SHOAL_INLINE void clear() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 2) _tile_zero(2);
    if constexpr (kColumns > 3) _tile_zero(3);
  }
  template <typename B>
  static SHOAL_INLINE void add(const uint16_t* a, int64_t a_bytes, B&& b) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b(0), 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b(1), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kColumns > 2) {
      _tile_loadd(6, b(2), 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kColumns > 3) {
      _tile_loadd(7, b(3), 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  static SHOAL_INLINE void store(float* out, int64_t out_bytes) {
    _tile_stored(0, out, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(1, out + kLanes, out_bytes);
    if constexpr (kColumns > 2) _tile_stored(2, out + 2 * kLanes, out_bytes);
    if constexpr (kColumns > 3) _tile_stored(3, out + 3 * kLanes, out_bytes);
  }
};

template <int kColumns>
struct Accumulators<2, kColumns> {
  static SHOAL_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 1) _tile_zero(3);
  }
  template <typename B>
  static SHOAL_INLINE void add(const uint16_t* a, int64_t a_bytes, B&& b) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b(0), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + kTileQueries * a_bytes / 2, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b(1), 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static SHOAL_INLINE void store(float* out, int64_t out_bytes) {
    float* const lower = out + kTileQueries * out_bytes / 4;
    _tile_stored(0, out, out_bytes);
    _tile_stored(2, lower, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(1, out + kLanes, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(3, lower + kLanes, out_bytes);
  }
};

// Calls step.operator()<Accumulators>(i) for the columns [begin, end), as many at once as there are
// accumulators.
template <int kRowTiles, typename Step>
SHOAL_INLINE void for_columns(int64_t begin, int64_t end, Step&& step) {
  constexpr int kMost = 4 / kRowTiles;
  int64_t i = begin;
  for (; i + kMost <= end; i += kMost) step.template operator()<Accumulators<kRowTiles, kMost>>(i);
  if constexpr (kRowTiles == 1) {
    if (end - i == 3) step.template operator()<Accumulators<1, 3>>(i);
    if (end - i == 2) step.template operator()<Accumulators<1, 2>>(i);
  }
  if (end - i == 1) step.template operator()<Accumulators<kRowTiles, 1>>(i);
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
