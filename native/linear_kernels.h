// Matrix products over packed weights, written once on Vec; compiled for each instruction set.
//
// Canonical arithmetic of one output, whatever the kernel: for each group g of 32 columns ascending,
//   acc = fma(float(sum_k (q_w - zero) q_x << shift_x), d_w, acc)   (per half group for Q6_K)
// where shift_x isn't negative; then for each 32 groups of formats with a min, ascending,
//   acc = fma(float(sum_g min_w sum_x), min_unit_w * sum_unit_x, acc)
// then for each group of a negative shift
//   acc = fma(float(sum_k (q_w - zero) q_x), d_w * 2^shift_x, acc)
//   acc = fma(m_w, sum_x * 2^shift_x, acc)
// and y = acc * unit_x, the integer sums being exact. Dense formats: acc = fma(w_k, x_k, acc), k ascending.
#pragma once

#include <limits>

#include "int_lanes.h"
#include "linear_table.h"
#include "quantize_kernels.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Traits of a quantised format; see linear_table.h.
template <int bits, bool has_min, bool half_scales, int halves>
struct Quantized {
  static constexpr int kBits = bits;
  static constexpr bool kHasMin = has_min;
  static constexpr bool kHalfScales = half_scales;
  static constexpr int kHalves = halves;  // scales per group
};
using Q4_1 = Quantized<4, true, true, 1>;
using Q4_0 = Quantized<4, false, true, 1>;
using Q8_0 = Quantized<8, false, true, 1>;
using Q4_K = Quantized<4, true, false, 1>;
using Q5_K = Quantized<8, true, false, 1>;
using Q6_K = Quantized<8, false, false, 2>;

// Rows that share the loads of a tile pair, as many as the registers hold; and the most rows whose blocks
// read the tiles as they are packed each, as unpacking costs a large block little.
#if defined(__AVX512F__)
inline constexpr int kRowBlock = 6;
inline constexpr int64_t kPackedRows = std::numeric_limits<int64_t>::max();
#else
inline constexpr int kRowBlock = 2;
inline constexpr int64_t kPackedRows = 12;
#endif

template <bool kHalf>
SHOAL_INLINE Vec load_scale(const uint8_t* base, int64_t index) {
  if constexpr (kHalf) return Vec::load_half(reinterpret_cast<const uint16_t*>(base) + index * kTile);
  return Vec::load(reinterpret_cast<const float*>(base) + index * kTile);
}

// The mins of a tile.
struct TileMins {
  const uint8_t* mins;
  const float* units;

  TileMins(const PackedMatrix& w, int64_t tile)
      : mins(w.tile(tile) + w.min_offset),
        units(reinterpret_cast<const float*>(w.tile(tile) + w.min_unit_offset)) {}
  SHOAL_INLINE Bytes of_pair(int64_t pair) const { return load_bytes(mins + pair * 64); }
  SHOAL_INLINE Vec unit() const { return Vec::load(units); }
};

// A tile read as it is packed.
template <typename F>
struct PackedTile {
  static constexpr bool kIsPacked = true;
  const uint8_t* quants;
  const uint8_t* scales;
  TileMins mins;

  SHOAL_INLINE PackedTile(const PackedMatrix& w, int64_t tile)
      : quants(w.tile(tile)), scales(quants + w.scale_offset), mins(w, tile) {}
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    if constexpr (F::kBits == 4) {
      const Bytes both = load_bytes(quants + (4 * g + j) * 64);
      *low = low_nibbles(both);
      *high = high_nibbles(both);
    } else {
      *low = load_bytes(quants + (8 * g + j) * 64);
      *high = load_bytes(quants + (8 * g + j + 4) * 64);
    }
  }
  SHOAL_INLINE Vec scale(int64_t g, int half) const {
    return load_scale<F::kHalfScales>(scales, g * F::kHalves + half);
  }
};

// A tile unpacked to bytes and fp32 scales in the caches: for more than kPackedRows.
template <typename F>
struct UnpackedTile {
  static constexpr bool kIsPacked = false;
  const uint8_t* quants;  // [groups][8][16][4]
  float* scales;          // [groups][kHalves][16]
  TileMins mins;

  // Unpacks into `scratch`, unpacked_tile_bytes; quants of 8 bits stay where they are.
  UnpackedTile(const PackedMatrix& w, int64_t tile, uint8_t* scratch) : mins(w, tile) {
    const PackedTile<F> packed(w, tile);
    const int64_t groups = w.groups();
    quants = F::kBits == 4 ? scratch : packed.quants;
    scales = reinterpret_cast<float*>(scratch + w.inputs * kTile);
    for (int64_t g = 0; g < groups; ++g) {
      if constexpr (F::kBits == 4) {
        for (int j = 0; j < 4; ++j) {
          Bytes low, high;
          packed.chunks(g, j, &low, &high);
          store_bytes(scratch + (8 * g + j) * 64, low);
          store_bytes(scratch + (8 * g + j + 4) * 64, high);
        }
      }
      for (int half = 0; half < F::kHalves; ++half) {
        packed.scale(g, half).store(scales + (g * F::kHalves + half) * kTile);
      }
    }
  }
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    *low = load_bytes(quants + (8 * g + j) * 64);
    *high = load_bytes(quants + (8 * g + j + 4) * 64);
  }
  SHOAL_INLINE Vec scale(int64_t g, int half) const {
    return Vec::load(scales + (g * F::kHalves + half) * kTile);
  }
};

SHOAL_INLINE void store_tile(Vec acc, float* y, int64_t columns) {
  if (columns >= kTile) {
    acc.store(y);
    return;
  }
  float lanes[kTile];
  acc.store(lanes);
  for (int64_t i = 0; i < columns; ++i) y[i] = lanes[i];
}

// Adds the products of one group, one plane of R rows that lie `stride` apart, to those of two tiles.
template <typename F, int R, typename Tile>
SHOAL_INLINE void multiply_group(const Tile* w, int64_t g, const int8_t* q, int64_t stride,
                                 Int (&dot)[R][2][F::kHalves]) {
  for (int j = 0; j < 4; ++j) {
    Bytes low[2], high[2];
    w[0].chunks(g, j, &low[0], &high[0]);
    w[1].chunks(g, j, &low[1], &high[1]);
    for (int r = 0; r < R; ++r) {
      const int8_t* x = q + r * stride + 4 * j;
      for (int c = 0; c < 2; ++c) dot[r][c][0] = dot4<F::kBits>(dot[r][c][0], low[c], x);
      for (int c = 0; c < 2; ++c) {
        Int& sum = dot[r][c][F::kHalves - 1];
        sum = dot4<F::kBits>(sum, high[c], x + kGroup / 2);
      }
    }
  }
}

// Adds the products of mins and sums over groups.
template <int R, typename Tile>
SHOAL_INLINE void multiply_mins(const Tile* w, const QuantizedRows& x, int64_t row, Vec (&acc)[R][2]) {
  const int64_t pairs = (x.groups + 1) / 2;
  for (int64_t begin = 0; begin < pairs; begin += kMinGroups / 2) {
    const int64_t end = begin + kMinGroups / 2 < pairs ? begin + kMinGroups / 2 : pairs;
    Int sums[R][2];
    for (auto& sum : sums) sum[0] = sum[1] = Int::broadcast(0);
    for (int64_t pair = begin; pair < end; ++pair) {
      const Bytes mins[2] = {w[0].mins.of_pair(pair), w[1].mins.of_pair(pair)};
      for (int r = 0; r < R; ++r) {
        const int16_t* of_row = x.sums(row + r) + 2 * pair;
        for (int c = 0; c < 2; ++c) sums[r][c] = dot2(sums[r][c], mins[c], of_row);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Vec unit = Vec::broadcast(x.row(row + r).sum_unit);
      for (int c = 0; c < 2; ++c) {
        acc[r][c] = fma(sums[r][c].to_float(), w[c].mins.unit() * unit, acc[r][c]);
      }
    }
  }
}

// Adds the groups of negative shifts, mins included, to one row of two tiles. Not inlined, as it is rare.
template <typename F, bool kWide, typename Tile>
__attribute__((noinline)) void add_small_groups(const GemmArgs& args, const Tile* w, int64_t row, Vec* acc) {
  const QuantizedGroup* x = args.x.group(row);
  for (int64_t g = 0; g < args.x.groups; ++g, x += kWide ? 2 : 1) {
    if (x->shift >= 0) continue;
    constexpr int H = F::kHalves;
    const float power = bits_to_float(static_cast<uint32_t>(127 + x->shift) << 23);
    const Vec of_dot = Vec::broadcast(kWide ? 16.0f * power : power);
    const Vec of_sum = Vec::broadcast(static_cast<float>(x->sum) * power);
    Int dot[1][2][H];
    for (int h = 0; h < H; ++h) dot[0][0][h] = dot[0][1][h] = Int::broadcast(x->start[h]);
    multiply_group<F, 1>(w, g, x->q, 0, dot);
    for (int c = 0; c < 2; ++c) {
      for (int h = 0; h < H; ++h) {
        acc[c] = fma(dot[0][c][h].to_float(), w[c].scale(g, h) * of_dot, acc[c]);
      }
      if constexpr (F::kHasMin) {
        const int16_t of_pair[2] = {g % 2 == 0, g % 2 == 1};
        const Int min = dot2(Int::broadcast(0), w[c].mins.of_pair(g / 2), of_pair);
        acc[c] = fma(min.to_float() * w[c].mins.unit(), of_sum, acc[c]);
      }
    }
  }
}

// Fetches lines into the second-level cache: left alone, the hardware fetches too little ahead.
SHOAL_INLINE void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

template <int R>
SHOAL_INLINE void store_pair(const GemmArgs& args, int64_t tile, int64_t row, const Vec (&y)[R][2]) {
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_tile(y[r][c], args.y + (row + r) * args.y_stride + column, args.w->outputs - column);
    }
  }
}

// R rows from `row` on times two neighbouring tiles.
template <typename F, int R, bool kWide, typename Tile>
void multiply_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  constexpr int H = F::kHalves;
  const int64_t groups = args.w->groups(), stride = args.x.stride();
  const QuantizedGroup* x = args.x.group(row);
  const auto of_row = [&](int r) __attribute__((always_inline)) {
    return reinterpret_cast<const QuantizedGroup*>(reinterpret_cast<const uint8_t*>(x) + r * stride);
  };
  const uint8_t* next = args.w->tile(tile + 2);
  const int64_t next_bytes = 2 * args.w->tile_bytes / groups;  // fetched during each group
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) __builtin_prefetch(args.y + (row + r) * args.y_stride + (tile + c) * kTile, 1);
  }
  Vec acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Vec::zero();
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (Tile::kIsPacked) {
      fetch(next, next_bytes);
      next += next_bytes;
    }
    Int dot[R][2][H];
    for (int r = 0; r < R; ++r) {
      for (int h = 0; h < H; ++h) dot[r][0][h] = dot[r][1][h] = Int::broadcast(of_row(r)->start[h]);
    }
    multiply_group<F, R>(w, g, x->q, stride, dot);
    Vec missing = Vec::broadcast(1.0f);  // in place of the second plane's 16, where no row has one
    if constexpr (kWide) {
      int32_t most = of_row(0)->shift;
      for (int r = 1; r < R; ++r) most = of_row(r)->shift > most ? of_row(r)->shift : most;
      if (most == kMostShift) {
        for (int r = 0; r < R; ++r) {
          for (int h = 0; h < H; ++h) {
            for (int c = 0; c < 2; ++c) dot[r][c][h] = dot[r][c][h].shifted(4) + of_row(r)[1].start[h];
          }
        }
        multiply_group<F, R>(w, g, x[1].q, stride, dot);
      } else {
        missing = Vec::broadcast(16.0f);
      }
    }
    for (int c = 0; c < 2; ++c) {
      for (int h = 0; h < H; ++h) {
        const Vec scale = kWide ? w[c].scale(g, h) * missing : w[c].scale(g, h);
        for (int r = 0; r < R; ++r) {
          acc[r][c] = fma(dot[r][c][h].shifted(of_row(r)->shift).to_float(), scale, acc[r][c]);
        }
      }
    }
    x += kWide ? 2 : 1;
  }
  if constexpr (F::kHasMin) multiply_mins<R>(w, args.x, row, acc);
  for (int r = 0; r < R; ++r) {
    if (args.x.row(row + r).has_small_groups) {
      Vec copy[2] = {acc[r][0], acc[r][1]};  // whose address may be taken: `acc` stays in registers
      add_small_groups<F, kWide>(args, w, row + r, copy);
      for (int c = 0; c < 2; ++c) acc[r][c] = copy[c];
    }
    const Vec unit = Vec::broadcast(args.x.row(row + r).unit);
    for (int c = 0; c < 2; ++c) acc[r][c] = acc[r][c] * unit;
  }
  store_pair<R>(args, tile, row, acc);
}

template <typename F, int R, bool kWide, typename Tile>
void multiply_block(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) {
      multiply_rows<F, R, kWide>(args, w, tile, row);
    } else {
      multiply_block<F, R - 1, kWide>(args, w, tile, row, rows);
    }
  }
}

// Blocks of about the same number of rows: small ones would wait for their own sums.
template <typename F, bool kWide, typename Tile>
void multiply_all_rows(const GemmArgs& args, const Tile* w, int64_t tile) {
  int64_t blocks = (args.row_end - args.row_begin + kRowBlock - 1) / kRowBlock;
  for (int64_t row = args.row_begin; blocks > 0; --blocks) {
    const int64_t rows = (args.row_end - row + blocks - 1) / blocks;
    multiply_block<F, kRowBlock, kWide>(args, w, tile, row, rows);
    row += rows;
  }
}

template <typename F, bool kWide>
void gemm_tiles(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    if (args.row_end - args.row_begin <= kPackedRows) {
      const PackedTile<F> w[2] = {{*args.w, tile}, {*args.w, tile + 1}};
      multiply_all_rows<F, kWide>(args, w, tile);
    } else {
      const UnpackedTile<F> w[2] = {
          {*args.w, tile, args.scratch},
          {*args.w, tile + 1, args.scratch + unpacked_tile_bytes(args.w->inputs)}};
      multiply_all_rows<F, kWide>(args, w, tile);
    }
  }
}

template <typename F>
void gemm_quantized(const GemmArgs& args) {
  if (args.x.wide) {
    gemm_tiles<F, true>(args);
  } else {
    gemm_tiles<F, false>(args);
  }
}

template <Format format>
SHOAL_INLINE Vec load_dense(const uint8_t* p) {
  if constexpr (format == Format::kF32) return Vec::load(reinterpret_cast<const float*>(p));
  if constexpr (format == Format::kF16) return Vec::load_half(reinterpret_cast<const uint16_t*>(p));
  return Vec::load_bf16(reinterpret_cast<const uint16_t*>(p));
}

template <Format format, int R>
void multiply_dense_rows(const GemmArgs& args, int64_t tile, int64_t row) {
  constexpr int64_t kStep = kTile * (format == Format::kF32 ? 4 : 2);
  const uint8_t* w[2] = {args.w->tile(tile), args.w->tile(tile + 1)};
  const float* x = args.dense + row * args.dense_stride;
  Vec acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Vec::zero();
  for (int64_t k = 0; k < args.w->inputs; ++k) {
    const Vec w0 = load_dense<format>(w[0] + k * kStep), w1 = load_dense<format>(w[1] + k * kStep);
    for (int r = 0; r < R; ++r) {
      const Vec xs = Vec::broadcast(x[r * args.dense_stride + k]);
      acc[r][0] = fma(w0, xs, acc[r][0]);
      acc[r][1] = fma(w1, xs, acc[r][1]);
    }
  }
  store_pair<R>(args, tile, row, acc);
}

template <Format format>
void gemm_dense(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    int64_t row = args.row_begin;
    for (; row + kRowBlock <= args.row_end; row += kRowBlock) {
      multiply_dense_rows<format, kRowBlock>(args, tile, row);
    }
    for (; row < args.row_end; ++row) multiply_dense_rows<format, 1>(args, tile, row);
  }
}

inline constexpr LinearKernels kLinearKernels = {
    &quantize_rows,
    {&gemm_quantized<Q4_1>, &gemm_quantized<Q4_0>, &gemm_quantized<Q8_0>, &gemm_quantized<Q4_K>,
     &gemm_quantized<Q5_K>, &gemm_quantized<Q6_K>, &gemm_dense<Format::kF32>,
     &gemm_dense<Format::kF16>, &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE
