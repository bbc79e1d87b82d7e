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

// Integer sums of 16 rows x 16 columns over one group (or half group): dots[r][c] = sum_k x q.
// Uses the tile registers `dots_tile` to `dots_tile + 2`.
#define SHOAL_TILE_DOTS(dots_tile, x_tile, w_tile, x, x_stride, w, dots) \
  do {                                                                  \
    _tile_zero(dots_tile);                                              \
    _tile_loadd(x_tile, x, x_stride);                                   \
    _tile_loadd(w_tile, w, 64);                                         \
    _tile_dpbssd(dots_tile, x_tile, w_tile);                            \
    _tile_stored(dots_tile, dots, 64);                                  \
  } while (false)

// Rows `row` to `row + 15`, of which `valid` are stored; the others are padding.
template <typename F>
void multiply_tile_rows(const GemmArgs& args, const SignedTile<F>& w, int64_t tile, int64_t row,
                        int64_t valid) {
  constexpr int H = F::kHalves;
  constexpr int kDepth = kGroup / H;
  const int64_t groups = args.w->groups(), inputs = args.w->inputs;
  const int8_t* x = args.x.q + row * inputs;
  const GroupFactors* factors = args.x.factors + row / kRowPadding * groups;
  alignas(64) int32_t dots[2][kAmxRows * kTile];
  Vec acc[kAmxRows];
#pragma GCC unroll 16
  for (Vec& a : acc) a = Vec::zero();
  const auto multiply = [&](int64_t i) __attribute__((always_inline)) {  // i: (half) group
    if (i % 2 == 0) {
      SHOAL_TILE_DOTS(0, 1, 2, x + i * kDepth, inputs, w.quants + i * kDepth * kTile, dots[0]);
    } else {
      SHOAL_TILE_DOTS(3, 4, 5, x + i * kDepth, inputs, w.quants + i * kDepth * kTile, dots[1]);
    }
  };
  // The tile unit works one group ahead of the fp32 part.
  multiply(0);
  for (int64_t i = 0; i < groups * H; ++i) {
    if (i + 1 < groups * H) multiply(i + 1);
    const int64_t g = i / H;
    const GroupFactors& f = factors[g];
    const int32_t* sums = dots[i % 2];
    const Vec d = Vec::load(w.scales + i * kTile);
    const Vec m = F::kHasMin ? Vec::load(w.mins + g * kTile) : Vec::zero();
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      const Vec s = Vec::broadcast(f.scale[r]);
      acc[r] = fma(Vec::load_int32(sums + r * kTile), d * s, acc[r]);
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
    for (int t = 0; t < 6; t += 3) {
      config.rows[t] = config.rows[t + 1] = kAmxRows;
      config.rows[t + 2] = kDepth / 4;
      config.bytes_per_row[t] = config.bytes_per_row[t + 2] = 64;
      config.bytes_per_row[t + 1] = kDepth;
    }
    // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    for (int64_t tile = args.tile_begin; tile < args.tile_end; ++tile) {
      if (tile * kTile >= args.w->outputs) continue;
      const SignedTile<F> w(*args.w, tile, args.scratch);
      for (int64_t row = args.row_begin; row < amx_end; row += kAmxRows) {
        const int64_t left = amx_end - row;
        multiply_tile_rows<F>(args, w, tile, row, left < kAmxRows ? left : kAmxRows);
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
    &quantize_rows,
    {&gemm_amx<Q4_1>, &gemm_amx<Q4_0>, &gemm_amx<Q8_0>, &gemm_amx<Q4_K>, &gemm_amx<Q5_K>,
     &gemm_amx<Q6_K>, &gemm_dense<Format::kF32>, &gemm_dense<Format::kF16>,
     &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
