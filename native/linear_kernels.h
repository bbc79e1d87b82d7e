// Matrix products over packed weights, written once on Vec; compiled for each instruction set.
//
// Canonical arithmetic of one output, whatever the kernel, for each group g of 32 columns (half group for
// Q6_K), all of it in int32 and exact but for halvings, which round to nearest:
//   products = (sum_k (q_w - zero) q_x) / 2^fit
//   pair = products + 2^16 (kMinUnits sum_x / 2^fit)
//   acc += (scale_w lower_half(pair) + min_w upper_half(pair)) / 2^count
// where the halves are int16, the lower one being the products, and the upper one the sum, or one less where
// products are negative: so it costs nothing to put them beside each other. The fine part of a group adds to
// acc alike, with kFineHalvings more. y = float(acc) unit_w unit_x.
// Dense formats: acc = fma(w_k, x_k, acc), k ascending.
#pragma once

#include <limits>

#include "int_lanes.h"
#include "linear_table.h"
#include "quantize_kernels.h"
#include "row_kernels.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// A quantised format at compile time.
template <Format format>
struct Quantized {
  static constexpr QuantizedFormat kFormat = kQuantizedFormats[static_cast<int>(format)];
  static constexpr int kBits = kFormat.bits;
  static constexpr bool kHasMin = kFormat.has_min;
  static constexpr int kHalves = kFormat.halves;
  static constexpr int kFit = kFormat.fit;
};
using Q4_1 = Quantized<Format::kQ4_1>;
using Q4_0 = Quantized<Format::kQ4_0>;
using Q8_0 = Quantized<Format::kQ8_0>;
using Q4_K = Quantized<Format::kQ4_K>;
using Q5_K = Quantized<Format::kQ5_K>;
using Q6_K = Quantized<Format::kQ6_K>;

// kRowBlock: rows that share the loads of a tile pair, with AVX-512 one less than its registers hold, as is
// faster. kPackedRows: with more rows a pair of tiles is unpacked once, with as many each block unpacks it.
#if defined(__AVX512F__)
inline constexpr int kRowBlock = 5;
inline constexpr int64_t kPackedRows = std::numeric_limits<int64_t>::max();
#else
inline constexpr int kRowBlock = 2;
inline constexpr int64_t kPackedRows = 12;
#endif

// A tile read as it is packed.
template <typename F>
struct PackedTile {
  static constexpr bool kIsPacked = true;
  const uint8_t* quants;
  const int16_t* scales;
  const float* units;

  SHOAL_INLINE PackedTile(const PackedMatrix& w, int64_t tile)
      : quants(w.tile(tile)),
        scales(reinterpret_cast<const int16_t*>(quants + w.scale_offset)),
        units(reinterpret_cast<const float*>(quants + w.unit_offset)) {}
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
  // In each lane the scale of an output below its min, or below zero.
  SHOAL_INLINE Int scale(int64_t g, int half) const {
    if constexpr (F::kHasMin) return Int::load(scales + g * 2 * kTile);
    return Int::load_lower(scales + (g * F::kHalves + half) * kTile);
  }
  SHOAL_INLINE Vec unit() const { return Vec::load(units); }
};

// A tile whose quants of 4 bits are unpacked to bytes in the caches: for more than kPackedRows.
template <typename F>
struct UnpackedTile : PackedTile<F> {
  static constexpr bool kIsPacked = false;
  const uint8_t* unpacked;  // [groups][8][16][4]

  // Unpacks into `scratch`, unpacked_tile_bytes.
  UnpackedTile(const PackedMatrix& w, int64_t tile, uint8_t* scratch)
      : PackedTile<F>(w, tile), unpacked(scratch) {
    for (int64_t g = 0; g < w.groups(); ++g) {
      for (int j = 0; j < 4; ++j) {
        Bytes low, high;
        PackedTile<F>::chunks(g, j, &low, &high);
        store_bytes(scratch + (8 * g + j) * 64, low);
        store_bytes(scratch + (8 * g + j + 4) * 64, high);
      }
    }
  }
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    *low = load_bytes(unpacked + (8 * g + j) * 64);
    *high = load_bytes(unpacked + (8 * g + j + 4) * 64);
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

// Adds the products of a group of R rows that lie `stride` apart to those of two tiles.
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

// Halves all sums of products `fit` times.
template <int fit, int R, int H>
SHOAL_INLINE void halve_all(Int (&dot)[R][2][H]) {
  if constexpr (fit > 0) {
    for (auto& of_row : dot) {
      for (auto& of_tile : of_row) {
        for (Int& sum : of_tile) sum = sum.template halved<fit>();
      }
    }
  }
}

// Fetches lines into the second-level cache: left alone, the hardware fetches too little ahead.
SHOAL_INLINE void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Where the products of a row and a pair of tiles go.
SHOAL_INLINE float* place_of_pair(const GemmArgs& args, int64_t tile, int64_t row) {
  return args.y + row * args.y_stride + (args.w->gated ? tile / 2 : tile) * kTile;
}

template <int R>
SHOAL_INLINE void store_pair(const GemmArgs& args, int64_t tile, int64_t row, const Vec (&y)[R][2]) {
  if (args.w->gated) {
    for (int r = 0; r < R; ++r) gate(y[r][0], y[r][1]).store(place_of_pair(args, tile, row + r));
    return;
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_tile(y[r][c], place_of_pair(args, tile, row + r) + c * kTile, args.w->outputs - column);
    }
  }
}

// Adds the fine parts of a row, after its groups: few have one, and not the same in each row.
template <typename F, typename Tile>
SHOAL_INLINE void add_fine(const QuantizedRows& x, const Tile* w, int64_t row, Int (&acc)[2]) {
  constexpr int H = F::kHalves;
  const int32_t count = x.headroom + kFineHalvings;
  const Int half = Int::broadcast((1 << count) / 2);
  const FineGroup* const end = x.fine(row) + x.row(row).num_fine;
  for (const FineGroup* fine = x.fine(row); fine != end; ++fine) {
    Int dot[1][2][H];
    for (int h = 0; h < H; ++h) dot[0][0][h] = dot[0][1][h] = Int::broadcast(fine->start[h]);
    multiply_group<F, 1>(w, fine->index, fine->q, 0, dot);
    halve_all<F::kFit>(dot);
    for (int c = 0; c < 2; ++c) {
      for (int h = 0; h < H; ++h) {
        acc[c] = acc[c] + dot2(half, dot[0][c][h], w[c].scale(fine->index, h)).halved(count);
      }
    }
  }
}

// R rows from `row` on times two neighbouring tiles.
template <typename F, int R, typename Tile>
void multiply_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  constexpr int H = F::kHalves;
  const int64_t groups = args.w->groups(), stride = args.x.stride();
  const QuantizedGroup* x = args.x.group(row);
  const auto of_row = [&](int r) __attribute__((always_inline)) {
    return reinterpret_cast<const QuantizedGroup*>(reinterpret_cast<const uint8_t*>(x) + r * stride);
  };
  const uint8_t* next = args.w->tile(tile + 2);
  const int64_t next_bytes = 2 * args.w->tile_bytes / groups;  // fetched during each group
  const int lines = args.w->gated ? 1 : 2;  // of y, for each row
  for (int r = 0; r < R; ++r) {
    const float* of_pair = place_of_pair(args, tile, row + r);
    for (int c = 0; c < lines; ++c) __builtin_prefetch(of_pair + c * kTile, 1);
  }
  Int acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Int::broadcast(0);
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
    halve_all<F::kFit>(dot);
    Int scale[2][H];
    for (int c = 0; c < 2; ++c) {
      for (int h = 0; h < H; ++h) scale[c][h] = w[c].scale(g, h);
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < 2; ++c) {
        for (int h = 0; h < H; ++h) {
          const Int term = dot2(Int::broadcast(of_row(r)->half), dot[r][c][h], scale[c][h]);
          acc[r][c] = acc[r][c] + term.halved(of_row(r)->count);
        }
      }
    }
    ++x;
  }
  if (args.x.wide && (tile + 2) * kTile > args.first_wide) {
    for (int r = 0; r < R; ++r) add_fine<F>(args.x, w, row + r, acc[r]);
  }
  Vec y[R][2];
  for (int r = 0; r < R; ++r) {
    const Vec unit = Vec::broadcast(args.x.row(row + r).unit);
    for (int c = 0; c < 2; ++c) y[r][c] = acc[r][c].to_float() * w[c].unit() * unit;
  }
  store_pair<R>(args, tile, row, y);
}

template <typename F, int R, typename Tile>
void multiply_block(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) {
      multiply_rows<F, R>(args, w, tile, row);
    } else {
      multiply_block<F, R - 1>(args, w, tile, row, rows);
    }
  }
}

// Blocks of about the same number of rows: small ones would wait for their own sums.
template <typename F, typename Tile>
void multiply_all_rows(const GemmArgs& args, const Tile* w, int64_t tile) {
  int64_t blocks = (args.row_end - args.row_begin + kRowBlock - 1) / kRowBlock;
  for (int64_t row = args.row_begin; blocks > 0; --blocks) {
    const int64_t rows = (args.row_end - row + blocks - 1) / blocks;
    multiply_block<F, kRowBlock>(args, w, tile, row, rows);
    row += rows;
  }
}

template <typename F>
void gemm_quantized(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    if (F::kBits == 8 || args.row_end - args.row_begin <= kPackedRows) {
      const PackedTile<F> w[2] = {{*args.w, tile}, {*args.w, tile + 1}};
      multiply_all_rows<F>(args, w, tile);
    } else {
      const UnpackedTile<F> w[2] = {
          {*args.w, tile, args.scratch},
          {*args.w, tile + 1, args.scratch + unpacked_tile_bytes(args.w->inputs)}};
      multiply_all_rows<F>(args, w, tile);
    }
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
