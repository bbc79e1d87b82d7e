// Matrix products on AMX int8 tiles: 16 rows x 16 columns x one group at a time.
//
// The tile unit replaces the integer sums of linear_kernels.h, which are exact in any order; the fp32
// part is the same, so the bits are too.
#pragma once

#include "linear_kernels.h"

#if defined(__AMX_INT8__)

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

// A tile unpacked to signed bytes (q - zero) and fp32 scales.
template <typename F>
struct SignedTile {
  const int8_t* quants;  // [groups][8][16][4]
  const float* scales;   // [groups][kHalves][16]
  const float* mins;     // [groups][16]

  SignedTile(const PackedMatrix& w, int64_t tile, uint8_t* scratch) {
    const UnpackedTile<F> unpacked(w, tile, scratch);
    if constexpr (F::kZero != 0) {
      const __m512i zero = _mm512_set1_epi8(static_cast<char>(F::kZero));
      for (int64_t i = 0; i < w.inputs * kTile; i += 64) {
        store_bytes(scratch + i, _mm512_sub_epi8(load_bytes(unpacked.quants + i), zero));
      }
      quants = reinterpret_cast<const int8_t*>(scratch);
    } else {
      quants = reinterpret_cast<const int8_t*>(unpacked.quants);
    }
    scales = unpacked.scales;
    mins = unpacked.mins;
  }
};

// Integer sums of 16 rows x 16 columns over one group (or half group): dots[r][c] = sum_k x q. Tile
// registers are part of the instruction, hence a macro.
#define SHOAL_TILE_DOTS(dots_tile, x_tile, w_tile, x, x_stride, dots) \
  do {                                                                \
    _tile_zero(dots_tile);                                            \
    _tile_loadd(x_tile, x, x_stride);                                 \
    _tile_dpbssd(dots_tile, x_tile, w_tile);                          \
    _tile_stored(dots_tile, dots, 64);                                \
  } while (false)

struct alignas(64) TileSums {
  int32_t q[kAmxRows * kTile];
  int32_t fine[kAmxRows * kTile];
};

// Rows `row` to `row + 15`, of which `valid` are stored; the others are padding.
template <typename F, bool kWide>
void multiply_tile_rows(const GemmArgs& args, const SignedTile<F>& w, int64_t tile, int64_t row,
                        int64_t valid) {
  constexpr int H = F::kHalves;
  constexpr int kDepth = kGroup / H;
  const int64_t groups = args.w->groups(), inputs = args.w->inputs;
  const int8_t* x = args.x.q + row * inputs;
  const int8_t* fine = kWide ? args.x.fine + row * inputs : nullptr;
  const GroupFactors* factors = args.x.factors + row / kRowPadding * groups;
  TileSums sums[2];
  Vec acc[kAmxRows];
#pragma GCC unroll 16
  for (Vec& a : acc) a = Vec::zero();
  const auto multiply = [&](int64_t i) __attribute__((always_inline)) {  // i: (half) group
    const int8_t* ws = w.quants + i * kDepth * kTile;
    if (i % 2 == 0) {
      _tile_loadd(2, ws, 64);
      SHOAL_TILE_DOTS(0, 1, 2, x + i * kDepth, inputs, sums[0].q);
      if constexpr (kWide) SHOAL_TILE_DOTS(6, 7, 2, fine + i * kDepth, inputs, sums[0].fine);
    } else {
      _tile_loadd(5, ws, 64);
      SHOAL_TILE_DOTS(3, 4, 5, x + i * kDepth, inputs, sums[1].q);
      if constexpr (kWide) SHOAL_TILE_DOTS(6, 7, 5, fine + i * kDepth, inputs, sums[1].fine);
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
      if constexpr (kWide) sum = sum.times_256() + Int::load(current.fine + r * kTile);
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

template <typename F>
void gemm_amx(const GemmArgs& args) {
  const int64_t rows = args.row_end - args.row_begin;
  const int64_t tail = rows % kAmxRows < kAmxSmallestTail ? rows % kAmxRows : 0;
  const int64_t amx_end = args.row_end - tail;
  if (amx_end > args.row_begin) {
    constexpr int kDepth = kGroup / F::kHalves;
    TileConfig config;
    for (const int dots : {0, 3, 6}) {
      config.rows[dots] = config.rows[dots + 1] = kAmxRows;
      config.bytes_per_row[dots] = 64;
      config.bytes_per_row[dots + 1] = kDepth;
    }
    for (const int weights : {2, 5}) {
      config.rows[weights] = kDepth / 4;
      config.bytes_per_row[weights] = 64;
    }
    // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    for (int64_t tile = args.tile_begin; tile < args.tile_end; ++tile) {
      if (tile * kTile >= args.w->outputs) continue;
      const SignedTile<F> w(*args.w, tile, args.scratch);
      for (int64_t row = args.row_begin; row < amx_end; row += kAmxRows) {
        const int64_t left = amx_end - row;
        const int64_t valid = left < kAmxRows ? left : kAmxRows;
        if (args.x.fine != nullptr) {
          multiply_tile_rows<F, true>(args, w, tile, row, valid);
        } else {
          multiply_tile_rows<F, false>(args, w, tile, row, valid);
        }
      }
    }
    _tile_release();
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
