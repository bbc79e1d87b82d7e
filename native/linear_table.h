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
//   scales  int16: [groups][16][2], scale and min of each output, where the format has mins;
//           else [groups][1 or 2][16], two scales for the halves of a Q6_K group;
//   units   float [16], times 2^(headroom + fit), as sums have been halved so often.
// Its weights are unit * (scale * (quant - zero) + kMinUnits * min), the min being that of quants about their
// middle.
// A dense tile holds [inputs][16] elements.
struct PackedMatrix {
  Format format;
  int64_t outputs;
  int64_t inputs;
  int64_t tiles;
  int64_t tile_bytes;
  int64_t scale_offset;
  int64_t unit_offset;
  int32_t headroom;  // halvings of what groups add to an output, which keep the sum in int32
  bool gated;        // a tile of gates and one of what they gate take turns
  const uint8_t* data;

  SHOAL_ALWAYS_INLINE int64_t groups() const { return inputs / kGroup; }
  SHOAL_ALWAYS_INLINE const uint8_t* tile(int64_t t) const { return data + t * tile_bytes; }
};

inline constexpr int kNumQuantizedFormats = 6;
inline constexpr int kNumFormats = 9;

struct QuantizedFormat {
  int bits;
  bool has_min;
  int halves;  // of a group, which have scales of their own
  int zero;    // the quant that stands for zero, or for the middle of the others where there is a min
  int fit;     // a sum of products of quants fits int16 after so many halvings
};
inline constexpr QuantizedFormat kQuantizedFormats[kNumQuantizedFormats] = {
    {4, true, 1, 8, 0},     // Q4_1
    {4, false, 1, 8, 0},    // Q4_0
    {8, false, 1, 128, 4},  // Q8_0
    {4, true, 1, 8, 0},     // Q4_K
    {8, true, 1, 16, 1},    // Q5_K
    {8, false, 2, 32, 1},   // Q6_K
};

// Activations as integers: x = unit * q / 2^halvings, or of a row's largest groups, where the product is to
// be `wide`, unit * (q + fine / 16).
//
// The unit is of the row, the halvings of a group of 32 columns, so that a product needs no scale of the
// activations: a group whose largest is half of the row's has one, and so on. What a row holds lies together:
// a QuantizedRow, its groups, and where the product is wide, a FineGroup for each group of no halvings.
struct QuantizedRow {
  float unit;  // NaN if the row has a number that is not finite
  int32_t num_fine;
};
struct QuantizedGroup {
  int8_t q[kGroup];
  // Where the sums of products start, one for each half where these have scales: -zero * sum(q), half of 2^fit,
  // and 2^16 * kMinUnits * sum(q).
  int32_t start[2];
  int32_t count;  // headroom + halvings: how often what the group adds to an output is halved
  int32_t half;   // of 2^count
};
struct FineGroup {
  int8_t q[kGroup];
  int32_t start[2];  // as above
  int32_t index;     // of the group
};
inline constexpr int kFineHalvings = 4;

// In these units the sum of a group fits int16, and its lowest bit, which may be missing (see
// linear_kernels.h), is little; after `fit` halvings, as products have them.
inline constexpr int kMinUnits = 8;
// Scales and mins are so small that a term, what a group adds to an output, and its `half` fit int32. A term
// has a sum and 32 products of an activation and a quant, which is 8 * 2^fit from zero at most (half groups: 16
// products of twice that).
inline constexpr int32_t kLargestScale = 24000;
inline constexpr int64_t kLargestTerm = int64_t{kLargestScale} * (kGroup * 127 * (8 + kMinUnits) + 1);
inline constexpr int kMostCount = 30;
static_assert(kLargestTerm + (1 << (kMostCount - 1)) <= INT32_MAX);

struct QuantizedRows {
  bool wide;  // activations of 12 bits in a row's largest groups
  int64_t groups;
  int32_t headroom;  // that of the weights
  uint8_t* data;     // [rows][stride]

  SHOAL_ALWAYS_INLINE QuantizedRow& row(int64_t r) const {
    return *reinterpret_cast<QuantizedRow*>(data + r * stride());
  }
  SHOAL_ALWAYS_INLINE QuantizedGroup* group(int64_t r) const {  // [groups]
    return reinterpret_cast<QuantizedGroup*>(&row(r) + 1);
  }
  SHOAL_ALWAYS_INLINE FineGroup* fine(int64_t r) const {  // [num_fine]
    return reinterpret_cast<FineGroup*>(group(r) + groups);
  }
  // An odd number of cache lines, so that neighbours fall into different sets of the cache.
  SHOAL_ALWAYS_INLINE int64_t stride() const {
    const auto bytes = static_cast<int64_t>(sizeof(QuantizedRow)) +
                       groups * static_cast<int64_t>(sizeof(QuantizedGroup) + (wide ? sizeof(FineGroup) : 0));
    return (bytes + 63) / 128 * 128 + 64;
  }
};

struct GemmArgs {
  const PackedMatrix* w;
  QuantizedRows x;     // quantised formats
  int64_t first_wide;  // fine parts are for the outputs from here on
  const float* dense;  // dense formats: [rows][inputs], stride dense_stride
  int64_t dense_stride;
  int64_t row_begin, row_end;
  int64_t tile_begin, tile_end;  // even
  float* y;                      // [rows][outputs, or half of them if the matrix is gated], stride y_stride
  int64_t y_stride;
  uint8_t* scratch;  // two tiles, unpacked; aligned to 64; of the calling thread alone
};

// Room for the quants of a tile as bytes.
SHOAL_ALWAYS_INLINE constexpr int64_t unpacked_tile_bytes(int64_t inputs) { return kTile * inputs; }

struct LinearKernels {
  // Writes rows [row_begin, row_end) of `out`.
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                        const QuantizedFormat& format, const QuantizedRows& out);
  void (*gemm[kNumFormats])(const GemmArgs& args);  // indexed by Format
};

}  // namespace shoal
