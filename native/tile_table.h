// Linear layers on AMX bf16 tiles: the packed weights, and what their kernels are given.
#pragma once

#include <cstdint>

#include "linear_table.h"

namespace shoal {

// Weights packed for the tile unit, in groups of 32 columns of a pair of tiles (2 x 16 outputs):
//
//   [pairs][groups][2] { scales: half [1 or 2][16], mins: half [16] where the format has them, quants }
//
// A tile has 16 rows, row p being columns 2p and 2p + 1 of each output: 32 quants side by side.
//   8 bits: quants [16][32] of int8, less the zero point;
//   4 bits: quants [4][32] of 16 bits, of which line t holds row 4t + n in its bits 4n to 4n + 3.
// Scales lie before quants so that these can be read from one byte before as well.
// Two scales are for columns 0 to 15 and 16 to 31 of a group. Scales and mins are the file's times 2^shift,
// which keeps all weights in the range of half precision. A min is the weight of quant 8 where quants have 4
// bits, of 0 where they have 8.
//
// Of a gated matrix the first half of the outputs are gates, the second half what they gate: the tiles of
// a pair hold 16 of each.
inline constexpr int kQuantOfMin = 8;  // of quants of 4 bits

// A packed tile with this many halves, scales and mins, for each output.
SHOAL_ALWAYS_INLINE constexpr int64_t packed_tile_bytes(int bits, int halves) {
  return kTile * (kGroup * bits / 8 + 2 * halves);
}

struct TileMatrix {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t pairs;        // the last one may be partly padding
  int64_t tile_bytes;   // of one tile and group
  int shift;
  const uint8_t* data;

  SHOAL_ALWAYS_INLINE int64_t groups() const { return inputs / kGroup; }
  SHOAL_ALWAYS_INLINE const uint8_t* pair(int64_t p) const {
    return data + p * groups() * 2 * tile_bytes;
  }
};

struct TileArgs {
  const TileMatrix* w;
  const uint16_t* x;  // bf16 [rows][x_stride]
  int64_t x_stride;
  int64_t row_begin, row_end;
  int64_t pair_begin, pair_end;
  float* y;  // [rows][outputs], stride y_stride
  int64_t y_stride;
  uint8_t* scratch;  // tile_scratch_bytes(rows), aligned to 64; of the calling thread alone
};

// Where the products of a gated matrix go: bf16(silu(gate) * up * factor), [rows][outputs / 2].
struct GatedOutput {
  uint16_t* x;
  int64_t stride;
  float factor;
};

inline constexpr int kTileRowsMax = 16;

// Groups of a pair of tiles that stay in the first-level cache, in bf16, while many rows go by.
inline constexpr int64_t kGroupsInCache = 18;
inline constexpr int64_t kUnpackedBytes =
    kGroupsInCache * 2 * kTile * kGroup * static_cast<int64_t>(sizeof(uint16_t));

// A thread's room: unpacked groups, then the sums of a pair of tiles for each tile of rows.
SHOAL_ALWAYS_INLINE constexpr int64_t tile_scratch_bytes(int64_t rows) {
  const int64_t row_tiles = (rows + kTileRowsMax - 1) / kTileRowsMax;
  return kUnpackedBytes + row_tiles * kTileRowsMax * 2 * kTile * static_cast<int64_t>(sizeof(float));
}
SHOAL_ALWAYS_INLINE float* tile_sums(uint8_t* scratch) {
  return reinterpret_cast<float*>(scratch + kUnpackedBytes);
}

struct TileKernels {
  // out[k] = bf16(x[k] * factor), rounded to nearest even; inputs is a multiple of 32.
  void (*round_row)(const float* x, int64_t inputs, float factor, uint16_t* out);
  // Both indexed by Format. `y` of the gated ones is not used.
  void (*gemm[kNumQuantizedFormats])(const TileArgs& args);
  void (*gated_gemm[kNumQuantizedFormats])(const TileArgs& args, const GatedOutput& out);
};

}  // namespace shoal
