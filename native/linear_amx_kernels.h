// Matrix products on AMX int8 tiles: 16 rows x 16 columns x one group at a time.
//
// The tile unit replaces the integer sums of linear_kernels.h, which are exact in any order; the fp32
// part is the same, so the bits are too.
#pragma once

#include "linear_kernels.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kAmxRows = 16;
inline constexpr int kAmxSmallestTail = 9;  // fewer rows are cheaper without tiles

// Layout of Intel's tile configuration, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// How a format meets the tile unit. Weights are signed (q - zero), or unsigned without a zero point.
// Wide activations of weights of 4 bits take one product of double depth: coarse parts times 16 w, and
// fine parts times w; of weights of 8 bits, where 16 w doesn't fit a byte, two products.
template <typename F, bool kWide>
struct TileShape {
  static constexpr bool kSigned = F::kZero != 0;
  static constexpr bool kJoined = kWide && F::kBits == 4;
  static constexpr bool kTwice = kWide && !kJoined;
  static constexpr int kColumns = kGroup / F::kHalves;  // of the input, in one product
  static constexpr int kDepth = kJoined ? 2 * kColumns : kColumns;
  static constexpr int kGroupBytes = kWide ? 2 * kGroup : kGroup;
};

// A tile unpacked for the tile unit, with fp32 scales.
template <typename F, bool kWide>
struct TileWeights {
  using Shape = TileShape<F, kWide>;
  const uint8_t* quants;  // [groups][8][16][4], or joined [groups][2][8][16][4]: 16 w, then w
  const float* scales;    // [groups][kHalves][16]
  const float* mins;      // [groups][16]

  TileWeights(const PackedMatrix& w, int64_t tile, uint8_t* scratch) {
    const UnpackedTile<F> unpacked(w, tile, scratch);
    quants = unpacked.quants;
    scales = unpacked.scales;
    mins = unpacked.mins;
    if constexpr (!Shape::kSigned && !Shape::kJoined) return;
    uint8_t* out = scratch + gemm_scratch_bytes(w.inputs) / 3;  // two thirds are left
    quants = out;
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(F::kZero));
    for (int64_t g = 0; g < w.groups(); ++g) {
      for (int j = 0; j < 8; ++j) {
        const Bytes q = load_bytes(unpacked.quants + (8 * g + j) * 64);
        const Bytes bytes = _mm512_sub_epi8(q, zero);
        if constexpr (Shape::kJoined) {
          // Of 4 bits each: shifting 16-bit lanes lets no bit cross into the neighbour but sign bits.
          const Bytes high = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi8(-16));
          store_bytes(out + (16 * g + j) * 64, high);
          store_bytes(out + (16 * g + j + 8) * 64, bytes);
        } else {
          store_bytes(out + (8 * g + j) * 64, bytes);
        }
      }
    }
  }
};

// Integer sums of 16 rows x 16 columns over one product: dots[r][c] = sum_k x q. Tile registers are part
// of the instruction, hence a macro.
#define SHOAL_TILE_DOTS(dots_tile, x_tile, w_tile, x, x_stride, dots) \
  do {                                                                \
    _tile_zero(dots_tile);                                            \
    _tile_loadd(x_tile, x, x_stride);                                 \
    if constexpr (Shape::kSigned) {                                   \
      _tile_dpbssd(dots_tile, x_tile, w_tile);                        \
    } else {                                                          \
      _tile_dpbsud(dots_tile, x_tile, w_tile);                        \
    }                                                                 \
    _tile_stored(dots_tile, dots, 64);                                \
  } while (false)

struct alignas(64) TileSums {
  int32_t q[kAmxRows * kTile];
  int32_t fine[kAmxRows * kTile];
};

// Rows `row` to `row + 15`, of which `valid` are stored; the others are padding.
template <typename F, bool kWide>
void multiply_tile_rows(const GemmArgs& args, const TileWeights<F, kWide>& w, int64_t tile,
                        int64_t row, int64_t valid) {
  using Shape = TileShape<F, kWide>;
  constexpr int H = F::kHalves;
  const int64_t groups = args.w->groups(), x_stride = groups * Shape::kGroupBytes;
  const int8_t* x = args.x.q + row * x_stride;
  const GroupFactors* factors = args.x.factors + row / kRowPadding * groups;
  TileSums sums[2];
  Vec acc[kAmxRows];
#pragma GCC unroll 16
  for (Vec& a : acc) a = Vec::zero();
  const auto multiply = [&](int64_t i) __attribute__((always_inline)) {  // i: (half) group
    const int8_t* xs = x + i / H * Shape::kGroupBytes + i % H * Shape::kColumns;
    const uint8_t* ws = w.quants + i * (Shape::kDepth * kTile);
    if (i % 2 == 0) {
      _tile_loadd(2, ws, 64);
      SHOAL_TILE_DOTS(0, 1, 2, xs, x_stride, sums[0].q);
      if constexpr (Shape::kTwice) SHOAL_TILE_DOTS(6, 7, 2, xs + kGroup, x_stride, sums[0].fine);
    } else {
      _tile_loadd(5, ws, 64);
      SHOAL_TILE_DOTS(3, 4, 5, xs, x_stride, sums[1].q);
      if constexpr (Shape::kTwice) SHOAL_TILE_DOTS(6, 7, 5, xs + kGroup, x_stride, sums[1].fine);
    }
  };
  // The tile unit works one group ahead of the fp32 part.
  multiply(0);
  for (int64_t i = 0; i < groups * H; ++i) {
    if (i + 1 < groups * H) multiply(i + 1);
    const int64_t g = i / H;
    const GroupFactors& f = factors[g];
    const TileSums& current = sums[i % 2];
    const Vec d = Vec::load(w.scales + i * kTile);
    const Vec m = F::kHasMin ? Vec::load(w.mins + g * kTile) : Vec::zero();
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      Int sum = Int::load(current.q + r * kTile);
      if constexpr (Shape::kTwice) sum = sum.times_16() + Int::load(current.fine + r * kTile);
      acc[r] = fma(sum.to_float(), d * Vec::broadcast(f.scale[r]), acc[r]);
      if constexpr (F::kHasMin) acc[r] = fma(m, Vec::broadcast(f.scaled_sum[r]), acc[r]);
    }
  }
  const int64_t column = tile * kTile;
  float* y = args.y + row * args.y_stride + column;
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) {
    if (r < valid) store_tile(acc[r], y + r * args.y_stride, args.w->outputs - column);
  }
}

// Rows up to `row_end` on the tile unit.
template <typename F, bool kWide>
void gemm_amx_tiles(const GemmArgs& args, int64_t row_end) {
  using Shape = TileShape<F, kWide>;
  TileConfig config;
  for (const int dots : {0, 3, 6}) {
    config.rows[dots] = config.rows[dots + 1] = kAmxRows;
    config.bytes_per_row[dots] = 64;
    config.bytes_per_row[dots + 1] = Shape::kDepth;
  }
  for (const int weights : {2, 5}) {
    config.rows[weights] = Shape::kDepth / 4;
    config.bytes_per_row[weights] = 64;
  }
  // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  for (int64_t tile = args.tile_begin; tile < args.tile_end; ++tile) {
    if (tile * kTile >= args.w->outputs) continue;
    const TileWeights<F, kWide> w(*args.w, tile, args.scratch);
    for (int64_t row = args.row_begin; row < row_end; row += kAmxRows) {
      const int64_t left = row_end - row;
      multiply_tile_rows<F, kWide>(args, w, tile, row, left < kAmxRows ? left : kAmxRows);
    }
  }
  _tile_release();
}

template <typename F>
void gemm_amx(const GemmArgs& args) {
  const int64_t rows = args.row_end - args.row_begin;
  const int64_t tail = rows % kAmxRows < kAmxSmallestTail ? rows % kAmxRows : 0;
  const int64_t amx_end = args.row_end - tail;
  if (amx_end > args.row_begin) {
    if (args.x.wide) {
      gemm_amx_tiles<F, true>(args, amx_end);
    } else {
      gemm_amx_tiles<F, false>(args, amx_end);
    }
  }
  if (tail > 0) {
    GemmArgs rest = args;
    rest.row_begin = amx_end;
    gemm_quantized<F>(rest);
  }
}

inline constexpr LinearKernels kAmxLinearKernels = {
    {{&quantize_rows<false, false>, &quantize_rows<false, true>},
     {&quantize_rows<true, false>, &quantize_rows<true, true>}},
    {&gemm_amx<Q4_1>, &gemm_amx<Q4_0>, &gemm_amx<Q8_0>, &gemm_amx<Q4_K>, &gemm_amx<Q5_K>,
     &gemm_amx<Q6_K>, &gemm_dense<Format::kF32>, &gemm_dense<Format::kF16>,
     &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
