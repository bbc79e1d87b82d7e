// Matrix products on AMX bf16 tiles.
//
// Canonical arithmetic of one output: the weight d (q - zero) + m is computed in half precision, rounded to
// nearest even, and cut to bf16; the activation is rounded to bf16; the tile unit adds the products of 32
// columns at a time to an fp32 sum, groups ascending. Inside a group it keeps two sums, of the even
// and of the odd columns. So a row's result is the same however many rows or tiles go together.
//
// A half keeps five bits of exponent where bf16 has eight. Moving its bits three places to the right is
// therefore a bf16 of 2^-112 times the value; the factor of the activations makes up for it.
#pragma once

#include "exp2.h"
#include "linear_kernels.h"
#include "tile_config.h"
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
      // The low bytes of these lanes are the high ones of those: a load instead of a shift.
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

// Where the sums of a pair of tiles go: to the rows of y. A tile that is not full goes by a buffer.
class TileStore {
 public:
  TileStore(const TileArgs& args, int64_t pair, int64_t tile_rows)
      : args_(args), column_(pair * 2 * kTile), tile_rows_(tile_rows) {}

  // Where tile `c` of the pair goes for the rows from `row` on.
  float* place(int64_t row, int c) {
    return is_whole(c) ? args_.y + row * args_.y_stride + column_ + c * kTile : partial_;
  }
  // Fetches what will be written of a row; what is not fetched in time, a store waits for.
  void fetch(int64_t row) const {
    const float* y = args_.y + row * args_.y_stride + column_;
    __builtin_prefetch(y, 1);
    __builtin_prefetch(y + kTile, 1);
  }
  int64_t stride_bytes(int c) const {
    return is_whole(c) ? args_.y_stride * static_cast<int64_t>(sizeof(float)) : 64;
  }
  void finish(int64_t row, int c) {
    if (is_whole(c)) return;
    const int64_t columns = args_.w->outputs - column_ - c * kTile;
    for (int64_t r = 0; r < tile_rows_; ++r) {
      float* y = args_.y + (row + r) * args_.y_stride + column_ + c * kTile;
      for (int64_t i = 0; i < columns; ++i) y[i] = partial_[r * kTile + i];
    }
  }

 private:
  bool is_whole(int c) const { return column_ + (c + 1) * kTile <= args_.w->outputs; }

  const TileArgs& args_;
  int64_t column_, tile_rows_;
  alignas(64) float partial_[kTileRowsMax * kTile];
};

// x / (1 + exp(-x)) with a relative error of 1.4e-4, for a result that is rounded to bf16; zero below -88.
SHOAL_INLINE Vec silu(Vec x) {
  const Vec one_more = Vec::broadcast(1.0f) + exp2(x * Vec::broadcast(-1.44269504f));
  return x * Vec{_mm512_rcp14_ps(one_more.v)};
}

// Where the sums of a pair of tiles of a gated matrix go: gated and rounded, to the input of the next layer.
class GatedStore {
 public:
  GatedStore(const GatedOutput& out, int64_t pair, int64_t tile_rows)
      : out_(out), column_(pair * kTile), tile_rows_(tile_rows) {}

  float* place(int64_t, int c) { return sums_[c]; }
  void fetch(int64_t row) const { __builtin_prefetch(out_.x + row * out_.stride + column_, 1); }
  int64_t stride_bytes(int) const { return 64; }
  void finish(int64_t row, int c) {
    if (c == 0) return;
    for (int64_t r = 0; r < tile_rows_; ++r) {
      // The factor last: it is large, and a gate may be zero for what it would make infinite.
      const Vec gated = silu(Vec::load(sums_[0] + r * kTile)) * Vec::load(sums_[1] + r * kTile);
      const __m256bh rounded = _mm512_cvtneps_pbh((gated * Vec::broadcast(out_.factor)).v);
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(out_.x + (row + r) * out_.stride + column_),
          reinterpret_cast<const __m256i&>(rounded));
    }
  }

 private:
  GatedOutput out_;
  int64_t column_, tile_rows_;
  alignas(64) float sums_[2][kTileRowsMax * kTile];
};

// Stores the sums of tile register `sums` for the rows from `row` on and tile `c`.
#define SHOAL_STORE_TILE(store, sums, row, c)                              \
  do {                                                                     \
    _tile_stored(sums, (store).place(row, c), (store).stride_bytes(c));    \
    (store).finish(row, c);                                                \
  } while (false)

// With many rows the activations stream by while a part of the weights stays in the first-level cache.
#define SHOAL_LOAD_ROW_TILE(many, tile, x, stride) \
  do {                                             \
    if constexpr (many) {                          \
      _tile_stream_loadd(tile, x, stride);         \
    } else {                                       \
      _tile_loadd(tile, x, stride);                \
    }                                              \
  } while (false)

// Adds the products of one group to the sums of one or two row tiles. `w`: a pair of unpacked tiles.
// unpack(c) unpacks tile c of a pair for a later group: the tile unit and the vector units work at the
// same time where their instructions lie close together.
template <bool kTwo, bool kMany, typename Unpack>
SHOAL_INLINE void multiply_group(const uint8_t* x0, const uint8_t* x1, int64_t stride,
                                 const uint8_t* w, Unpack&& unpack) {
  _tile_loadd(6, w, 64);
  SHOAL_LOAD_ROW_TILE(kMany, 4, x0, stride);
  unpack(0);
  if constexpr (kTwo) SHOAL_LOAD_ROW_TILE(kMany, 5, x1, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTwo) _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, w + kTileBytes, 64);
  unpack(1);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) _tile_dpbf16ps(3, 5, 7);
}

// Groups whose products are added up before the next row tiles have their turn.
struct Groups {
  int64_t begin, end, all;
};

// Multiplies the row tiles that begin at the rows `first` and `second` with groups of a pair of tiles.
// kUnpack: the groups are unpacked on the way, one ahead of its use; else all of them lie in the scratch.
// kMany: they stay there for other row tiles, and so do the sums, in `sums`, until their last groups.
template <typename F, bool kTwo, bool kUnpack, bool kMany, typename Store>
void multiply_row_tiles(const TileArgs& args, int64_t pair, Store& store, int64_t first,
                        int64_t second, int64_t tile_rows, const Groups& groups, float* sums) {
  constexpr int64_t kFewPlaces = 2;
  constexpr int kSums = kTileRowsMax * kTile;
  const int64_t tile_bytes = args.w->tile_bytes, stride = args.x_stride * 2;
  const uint8_t* packed = args.w->pair(pair);
  const auto* x0 = reinterpret_cast<const uint8_t*>(args.x + first * args.x_stride);
  const auto* x1 = reinterpret_cast<const uint8_t*>(args.x + second * args.x_stride);
  const auto unpacked = [&](int64_t g) __attribute__((always_inline)) {
    return args.scratch + (kMany ? g - groups.begin : g % kFewPlaces) * 2 * kTileBytes;
  };
  const auto unpack_tile_of = [&](int64_t g, int c) __attribute__((always_inline)) {
    const uint8_t* tile = packed + (2 * g + c) * tile_bytes;
    fetch_ahead(tile, tile_bytes);
    unpack_tile<F>(tile, unpacked(g) + c * kTileBytes);
  };
  const bool is_last = groups.end == groups.all;
  if (kMany && groups.begin > 0) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kSums, 64);
    if constexpr (kTwo) {
      _tile_loadd(2, sums + 2 * kSums, 64);
      _tile_loadd(3, sums + 3 * kSums, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  if constexpr (kUnpack) {
    unpack_tile_of(groups.begin, 0);
    unpack_tile_of(groups.begin, 1);
  }
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    if (kMany && is_last) {
      for (int64_t r = g - groups.begin; r < tile_rows; r += groups.end - groups.begin) {
        store.fetch(first + r);
        if constexpr (kTwo) store.fetch(second + r);
      }
    }
    multiply_group<kTwo, kMany>(x0 + g * 64, x1 + g * 64, stride, unpacked(g),
                                [&](int c) __attribute__((always_inline)) {
                                  if (kUnpack && g + 1 < groups.end) unpack_tile_of(g + 1, c);
                                });
  }
  if (kMany && !is_last) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kSums, 64);
    if constexpr (kTwo) {
      _tile_stored(2, sums + 2 * kSums, 64);
      _tile_stored(3, sums + 3 * kSums, 64);
    }
    return;
  }
  SHOAL_STORE_TILE(store, 0, first, 0);
  SHOAL_STORE_TILE(store, 1, first, 1);
  if constexpr (kTwo) {
    SHOAL_STORE_TILE(store, 2, second, 0);
    SHOAL_STORE_TILE(store, 3, second, 1);
  }
}

// All row tiles have the same number of rows, so that they share a configuration; the last one begins
// early enough to be whole and computes some rows again.
// make_store(pair, rows of a tile) makes what takes the sums of a pair.
template <typename F, typename MakeStore>
SHOAL_INLINE void multiply_pairs(const TileArgs& args, MakeStore&& make_store) {
  const int64_t rows = args.row_end - args.row_begin;
  const int64_t tiles = (rows + kTileRowsMax - 1) / kTileRowsMax;
  const int64_t tile_rows = (rows + tiles - 1) / tiles;
  const auto first_row = [&](int64_t tile) {
    const int64_t row = tile * tile_rows;
    return args.row_begin + (row < rows - tile_rows ? row : rows - tile_rows);
  };
  const int64_t all = args.w->groups();
  const int64_t parts = (all + kGroupsInCache - 1) / kGroupsInCache;
  float* const sums = tile_sums(args.scratch);
  TileConfig(tile_rows).load();
  for (int64_t pair = args.pair_begin; pair < args.pair_end; ++pair) {
    auto store = make_store(pair, tile_rows);
    const auto multiply = [&]<bool kTwo, bool kUnpack, bool kMany>(int64_t tile, const Groups& groups)
                              __attribute__((always_inline)) {
      multiply_row_tiles<F, kTwo, kUnpack, kMany>(args, pair, store, first_row(tile),
                                                  first_row(tile + (kTwo ? 1 : 0)), tile_rows,
                                                  groups, sums + tile * 2 * kTileRowsMax * kTile);
    };
    if (tiles == 1) {
      multiply.template operator()<false, true, false>(0, {0, all, all});
    } else if (tiles == 2) {
      multiply.template operator()<true, true, false>(0, {0, all, all});
    } else {
      for (int64_t part = 0; part < parts; ++part) {
        const Groups groups{part * all / parts, (part + 1) * all / parts, all};
        multiply.template operator()<true, true, true>(0, groups);
        int64_t tile = 2;
        for (; tile + 2 <= tiles; tile += 2) {
          multiply.template operator()<true, false, true>(tile, groups);
        }
        if (tile < tiles) multiply.template operator()<false, false, true>(tile, groups);
      }
    }
  }
  _tile_release();
}

template <typename F>
void gemm_amx(const TileArgs& args) {
  multiply_pairs<F>(args, [&](int64_t pair, int64_t rows) { return TileStore(args, pair, rows); });
}

template <typename F>
void gated_gemm_amx(const TileArgs& args, const GatedOutput& out) {
  multiply_pairs<F>(args, [&](int64_t pair, int64_t rows) { return GatedStore(out, pair, rows); });
}

inline void round_row(const float* x, int64_t inputs, float factor, uint16_t* out) {
  const __m512 f = _mm512_set1_ps(factor);
  for (int64_t k = 0; k < inputs; k += kGroup) {
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x + k), f);
    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + k + kLanes), f);
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(out + k, reinterpret_cast<const __m512i&>(both));
  }
}

#undef SHOAL_LOAD_ROW_TILE
#undef SHOAL_STORE_TILE

inline constexpr TileKernels kTileKernels = {
    round_row,
    {&gemm_amx<Q4_1>, &gemm_amx<Q4_0>, &gemm_amx<Q8_0>, &gemm_amx<Q4_K>, &gemm_amx<Q5_K>,
     &gemm_amx<Q6_K>},
    {&gated_gemm_amx<Q4_1>, &gated_gemm_amx<Q4_0>, &gated_gemm_amx<Q8_0>, &gated_gemm_amx<Q4_K>,
     &gated_gemm_amx<Q5_K>, &gated_gemm_amx<Q6_K>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
