// What the linear kernels of each instruction set are given, and the table that they fill.
#pragma once

#include <cstdint>

#include "quant_blocks.h"

namespace shoal {

// Code that several instruction sets share must never be emitted out of line: the linker would keep one
// copy for all.
#define SHOAL_ALWAYS_INLINE inline __attribute__((always_inline))

inline constexpr int kTile = 16;        // output columns of a tile: the lanes of a vector
inline constexpr int kRowPadding = 16;  // quantised rows come in whole blocks of so many

// Quantised weights and activations are integers whose products are summed exactly over a segment of
// columns. The longest keeps every sum below 2^31: 640 * 8191 * 128.
inline constexpr int64_t kLongestSegment = 640;
inline constexpr int kActivationLevels = 8191;  // 14 bits

// A packed matrix: tiles of 16 outputs, an even number of them (the last ones may be padding).
//
// A quantised weight is step * W: W an integer of 16 bits, and a step for each output and segment.
// Instead of W the tile holds what the file has, and for each output and (half) group of 32 columns how
// W follows from it. With p the byte or nibble of the file, T = W + 128 modulo 2^16 is
//   p * factor + offset                            for nibbles,
//   (256 p * factor + 2^14) / 2^15 + offset        for signed bytes, rounded down.
// W = 256 * high + low with high = T >> 8 and low = (T mod 256) - 128, which are signed bytes.
//
// A quantised tile holds, one after the other,
//   groups [groups] of group_bytes:
//     packed   8 bits: [8][16][4] bytes, quad j being columns 4j to 4j+3 of each output;
//              4 bits: [4][16][4] bytes, low nibbles for quad j, high nibbles for quad j + 4;
//              in the order 0, 2, 1, 3 within a quad, so that the even bytes are neighbours;
//     factors  [1 or 2][16] of int16, two for the halves of a Q6_K group;
//     offsets  [1 or 2][16] of int16;
//   steps  [segments][16] of float: those of `high`, 256 times those of W.
// A dense tile holds [inputs][16] elements.
struct PackedMatrix {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t tiles;
  int64_t tile_bytes;
  int64_t groups;  // even: the last may be padding, whose weights are zero
  int64_t group_bytes;
  int64_t segments;
  int64_t segment_groups;  // even; the last segment may have fewer
  const uint8_t* data;

  SHOAL_ALWAYS_INLINE const uint8_t* tile(int64_t t) const { return data + t * tile_bytes; }
  SHOAL_ALWAYS_INLINE const float* steps(int64_t t) const {
    return reinterpret_cast<const float*>(tile(t) + groups * group_bytes);
  }
  SHOAL_ALWAYS_INLINE int64_t first_group(int64_t segment) const {
    return segment * segment_groups;
  }
  SHOAL_ALWAYS_INLINE int64_t end_group(int64_t segment) const {
    const int64_t end = first_group(segment + 1);
    return end < groups ? end : groups;
  }
};

// Activations quantised per row and segment: x = scale * X with |X| <= kActivationLevels. How X is laid
// out is the instruction set's own affair; it takes two bytes a column. Columns of padding, which meet
// zero weights, hold anything.
struct QuantizedRows {
  int8_t* x;
  float* scales;  // [rows][segments]
};

struct GemmArgs {
  const PackedMatrix* w;
  bool wide;           // multiply by W, else by 256 * high alone
  QuantizedRows x;     // quantised formats
  const float* dense;  // dense formats: [rows][inputs], stride dense_stride
  int64_t dense_stride;
  int64_t row_begin, row_end;    // row_begin: a multiple of kRowPadding
  int64_t tile_begin, tile_end;  // even
  float* y;                      // [rows][outputs], stride y_stride
  int64_t y_stride;
  uint8_t* scratch;  // kGemmScratchBytes, aligned to 64; of the calling thread alone
};

// Room to unpack a segment of two tiles to 16 bits, and for four tiles of sums.
inline constexpr int64_t kGemmScratchBytes = 2 * kTile * kLongestSegment * 2 + 4 * 1024;

inline constexpr int kNumFormats = 9;

struct LinearKernels {
  // Quantises rows for products with `w`.
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                        const PackedMatrix& w, const QuantizedRows& out);
  void (*gemm[kNumFormats])(const GemmArgs& args);  // indexed by Format
};

}  // namespace shoal
