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
//   mins    where the format has them: int16 [groups / 2][16][2], then float [16], the unit of each output.
// Its weights are scale * (quant - zero) + min * unit: mins are those of quants about their middle, and small.
// A dense tile holds [inputs][16] elements.
struct PackedMatrix {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t tiles;
  int64_t tile_bytes;
  int64_t scale_offset;
  int64_t min_offset;
  int64_t min_unit_offset;
  const uint8_t* data;

  SHOAL_ALWAYS_INLINE int64_t groups() const { return inputs / kGroup; }
  SHOAL_ALWAYS_INLINE const uint8_t* tile(int64_t t) const { return data + t * tile_bytes; }
};

// Activations as integers: x = unit * 2^shift * q, or of a row's largest groups, where the product is to be
// `wide`, unit * 2^shift * (16 * q + fine).
//
// The unit is of the row, the shift of a group of 32 columns, so that a product needs no scale of the
// activations: a group whose largest is half of the row's has one less, and so on. What a row holds lies
// together: a QuantizedRow, its sums and its groups.
struct QuantizedRow {
  float unit;      // NaN if the row has a number that is not finite
  float sum_unit;  // sum over a group = unit * sum_unit * its int16
  bool has_small_groups;  // of a negative shift, whose int16 sums are zero
};
// A group, or its second plane, which has `fine` for q (zero unless the shift is kMostShift) and no shift or sum.
struct QuantizedGroup {
  int8_t q[kGroup];
  int32_t start[2];  // -zero * sum(q), zero being that of the weights; of each half where these have scales
  int32_t shift;
  int32_t sum;  // of q, or of 16 * q + fine
};
inline constexpr int kMostShift = 6;
inline constexpr int kLeastShift = -14;  // of groups a millionth of the row's largest, and smaller

// In size; products of 32 of each add up exactly in int32.
inline constexpr int kLargestMin = 8191;
inline constexpr uint32_t kLargestSum = 8191;
inline constexpr int64_t kMinGroups = 32;

struct QuantizedRows {
  bool wide;        // two planes for each group, one after the other
  int64_t groups;
  uint8_t* data;    // [rows][stride]

  SHOAL_ALWAYS_INLINE QuantizedRow& row(int64_t r) const {
    return *reinterpret_cast<QuantizedRow*>(data + r * stride());
  }
  SHOAL_ALWAYS_INLINE int16_t* sums(int64_t r) const {  // [groups], then a zero if that is odd
    return reinterpret_cast<int16_t*>(&row(r) + 1);
  }
  SHOAL_ALWAYS_INLINE QuantizedGroup* group(int64_t r) const {  // [groups][1 or 2]
    return reinterpret_cast<QuantizedGroup*>(data + r * stride() + header_bytes());
  }
  SHOAL_ALWAYS_INLINE int64_t header_bytes() const {
    return static_cast<int64_t>(sizeof(QuantizedRow)) + (groups + 1) / 2 * 4;
  }
  // An odd number of cache lines, so that neighbours fall into different sets of the cache.
  SHOAL_ALWAYS_INLINE int64_t stride() const {
    const auto bytes = header_bytes() + groups * (wide ? 2 : 1) * static_cast<int64_t>(sizeof(QuantizedGroup));
    return (bytes + 63) / 128 * 128 + 64;
  }
};

// What the weights ask of the activations that they are multiplied with.
struct QuantizeArgs {
  int32_t zero;
  bool halves;  // have scales of their own
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
  uint8_t* scratch;  // two tiles, unpacked; aligned to 64; of the calling thread alone
};

// Room to unpack a tile to bytes and fp32 scales.
SHOAL_ALWAYS_INLINE constexpr int64_t unpacked_tile_bytes(int64_t inputs) {
  return kTile * (inputs + inputs / kGroup * 2 * static_cast<int64_t>(sizeof(float)));
}

inline constexpr int kNumQuantizedFormats = 6;
inline constexpr int kNumFormats = 9;

struct LinearKernels {
  // Writes rows [row_begin, row_end) of `out`.
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                        const QuantizeArgs& args, const QuantizedRows& out);
  void (*gemm[kNumFormats])(const GemmArgs& args);  // indexed by Format
};

}  // namespace shoal
