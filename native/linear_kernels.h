// Matrix products over packed weights, written once on Vec; compiled for each instruction set.
//
// Canonical arithmetic of one output, whatever the kernel: for each group g of 32 columns ascending,
//   acc = fma(float(sum_k (q_w - zero) q_x), d_w * s_x, acc)   (per half group for Q6_K)
//   acc = fma(m_w, s_x * sum_k q_x, acc)                       (formats with a min)
// with the integer sums exact. Dense formats: acc = fma(w_k, x_k, acc), k ascending.
#pragma once

#include "int_lanes.h"
#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Traits of a quantised format: w = d * (q - kZero) + m.
template <int bits, int zero, bool has_min, bool half_scales, int halves>
struct Quantized {
  static constexpr int kBits = bits;
  static constexpr int kZero = zero;
  static constexpr bool kHasMin = has_min;
  static constexpr bool kHalfScales = half_scales;
  static constexpr int kHalves = halves;  // scales per group
};
using Q4_1 = Quantized<4, 0, true, true, 1>;
using Q4_0 = Quantized<4, 8, false, true, 1>;
using Q8_0 = Quantized<8, 128, false, true, 1>;
using Q4_K = Quantized<4, 0, true, false, 1>;
using Q5_K = Quantized<8, 0, true, false, 1>;
using Q6_K = Quantized<8, 32, false, false, 2>;

// Rows that share the loads of a tile pair; as many as the registers hold.
#if defined(__AVX512F__)
inline constexpr int kRowBlock = 6;
#else
inline constexpr int kRowBlock = 2;
#endif
// Up to these rows each block of them reads the tiles as they are packed.
inline constexpr int64_t kPackedRows = 6 * kRowBlock;

template <bool kHalf>
SHOAL_INLINE Vec load_scale(const uint8_t* base, int64_t index) {
  if constexpr (kHalf) return Vec::load_half(reinterpret_cast<const uint16_t*>(base) + index * kTile);
  return Vec::load(reinterpret_cast<const float*>(base) + index * kTile);
}

// A tile read as it is packed: for few rows.
template <typename F>
struct PackedTile {
  static constexpr bool kIsPacked = true;
  const uint8_t* quants;
  const uint8_t* scales;
  const uint8_t* mins;

  SHOAL_INLINE PackedTile(const PackedMatrix& w, int64_t tile)
      : quants(w.tile(tile)), scales(quants + w.scale_offset), mins(quants + w.min_offset) {}
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
  SHOAL_INLINE Vec min(int64_t g) const { return load_scale<F::kHalfScales>(mins, g); }
};

// A tile unpacked to bytes and fp32 scales in the caches: for many rows.
template <typename F>
struct UnpackedTile {
  static constexpr bool kIsPacked = false;
  const uint8_t* quants;  // [groups][8][16][4]
  float* scales;          // [groups][kHalves][16]
  float* mins;            // [groups][16]

  // Unpacks into `scratch` (a third of gemm_scratch_bytes); quants of 8 bits stay where they are.
  UnpackedTile(const PackedMatrix& w, int64_t tile, uint8_t* scratch) {
    const PackedTile<F> packed(w, tile);
    const int64_t groups = w.groups();
    quants = F::kBits == 4 ? scratch : packed.quants;
    scales = reinterpret_cast<float*>(scratch + w.inputs * kTile);
    mins = scales + groups * F::kHalves * kTile;
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
      if constexpr (F::kHasMin) packed.min(g).store(mins + g * kTile);
    }
  }
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    *low = load_bytes(quants + (8 * g + j) * 64);
    *high = load_bytes(quants + (8 * g + j + 4) * 64);
  }
  SHOAL_INLINE Vec scale(int64_t g, int half) const {
    return Vec::load(scales + (g * F::kHalves + half) * kTile);
  }
  SHOAL_INLINE Vec min(int64_t g) const { return Vec::load(mins + g * kTile); }
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

// What to add to the sum over a (half) group for the zero point of the weights.
template <typename F>
SHOAL_INLINE int32_t zero_correction(const GroupFactors& factors, int64_t lane, int half) {
  if constexpr (F::kHalves == 2) {
    const int32_t low_sum = factors.low_sum[lane];
    return -F::kZero * (half == 0 ? low_sum : factors.sum[lane] - low_sum);
  }
  return -F::kZero * factors.sum[lane];
}

// Adds the products of one group with one part of q to the sums of R rows and two tiles.
template <typename F, int R, typename Tile>
SHOAL_INLINE void multiply_group(const Tile* w, int64_t g, const int8_t* x, int64_t row_bytes,
                                 Int (&dot)[R][2][F::kHalves]) {
  for (int j = 0; j < 4; ++j) {
    for (int c = 0; c < 2; ++c) {
      Bytes low, high;
      w[c].chunks(g, j, &low, &high);
      for (int r = 0; r < R; ++r) {
        const int8_t* xs = x + r * row_bytes + 4 * j;
        dot[r][c][0] = dot4<F::kBits>(dot[r][c][0], low, xs);
        dot[r][c][F::kHalves - 1] = dot4<F::kBits>(dot[r][c][F::kHalves - 1], high, xs + 16);
      }
    }
  }
}

// Fetches lines into the second-level cache: left alone, the hardware fetches too little ahead.
SHOAL_INLINE void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// R rows from `row` on times two neighbouring tiles. kWide: q has 12 bits.
template <typename F, int R, bool kWide, typename Tile>
void multiply_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  constexpr int H = F::kHalves;
  constexpr int64_t kGroupBytes = kWide ? 2 * kGroup : kGroup;
  const int64_t groups = args.w->groups(), row_bytes = groups * kGroupBytes;
  const int8_t* x = args.x.q + row * row_bytes;
  const GroupFactors* factors[R];
  int64_t lane[R];
  for (int r = 0; r < R; ++r) {
    factors[r] = args.x.factors + (row + r) / kRowPadding * groups;
    lane[r] = (row + r) % kRowPadding;
  }
  const uint8_t* next = args.w->tile(tile + 2);
  const int64_t next_bytes = 2 * args.w->tile_bytes / groups;  // fetched during each group
  Vec acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Vec::zero();
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (Tile::kIsPacked) {
      fetch(next, next_bytes);
      next += next_bytes;
    }
    Int dot[R][2][H];
    for (auto& sums : dot) {
      for (int h = 0; h < H; ++h) sums[0][h] = sums[1][h] = Int::broadcast(0);
    }
    multiply_group<F, R>(w, g, x + g * kGroupBytes, row_bytes, dot);
    if constexpr (kWide) {
      for (auto& sums : dot) {
        for (int h = 0; h < H; ++h) {
          sums[0][h] = sums[0][h].times_16();
          sums[1][h] = sums[1][h].times_16();
        }
      }
      multiply_group<F, R>(w, g, x + g * kGroupBytes + kGroup, row_bytes, dot);
    }
    for (int c = 0; c < 2; ++c) {
      for (int r = 0; r < R; ++r) {
        const GroupFactors& f = factors[r][g];
        const Vec s = Vec::broadcast(f.scale[lane[r]]);
        for (int h = 0; h < H; ++h) {
          Int sum = dot[r][c][h];
          if constexpr (F::kZero != 0) sum = sum + zero_correction<F>(f, lane[r], h);
          acc[r][c] = fma(sum.to_float(), w[c].scale(g, h) * s, acc[r][c]);
        }
        if constexpr (F::kHasMin) {
          acc[r][c] = fma(w[c].min(g), Vec::broadcast(f.scaled_sum[lane[r]]), acc[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_tile(acc[r][c], args.y + (row + r) * args.y_stride + column, args.w->outputs - column);
    }
  }
}

template <typename F, int R, bool kWide, typename Tile>
void multiply_tail(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) {
      multiply_rows<F, R, kWide>(args, w, tile, row);
    } else {
      multiply_tail<F, R - 1, kWide>(args, w, tile, row, rows);
    }
  }
}

template <typename F, bool kWide, typename Tile>
void multiply_all_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  for (; row + kRowBlock <= args.row_end; row += kRowBlock) {
    multiply_rows<F, kRowBlock, kWide>(args, w, tile, row);
  }
  multiply_tail<F, kRowBlock - 1, kWide>(args, w, tile, row, args.row_end - row);
}

template <typename F, bool kWide>
void gemm_tiles(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    if (args.row_end - args.row_begin <= kPackedRows) {
      const PackedTile<F> w[2] = {{*args.w, tile}, {*args.w, tile + 1}};
      multiply_all_rows<F, kWide>(args, w, tile, args.row_begin);
    } else {
      const UnpackedTile<F> w[2] = {
          {*args.w, tile, args.scratch},
          {*args.w, tile + 1, args.scratch + gemm_scratch_bytes(args.w->inputs) / 3}};
      multiply_all_rows<F, kWide>(args, w, tile, args.row_begin);
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
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_tile(acc[r][c], args.y + (row + r) * args.y_stride + column, args.w->outputs - column);
    }
  }
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

// One group: x = scale * q, scale = max|x| / levels, q rounded to nearest even. levels is 127, or
// 127 * 16 for q of 12 bits, which is stored as 16 * coarse + fine.
template <bool kWide, bool kHalves>
SHOAL_INLINE void quantize_group(const float* x, int8_t* q, GroupFactors& factors, int64_t lane) {
  constexpr float kLevels = kWide ? 127.0f * 16.0f : 127.0f;
  constexpr float kSmallest = 1e-30f;           // below it levels / x could overflow
  const Vec shift = Vec::broadcast(0x1.8p23f);  // adding and subtracting it rounds to an integer
  const Vec low = Vec::load(x), high = Vec::load(x + kLanes);
  const float largest = reduce_max(max(abs(low), abs(high)));
  const float scale = largest > kSmallest ? largest / kLevels : 0.0f;
  const Vec inverse = Vec::broadcast(largest > kSmallest ? kLevels / largest : 0.0f);
  const Vec q_low = (low * inverse + shift) - shift, q_high = (high * inverse + shift) - shift;
  const float sum = reduce_add(q_low + q_high);  // exact: integers below 2^24
  factors.scale[lane] = scale;
  factors.scaled_sum[lane] = scale * sum;
  factors.sum[lane] = static_cast<int32_t>(sum);
  factors.low_sum[lane] = kHalves ? static_cast<int32_t>(reduce_add(q_low)) : 0;
  if constexpr (kWide) {
    // The nearest multiple of 16; half a unit more settles ties, so that fine is -8 to 7.
    const Vec per_step = Vec::broadcast(1.0f / 16.0f), nudge = Vec::broadcast(0.5f / 16.0f);
    const Vec step = Vec::broadcast(-16.0f);
    const Vec coarse_low = (fma(q_low, per_step, nudge) + shift) - shift;
    const Vec coarse_high = (fma(q_high, per_step, nudge) + shift) - shift;
    coarse_low.store_int8(q);
    coarse_high.store_int8(q + kLanes);
    fma(coarse_low, step, q_low).store_int8(q + kGroup);
    fma(coarse_high, step, q_high).store_int8(q + kGroup + kLanes);
  } else {
    q_low.store_int8(q);
    q_high.store_int8(q + kLanes);
  }
}

template <bool kWide, bool kHalves>
void quantize_rows(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                   int64_t inputs, const QuantizedRows& out) {
  const int64_t groups = inputs / kGroup;
  for (int64_t row = row_begin; row < row_end; ++row) {
    GroupFactors* factors = out.factors + row / kRowPadding * groups;
    for (int64_t g = 0; g < groups; ++g) {
      const float* in = x + row * x_stride + g * kGroup;
      int8_t* q = out.q + (row * groups + g) * (kWide ? 2 * kGroup : kGroup);
      quantize_group<kWide, kHalves>(in, q, factors[g], row % kRowPadding);
    }
  }
}

inline constexpr LinearKernels kLinearKernels = {
    {{&quantize_rows<false, false>, &quantize_rows<false, true>},
     {&quantize_rows<true, false>, &quantize_rows<true, true>}},
    {&gemm_quantized<Q4_1>, &gemm_quantized<Q4_0>, &gemm_quantized<Q8_0>, &gemm_quantized<Q4_K>,
     &gemm_quantized<Q5_K>, &gemm_quantized<Q6_K>, &gemm_dense<Format::kF32>,
     &gemm_dense<Format::kF16>, &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE
