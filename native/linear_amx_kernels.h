// Matrix products on AMX bf16 tiles.
//
// Canonical arithmetic of one output: the weight, d (q - 8) + m where quants have four bits and else
// d (q - zero) + m, is computed in half precision, rounded to nearest even, and cut to bf16; the activation is
// rounded to bf16; the tile unit adds the products of 32 columns at a time to an fp32 sum, groups
// ascending. Inside a group it keeps two sums, of the even and of the odd columns. So a row's result
// is the same however many rows or tiles go together.
#pragma once

#include "linear_amx_stores.h"
#include "linear_amx_unpack.h"
#include "linear_kernels.h"
#include "tile_config.h"
#include "tile_table.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

// Stores the sums of tile register `sums` for the rows from `row` on and tile `c`.
#define SHOAL_STORE_TILE(store, sums, row, c)                              \
  do {                                                                     \
    _tile_stored(sums, (store).place(row, c), (store).stride_bytes(c));    \
    (store).finish(row, c);                                                \
  } while (false)

// A tile of activations; those that stream by leave what is in the first-level cache there.
#define SHOAL_LOAD_ROW_TILE(streams, tile, x, stride) \
  do {                                                \
    if (streams) {                                    \
      _tile_stream_loadd(tile, x, stride);            \
    } else {                                          \
      _tile_loadd(tile, x, stride);                   \
    }                                                 \
  } while (false)

// One or two tiles of rows: their first rows, and where the inputs of these lie.
struct RowTiles {
  int64_t first, second;
  const uint8_t *x0, *x1;
  int64_t stride;  // bytes from row to row
};

// GCC doesn't know that a tile load reads memory: here what was stored to an unpacked tile has been
// stored, and what will be stored has not.
SHOAL_INLINE void order_stores(uint8_t* tile) {
  asm volatile("" : "+m"(*reinterpret_cast<uint8_t (*)[kTileBytes]>(tile)));
}

// Adds the products of group `g` to the sums of one or two row tiles. `w`: a pair of unpacked tiles.
// unpack(c), for c of 0 and 1, may unpack a tile of another group, to the place of tile `c` if it likes: the
// tile unit and the vector units work at the same time only where their instructions lie close together.
template <bool kTwo, typename Unpack>
SHOAL_INLINE void multiply_group(const RowTiles& rows, int64_t g, bool streams, uint8_t* w,
                                 Unpack&& unpack) {
  order_stores(w);
  order_stores(w + kTileBytes);
  _tile_loadd(6, w, 64);
  order_stores(w);
  SHOAL_LOAD_ROW_TILE(streams, 4, rows.x0 + g * 64, rows.stride);
  unpack(0);
  if constexpr (kTwo) SHOAL_LOAD_ROW_TILE(streams, 5, rows.x1 + g * 64, rows.stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTwo) _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, w + kTileBytes, 64);
  order_stores(w + kTileBytes);
  unpack(1);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) _tile_dpbf16ps(3, 5, 7);
}

template <bool kTwo>
SHOAL_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

inline constexpr int kTileFloats = kTileRowsMax * kTile;

template <bool kTwo>
SHOAL_INLINE void load_sums(const float* from) {
  _tile_loadd(0, from, 64);
  _tile_loadd(1, from + kTileFloats, 64);
  if constexpr (kTwo) {
    _tile_loadd(2, from + 2 * kTileFloats, 64);
    _tile_loadd(3, from + 3 * kTileFloats, 64);
  }
}

template <bool kTwo>
SHOAL_INLINE void set_sums_aside(float* to) {
  _tile_stored(0, to, 64);
  _tile_stored(1, to + kTileFloats, 64);
  if constexpr (kTwo) {
    _tile_stored(2, to + 2 * kTileFloats, 64);
    _tile_stored(3, to + 3 * kTileFloats, 64);
  }
}

template <bool kTwo, typename Store>
SHOAL_INLINE void finish_sums(const RowTiles& rows, Store& store) {
  SHOAL_STORE_TILE(store, 0, rows.first, 0);
  SHOAL_STORE_TILE(store, 1, rows.first, 1);
  if constexpr (kTwo) {
    SHOAL_STORE_TILE(store, 2, rows.second, 0);
    SHOAL_STORE_TILE(store, 3, rows.second, 1);
  }
}

// Some groups of a pair of tiles. With many rows they stay unpacked in the first-level cache while all
// rows go by, and the sums are set aside until the last part of their pair.
struct Part {
  int64_t pair, begin, end;
};

// kUnpack: the groups are unpacked on the way, one ahead of its use; else they lie in the scratch.
template <typename F, bool kTwo, bool kUnpack, typename Store>
void multiply_part(const TileArgs& args, const Part& part, const RowTiles& rows, int64_t tile_rows,
                   float* sums, Store& store) {
  constexpr int64_t kPacked = kPackedTileBytes<F>;
  const int64_t size = part.end - part.begin;
  const uint8_t* packed = args.w->pair(part.pair) + 2 * part.begin * kPacked;
  uint8_t* const scratch = args.scratch;
  const auto unpack = [&](int64_t i, int c) __attribute__((always_inline)) {
    if (!kUnpack || i == size) return;
    const uint8_t* tile = packed + (2 * i + c) * kPacked;
    fetch_ahead<kPacked>(tile);
    unpack_tile<F>(tile, scratch + (2 * i + c) * kTileBytes);
  };
  const bool is_last = part.end == args.w->groups();
  if (part.begin == 0) {
    zero_sums<kTwo>();
  } else {
    load_sums<kTwo>(sums);
  }
  unpack(0, 0);
  unpack(0, 1);
  for (int64_t i = 0; i < size; ++i) {
    if (is_last && i < tile_rows) {
      store.fetch(rows.first + i);
      if constexpr (kTwo) store.fetch(rows.second + i);
    }
    multiply_group<kTwo>(rows, part.begin + i, true, scratch + 2 * i * kTileBytes,
                         [&](int c) __attribute__((always_inline)) { unpack(i + 1, c); });
  }
  if (is_last) {
    finish_sums<kTwo>(rows, store);
  } else {
    set_sums_aside<kTwo>(sums);
  }
}

// All row tiles have the same number of rows, so that they share a configuration; the last one begins
// early enough to be whole and computes some rows again.
struct RowDivision {
  explicit RowDivision(const TileArgs& a)
      : args(a),
        rows(args.row_end - args.row_begin),
        tiles((rows + kTileRowsMax - 1) / kTileRowsMax),
        tile_rows((rows + tiles - 1) / tiles) {}

  int64_t first_row(int64_t tile) const {
    const int64_t row = tile * tile_rows;
    return args.row_begin + (row < rows - tile_rows ? row : rows - tile_rows);
  }
  // The one that begins at `tile`, and the next if it exists.
  RowTiles row_tiles(int64_t tile) const {
    const int64_t first = first_row(tile), second = first_row(tile + 1 < tiles ? tile + 1 : tile);
    const auto x = [&](int64_t row) {
      return reinterpret_cast<const uint8_t*>(args.x + row * args.x_stride);
    };
    return {first, second, x(first), x(second), args.x_stride * 2};
  }

  const TileArgs& args;
  int64_t rows, tiles, tile_rows;
};

template <typename F, typename MakeStore>
void multiply_many(const TileArgs& args, const RowDivision& division, MakeStore&& make_store) {
  const int64_t groups = args.w->groups();
  const int64_t parts = (groups + kGroupsInCache - 1) / kGroupsInCache;
  const int64_t tile_rows = division.tile_rows;
  for (int64_t pair = args.pair_begin; pair < args.pair_end; ++pair) {
    auto store = make_store(pair, tile_rows);
    for (int64_t n = 0; n < parts; ++n) {
      const Part part{pair, n * groups / parts, (n + 1) * groups / parts};
      float* sums = tile_sums(args.scratch);
      multiply_part<F, true, true>(args, part, division.row_tiles(0), tile_rows, sums, store);
      for (int64_t tile = 2; tile < division.tiles; tile += 2) {
        const RowTiles rows = division.row_tiles(tile);
        sums += 4 * kTileFloats;
        if (tile + 1 < division.tiles) {
          multiply_part<F, true, false>(args, part, rows, tile_rows, sums, store);
        } else {
          multiply_part<F, false, false>(args, part, rows, tile_rows, sums, store);
        }
      }
    }
  }
}

// Of activations, in the first-level cache; beside them are weights and what is written.
inline constexpr int64_t kStayingBytes = 24 * 1024;

// One or two tiles of rows: groups are unpacked on the way, one ahead of its use, across pairs. All go to one
// place: a tile is stored as soon as the one before it has been loaded.
template <typename F, bool kTwo, typename MakeStore>
void multiply_few(const TileArgs& args, const RowDivision& division, MakeStore&& make_store) {
  constexpr int64_t kPacked = kPackedTileBytes<F>;
  // Groups whose activations stay in the first-level cache from pair to pair.
  const int64_t staying = kStayingBytes / (64 * division.tile_rows * (kTwo ? 2 : 1));
  const int64_t groups = args.w->groups();
  const uint8_t* packed = args.w->pair(args.pair_begin);
  uint8_t* const scratch = args.scratch;
  const int64_t end = (args.pair_end - args.pair_begin) * groups;  // groups are counted through all pairs
  const RowTiles rows = division.row_tiles(0);
  const auto unpack = [&](int64_t n, int c) __attribute__((always_inline)) {
    if (n == end) return;
    const uint8_t* tile = packed + (2 * n + c) * kPacked;
    fetch_ahead<kPacked>(tile);
    unpack_tile<F>(tile, scratch + c * kTileBytes);
  };
  int64_t n = 0;
  unpack(n, 0);
  unpack(n, 1);
  for (int64_t pair = args.pair_begin; pair < args.pair_end; ++pair) {
    auto store = make_store(pair, division.tile_rows);
    zero_sums<kTwo>();
    for (int64_t g = 0; g < groups; ++g, ++n) {
      if (kTwo && g < division.tile_rows) {
        store.fetch(rows.first + g);
        store.fetch(rows.second + g);
      }
      multiply_group<kTwo>(rows, g, g >= staying, scratch,
                           [&](int c) __attribute__((always_inline)) { unpack(n + 1, c); });
    }
    finish_sums<kTwo>(rows, store);
  }
}

// make_store(pair, rows of a tile) makes what takes the sums of a pair.
template <typename F, typename MakeStore>
SHOAL_INLINE void multiply_pairs(const TileArgs& args, MakeStore&& make_store) {
  if (args.pair_begin == args.pair_end) return;
  const RowDivision division(args);
  TileConfig(division.tile_rows).load();
  if (division.tiles == 1) {
    multiply_few<F, false>(args, division, make_store);
  } else if (division.tiles == 2) {
    multiply_few<F, true>(args, division, make_store);
  } else {
    multiply_many<F>(args, division, make_store);
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
