// What the linear kernels of each instruction set are given, and the table that they fill.
#pragma once

#include <cstdint>

#include "quant_blocks.h"

namespace shoal {

// Code that several instruction sets share must never be emitted out of line: the linker would keep one
// copy for all.
#define SHOAL_ALWAYS_INLINE inline __attribute__((always_inline))

inline constexpr int kTile = 16;  // output columns of a tile: the lanes of a vector

// A packed matrix: tiles of 16 outputs, an even number of them (the last ones may be padding).
//
// A quantised tile holds, one after the other,
//   quants  8 bits: [groups][8][16][4] bytes, the chunk j of a group being columns 4j to 4j+3 of each output;
//           4 bits: [groups][4][16][4] bytes, low nibbles for chunk j, high nibbles for chunk j + 4;
//   scales  [groups][1 or 2][16] of half or float, two for the halves of a Q6_K group;
//   mins    [groups][16] of half or float, where the format has them.
// A dense tile holds [inputs][16] elements.
struct PackedMatrix {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t tiles;
  int64_t tile_bytes;
  int64_t scale_offset;
  int64_t min_offset;
  const uint8_t* data;

  SHOAL_ALWAYS_INLINE int64_t groups() const { return inputs / kGroup; }
  SHOAL_ALWAYS_INLINE const uint8_t* tile(int64_t t) const { return data + t * tile_bytes; }
};

// Activations quantised per row and group: x = scale * q, q of 8 bits, or of 12 bits in two parts.
//
// All arrays are padded to whole blocks of 16 rows. What a kernel needs of a group beside q lies together
// for the 16 rows of a block, so that one pointer reaches it all: lines of 16, one entry for each row.
inline constexpr int kRowPadding = 16;
struct GroupFactors {
  float scale[kRowPadding];
  float scaled_sum[kRowPadding];  // scale * sum(q)
  int32_t sum[kRowPadding];       // sum(q)
  int32_t low_sum[kRowPadding];   // sum(q) over columns 0 to 15, for formats that scale them apart
};
struct QuantizedRows {
  bool wide;              // 12 bits
  int8_t* q;              // [rows][groups][32], or wide [rows][groups][2][32]: q = 16 * coarse + fine
  GroupFactors* factors;  // [rows / 16][groups]
};

struct GemmArgs {
  const PackedMatrix* w;
  QuantizedRows x;     // quantised formats
  const float* dense;  // dense formats: [rows][inputs], stride dense_stride
  int64_t dense_stride;
  int64_t row_begin, row_end;
  int64_t tile_begin, tile_end;  // even
  float* y;                      // [rows][outputs], stride y_stride
  int64_t y_stride;
  uint8_t* scratch;  // gemm_scratch_bytes(inputs), aligned to 64; of the calling thread alone
};

// Room to unpack three tiles to bytes and fp32 scales.
SHOAL_ALWAYS_INLINE constexpr int64_t gemm_scratch_bytes(int64_t inputs) {
  return 3 * kTile * (inputs + inputs / kGroup * 3 * static_cast<int64_t>(sizeof(float)));
}

inline constexpr int kNumQuantizedFormats = 6;
inline constexpr int kNumFormats = 9;

struct LinearKernels {
  // Indexed by whether q has 12 bits, and by whether the weights' format scales half groups.
  void (*quantize_rows[2][2])(const float* x, int64_t x_stride, int64_t row_begin,
                              int64_t row_end, int64_t inputs, const QuantizedRows& out);
  void (*gemm[kNumFormats])(const GemmArgs& args);  // indexed by Format
};

}  // namespace shoal
