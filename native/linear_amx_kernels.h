// Matrix products on AMX int8 tiles: 16 rows x 32 columns, 64 columns of the input at a time.
//
// The tile unit gives the integer sums of linear_kernels.h, which are exact in any order; what follows
// in fp32 is the same, so the bits are too. X is split into bytes as 128 * high + low.
#pragma once

#include "linear_kernels.h"

#if defined(__AMX_INT8__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kAmxRows = 16;
inline constexpr int kAmxDepth = 64;           // columns of the input in one product
inline constexpr int kTileBytes = 16 * 64;     // of a full tile register
inline constexpr int kLowBits = 7;             // of X

// Layout of Intel's tile configuration, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums, 4 and 5 the parts of X, 6 and 7 weights.
inline void configure_tiles(int rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kAmxDepth / 4);
  }
  // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// X as tiles: [rows / 16][groups / 2][high, low][16][64], columns in the order of the packed weights.
struct TileLayout {
  SHOAL_INLINE static int8_t* tile(const PackedMatrix& w, const QuantizedRows& out, int64_t row,
                                   int64_t column) {
    const int64_t steps = w.groups / 2;
    return out.x + (row / kAmxRows * steps + column / kAmxDepth) * 2 * kTileBytes;
  }
  SHOAL_INLINE static void store(Vec x, const PackedMatrix& w, const QuantizedRows& out,
                                 int64_t row, int64_t column) {
    int8_t* to = tile(w, out, row, column) + row % kAmxRows * 64 + column % kAmxDepth;
    const __m512i q = _mm512_cvtps_epi32(x.v);
    const __m512i low = _mm512_and_si512(q, _mm512_set1_epi32((1 << kLowBits) - 1));
    store_bytes(_mm512_srai_epi32(q, kLowBits), to);
    store_bytes(low, to + kTileBytes);
  }
  SHOAL_INLINE static void store_bytes(__m512i lanes, int8_t* to) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    _mm_store_si128(reinterpret_cast<__m128i*>(to),
                    _mm_shuffle_epi8(_mm512_cvtepi32_epi8(lanes), order));
  }
};

// Unpacks the two groups of a step to bytes, [16][16][4].
struct HighBytes {
  SHOAL_INLINE static __m512i of(Words even, Words odd) {  // odd in the odd bytes
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), _mm512_srli_epi16(even.v, 8), odd.v,
                                     0xca);
  }
};
struct LowBytes {
  SHOAL_INLINE static __m512i of(Words even, Words odd) {
    return _mm512_xor_si512(
        _mm512_set1_epi8(-128),
        _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), even.v, _mm512_slli_epi16(odd.v, 8),
                                  0xca));
  }
};

template <typename Part>
SHOAL_INLINE void store_quads(const TwoQuads& t, uint8_t* first) {
  _mm512_store_si512(first, Part::of(t.first_even, t.first_odd));
  _mm512_store_si512(first + 4 * 64, Part::of(t.second_even, t.second_odd));
}

// Fetches a packed group ahead of its use: the next pair of tiles, whose groups lie where this one's do.
SHOAL_INLINE void prefetch_group(const PackedMatrix& w, const uint8_t* group) {
  for (int64_t byte = 0; byte < w.group_bytes; byte += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(group + 2 * w.tile_bytes + byte), _MM_HINT_T0);
  }
}

// The high parts of a step of two tiles.
template <typename P>
struct NarrowWeights {
  const PackedMatrix& w;
  SegmentPair at;

  SHOAL_INLINE void unpack(int64_t step, uint8_t* w0, uint8_t* w1) const {
    unpack_tile(at.tile, step, w0);
    unpack_tile(at.tile + 1, step, w1);
  }
  SHOAL_INLINE void unpack_tile(int64_t tile, int64_t step, uint8_t* out) const {
    const uint8_t* from = w.tile(tile) + (w.first_group(at.segment) + 2 * step) * w.group_bytes;
    for (int g = 0; g < 2; ++g, from += w.group_bytes, out += kTileBytes / 2) {
      prefetch_group(w, from);
      const PackedGroup<P> group(from);
      for (int j = 0; j < 4; ++j) store_quads<HighBytes>(group.quads(j), out + j * 64);
    }
  }
};

// The high and the low parts of a step of one tile.
template <typename P>
struct WideWeights {
  const PackedMatrix& w;
  SegmentPair at;

  SHOAL_INLINE void unpack(int64_t step, uint8_t* high, uint8_t* low) const {
    const uint8_t* from = w.tile(at.tile) + (w.first_group(at.segment) + 2 * step) * w.group_bytes;
    for (int g = 0; g < 2; ++g, from += w.group_bytes) {
      prefetch_group(w, from);
      const PackedGroup<P> group(from);
      for (int j = 0; j < 4; ++j) {
        const TwoQuads quads = group.quads(j);
        const int64_t place = g * kTileBytes / 2 + j * 64;
        store_quads<HighBytes>(quads, high + place);
        store_quads<LowBytes>(quads, low + place);
      }
    }
  }
};

// Sums of one block of rows with two streams of weights: [stream][high, low part of X][16][16].
struct alignas(64) TileSums {
  int32_t parts[2][2][kAmxRows * kTile];

  SHOAL_INLINE Vec row(int stream, int64_t r) const {
    const __m512i high = _mm512_load_si512(parts[stream][0] + r * kTile);
    const __m512i low = _mm512_load_si512(parts[stream][1] + r * kTile);
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, kLowBits), low))};
  }
};

SHOAL_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

SHOAL_INLINE void multiply_step(const int8_t* x, const uint8_t* w0, const uint8_t* w1) {
  asm volatile("" : : : "memory");  // the loads below don't tell GCC what they read
  _tile_loadd(6, w0, 64);
  _tile_loadd(4, x, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(5, x + kTileBytes, 64);
  _tile_dpbssd(1, 5, 6);
  _tile_loadd(7, w1, 64);
  _tile_dpbssd(2, 4, 7);
  _tile_dpbssd(3, 5, 7);
}

SHOAL_INLINE void store_sums(TileSums& sums) {
  _tile_stored(0, sums.parts[0][0], 64);
  _tile_stored(1, sums.parts[0][1], 64);
  _tile_stored(2, sums.parts[1][0], 64);
  _tile_stored(3, sums.parts[1][1], 64);
}

// All rows times one segment of two streams of weights; finish(sums, r, row) takes the sums of a row.
// The first block of rows is multiplied while the weights are unpacked, one step behind.
template <typename Weights, typename Finish>
SHOAL_INLINE void multiply_row_blocks(const GemmArgs& args, const Weights& weights,
                                      Finish&& finish) {
  const PackedMatrix& m = *args.w;
  const int64_t segment = weights.at.segment;
  const int64_t steps = (m.end_group(segment) - m.first_group(segment)) / 2;
  uint8_t* const w0 = args.scratch;
  uint8_t* const w1 = w0 + kTile * kLongestSegment;
  TileSums sums;
  for (int64_t row = args.row_begin; row < args.row_end; row += kAmxRows) {
    const int8_t* x = TileLayout::tile(m, args.x, row, m.first_group(segment) * kGroup);
    clear_sums();
    if (row == args.row_begin) {
      weights.unpack(0, w0, w1);
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t place = step * kTileBytes, next = place + kTileBytes;
        if (step + 1 < steps) weights.unpack(step + 1, w0 + next, w1 + next);
        multiply_step(x + 2 * place, w0 + place, w1 + place);
      }
    } else {
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t place = step * kTileBytes;
        multiply_step(x + 2 * place, w0 + place, w1 + place);
      }
    }
    store_sums(sums);
    const int64_t left = args.row_end - row, valid = left < kAmxRows ? left : kAmxRows;
    for (int64_t r = 0; r < valid; ++r) finish(sums, r, row + r);
  }
}

template <typename P>
void multiply_narrow(const GemmArgs& args, SegmentPair at) {
  const PackedMatrix& m = *args.w;
  const Vec step0 = Vec::load(m.steps(at.tile) + at.segment * kTile);
  const Vec step1 = Vec::load(m.steps(at.tile + 1) + at.segment * kTile);
  const auto finish = [&](const TileSums& sums, int64_t r, int64_t row)
                          __attribute__((always_inline)) {
    const Vec scale = Vec::broadcast(args.x.scales[row * m.segments + at.segment]);
    add_sums(args, sums.row(0, r), step0 * scale, row, at.tile, at.segment == 0);
    add_sums(args, sums.row(1, r), step1 * scale, row, at.tile + 1, at.segment == 0);
  };
  multiply_row_blocks(args, NarrowWeights<P>{m, at}, finish);
}

template <typename P>
void multiply_wide(const GemmArgs& args, SegmentPair at) {
  const PackedMatrix& m = *args.w;
  const Vec step = Vec::load(m.steps(at.tile) + at.segment * kTile);
  const Vec low_size = Vec::broadcast(1.0f / 256.0f);
  const auto finish = [&](const TileSums& sums, int64_t r, int64_t row)
                          __attribute__((always_inline)) {
    const Vec scaled = step * Vec::broadcast(args.x.scales[row * m.segments + at.segment]);
    add_sums(args, sums.row(0, r), scaled, row, at.tile, at.segment == 0);
    add_sums(args, sums.row(1, r), scaled * low_size, row, at.tile, false);
  };
  multiply_row_blocks(args, WideWeights<P>{m, at}, finish);
}

template <typename P>
void gemm_amx(const GemmArgs& args) {
  const int64_t rows = args.row_end - args.row_begin;
  configure_tiles(static_cast<int>(rows < kAmxRows ? rows : kAmxRows));
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    for (int64_t segment = 0; segment < args.w->segments; ++segment) {
      if (args.wide) {
        multiply_wide<P>(args, {tile, segment});
        multiply_wide<P>(args, {tile + 1, segment});
      } else {
        multiply_narrow<P>(args, {tile, segment});
      }
    }
  }
  _tile_release();
}

inline constexpr LinearKernels kAmxLinearKernels = {
    &quantize_rows<TileLayout>,
    {&gemm_amx<Nibbles>, &gemm_amx<Nibbles>, &gemm_amx<Bytes>, &gemm_amx<Nibbles>,
     &gemm_amx<Bytes>, &gemm_amx<HalfBytes>, &gemm_dense<Format::kF32>, &gemm_dense<Format::kF16>,
     &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
