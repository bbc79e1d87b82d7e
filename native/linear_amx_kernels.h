// Matrix products on AMX int8 tiles: 16 rows x 16 columns x one group at a time.
//
// The tile unit replaces the integer sums of linear_kernels.h, which are exact in any order; the fp32
// part is the same, so the bits are too.
#pragma once

#include "linear_kernels.h"

#if defined(__AMX_INT8__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kAmxRows = 16;
inline constexpr int kAmxSmallestTail = 5;  // fewer rows are cheaper without tiles

// Layout of Intel's tile configuration, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tile registers; the intrinsics paste the name into the instruction, so they must be literals.
#define SHOAL_TILE_DOTS 0         // 16 rows x 16 int32
#define SHOAL_TILE_ACTIVATIONS 1  // 16 rows x depth bytes
#define SHOAL_TILE_WEIGHTS 2      // depth / 4 rows x 16 x 4 bytes

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

// Rows `row` to `row + 15`, of which `valid` are stored; the others are padding.
template <typename F>
void multiply_tile_rows(const GemmArgs& args, const SignedTile<F>& w, int64_t tile, int64_t row,
                        int64_t valid) {
  constexpr int H = F::kHalves;
  constexpr int kDepth = kGroup / H;
  const int64_t groups = args.w->groups(), inputs = args.w->inputs;
  const int8_t* x = args.x.q + row * inputs;
  const float* scale = args.x.scale + row * groups;
  const float* scaled_sum = args.x.scaled_sum + row * groups;
  alignas(64) int32_t dots[kAmxRows * kTile];
  Vec acc[kAmxRows];
#pragma GCC unroll 16
  for (Vec& a : acc) a = Vec::zero();
  for (int64_t g = 0; g < groups; ++g) {
    for (int h = 0; h < H; ++h) {
      _tile_zero(SHOAL_TILE_DOTS);
      _tile_loadd(SHOAL_TILE_ACTIVATIONS, x + g * kGroup + h * kDepth, inputs);
      _tile_loadd(SHOAL_TILE_WEIGHTS, w.quants + g * (kGroup * kTile) + h * (kDepth * kTile), 64);
      _tile_dpbssd(SHOAL_TILE_DOTS, SHOAL_TILE_ACTIVATIONS, SHOAL_TILE_WEIGHTS);
      _tile_stored(SHOAL_TILE_DOTS, dots, 64);
      const Vec d = Vec::load(w.scales + (g * H + h) * kTile);
#pragma GCC unroll 16
      for (int r = 0; r < kAmxRows; ++r) {
        const Vec s = Vec::broadcast(scale[r * groups + g]);
        acc[r] = fma(Vec::load_int32(dots + r * kTile), d * s, acc[r]);
      }
    }
    if constexpr (F::kHasMin) {
      const Vec m = Vec::load(w.mins + g * kTile);
#pragma GCC unroll 16
      for (int r = 0; r < kAmxRows; ++r) {
        acc[r] = fma(m, Vec::broadcast(scaled_sum[r * groups + g]), acc[r]);
      }
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
    config.rows[SHOAL_TILE_DOTS] = config.rows[SHOAL_TILE_ACTIVATIONS] = kAmxRows;
    config.rows[SHOAL_TILE_WEIGHTS] = kDepth / 4;
    config.bytes_per_row[SHOAL_TILE_DOTS] = config.bytes_per_row[SHOAL_TILE_WEIGHTS] = 64;
    config.bytes_per_row[SHOAL_TILE_ACTIVATIONS] = kDepth;
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
