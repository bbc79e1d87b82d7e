// Matrix products over packed weights, written once on Vec; compiled for each instruction set.
//
// Canonical arithmetic of one output, whatever the kernel: for each segment of columns ascending,
//   y = fma(float(sum_k high X), step * scale, y)
//   y = fma(float(sum_k low X), step * scale / 256, y)     (when wide)
// from y = 0, with the integer sums exact (linear_table.h). Dense formats: y = fma(w_k, x_k, y), k
// ascending.
#pragma once

#include "int_lanes.h"
#include "linear_table.h"
#include "partial.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// How a quantised format is packed.
template <int bits, int halves>
struct Packing {
  static constexpr int kBits = bits;
  static constexpr int kHalves = halves;  // factors per group
  static constexpr int kPackedBytes = kGroup * kTile * bits / 8;
};
using Nibbles = Packing<4, 1>;
using Bytes = Packing<8, 1>;
using HalfBytes = Packing<8, 2>;  // with a factor for each half of a group

// Rows that share the loads of a tile pair; as many as the registers hold.
#if defined(__AVX512F__)
inline constexpr int kRowBlock = 6;
#else
inline constexpr int kRowBlock = 2;
#endif

// The T of linear_table.h of two quads of columns: 0 and 1 of the first, 2 and 3 of the first, ...
struct TwoQuads {
  Words first_even, first_odd, second_even, second_odd;
};

// One packed group; its factors and offsets stay in registers.
template <typename P>
struct PackedGroup {
  const uint8_t* packed;
  Words factors[P::kHalves], offsets[P::kHalves];

  SHOAL_INLINE explicit PackedGroup(const uint8_t* group) : packed(group) {
    const auto* from = reinterpret_cast<const int16_t*>(group + P::kPackedBytes);
    for (int half = 0; half < P::kHalves; ++half) {
      factors[half] = Words::load_pairs(from + half * kTile);
      offsets[half] = Words::load_pairs(from + (P::kHalves + half) * kTile);
    }
  }
  // Quads j and j + 4.
  SHOAL_INLINE TwoQuads quads(int j) const {
    constexpr int kLast = P::kHalves - 1;
    const Words f0 = factors[0], f1 = factors[kLast], o0 = offsets[0], o1 = offsets[kLast];
    const Words p = Words::load(packed + j * 64);
    if constexpr (P::kBits == 4) {
      const Words mask = Words::broadcast(0x0f);
      return {(p & mask) * f0 + o0, (shift_right_unsigned<8>(p) & mask) * f0 + o0,
              (shift_right_unsigned<4>(p) & mask) * f1 + o1,
              shift_right_unsigned<12>(p) * f1 + o1};
    } else {
      const Words q = Words::load(packed + (j + 4) * 64), mask = Words::broadcast(-256);
      return {multiply_high(shift_left<8>(p), f0) + o0, multiply_high(p & mask, f0) + o0,
              multiply_high(shift_left<8>(q), f1) + o1, multiply_high(q & mask, f1) + o1};
    }
  }
};

// The high or low part of T, in 16 bits.
template <bool kLow>
SHOAL_INLINE Words part(Words t) {
  if constexpr (kLow) return (t & Words::broadcast(0xff)) + Words::broadcast(-128);
  return shift_right<8>(t);
}

template <bool kLow>
SHOAL_INLINE TwoQuads part(const TwoQuads& t) {
  return {part<kLow>(t.first_even), part<kLow>(t.first_odd), part<kLow>(t.second_even),
          part<kLow>(t.second_odd)};
}

// A tile read as it is packed: for few rows, where the weights' bytes are what costs.
template <typename P, bool kLow>
struct PackedTile {
  const uint8_t* groups;
  int64_t group_bytes;

  struct Group {
    PackedGroup<P> group;
    SHOAL_INLINE TwoQuads quads(int j) const { return part<kLow>(group.quads(j)); }
  };

  PackedTile(const PackedMatrix& w, int64_t tile, int64_t segment, uint8_t*)
      : groups(w.tile(tile) + w.first_group(segment) * w.group_bytes),
        group_bytes(w.group_bytes) {}
  SHOAL_INLINE Group group(int64_t g) const {
    return {PackedGroup<P>(groups + g * group_bytes)};
  }
};

// A segment of a tile unpacked to 16 bits in the caches: for many rows.
template <typename P, bool kLow>
struct UnpackedTile {
  int16_t* words;  // [groups][4][4][16][2]

  struct Group {
    const int16_t* words;
    SHOAL_INLINE TwoQuads quads(int j) const {
      const int16_t* in = words + j * 8 * kTile;
      return {Words::load(in), Words::load(in + 2 * kTile), Words::load(in + 4 * kTile),
              Words::load(in + 6 * kTile)};
    }
  };

  UnpackedTile(const PackedMatrix& w, int64_t tile, int64_t segment, uint8_t* scratch)
      : words(reinterpret_cast<int16_t*>(scratch)) {
    const PackedTile<P, kLow> packed(w, tile, segment, nullptr);
    const int64_t groups = w.end_group(segment) - w.first_group(segment);
    int16_t* out = words;
    for (int64_t g = 0; g < groups; ++g) {
      const auto group = packed.group(g);
      for (int j = 0; j < 4; ++j, out += 8 * kTile) {
        const TwoQuads quads = group.quads(j);
        quads.first_even.store(out);
        quads.first_odd.store(out + 2 * kTile);
        quads.second_even.store(out + 4 * kTile);
        quads.second_odd.store(out + 6 * kTile);
      }
    }
  }
  SHOAL_INLINE Group group(int64_t g) const { return {words + g * kGroup * kTile}; }
};

// Two neighbouring tiles and the segment that is multiplied.
struct SegmentPair {
  int64_t tile, segment;
};

// y of one row and tile += sum * step * scale, or = in the first pass.
SHOAL_INLINE void add_sums(const GemmArgs& args, Vec sums, Vec scaled_step, int64_t row,
                           int64_t tile, bool first) {
  const int64_t column = tile * kTile, left = args.w->outputs - column;
  if (left <= 0) return;
  float* y = args.y + row * args.y_stride + column;
  store_first(fma(sums, scaled_step, first ? Vec::zero() : load_first(y, left)), y, left);
}

// R rows from `row` on times one segment of two neighbouring tiles. kLow: their low parts.
template <int R, bool kLow, typename Tile>
void multiply_rows(const GemmArgs& args, const Tile* w, SegmentPair at, int64_t row) {
  const PackedMatrix& m = *args.w;
  const int64_t groups = m.end_group(at.segment) - m.first_group(at.segment);
  const int64_t row_words = m.groups * kGroup;
  const int16_t* x = reinterpret_cast<const int16_t*>(args.x.x) + row * row_words +
                     m.first_group(at.segment) * kGroup;
  Int dot[R][2];
  for (auto& sums : dot) sums[0] = sums[1] = Int::zero();
  for (int64_t g = 0; g < groups; ++g, x += kGroup) {
    for (int c = 0; c < 2; ++c) {
      const auto group = w[c].group(g);
      for (int j = 0; j < 4; ++j) {
        const TwoQuads q = group.quads(j);
        for (int r = 0; r < R; ++r) {
          const int16_t* xs = x + r * row_words + 4 * j;
          dot[r][c] = dot2(dot[r][c], q.first_even, xs);
          dot[r][c] = dot2(dot[r][c], q.first_odd, xs + 2);
          dot[r][c] = dot2(dot[r][c], q.second_even, xs + 16);
          dot[r][c] = dot2(dot[r][c], q.second_odd, xs + 18);
        }
      }
    }
  }
  const Vec part_size = Vec::broadcast(kLow ? 1.0f / 256.0f : 1.0f);
  for (int c = 0; c < 2; ++c) {
    const Vec step = Vec::load(m.steps(at.tile + c) + at.segment * kTile);
    for (int r = 0; r < R; ++r) {
      const Vec scale = Vec::broadcast(args.x.scales[(row + r) * m.segments + at.segment]);
      add_sums(args, dot[r][c].to_float(), step * scale * part_size, row + r, at.tile + c,
               at.segment == 0 && !kLow);
    }
  }
}

template <int R, bool kLow, typename Tile>
void multiply_tail(const GemmArgs& args, const Tile* w, SegmentPair at, int64_t row) {
  if constexpr (R > 0) {
    if (args.row_end - row == R) {
      multiply_rows<R, kLow>(args, w, at, row);
    } else {
      multiply_tail<R - 1, kLow>(args, w, at, row);
    }
  }
}

template <template <typename, bool> typename Tile, typename P, bool kLow>
void multiply_segment(const GemmArgs& args, SegmentPair at) {
  const Tile<P, kLow> w[2] = {
      {*args.w, at.tile, at.segment, args.scratch},
      {*args.w, at.tile + 1, at.segment, args.scratch + kTile * kLongestSegment * 2}};
  int64_t row = args.row_begin;
  for (; row + kRowBlock <= args.row_end; row += kRowBlock) {
    multiply_rows<kRowBlock, kLow>(args, w, at, row);
  }
  multiply_tail<kRowBlock - 1, kLow>(args, w, at, row);
}

template <template <typename, bool> typename Tile, typename P>
void gemm_tiles(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    for (int64_t segment = 0; segment < args.w->segments; ++segment) {
      multiply_segment<Tile, P, false>(args, {tile, segment});
      if (args.wide) multiply_segment<Tile, P, true>(args, {tile, segment});
    }
  }
}

template <typename P>
void gemm_quantized(const GemmArgs& args) {
  if (args.row_end - args.row_begin <= kRowBlock) {
    gemm_tiles<PackedTile, P>(args);
  } else {
    gemm_tiles<UnpackedTile, P>(args);
  }
}

template <Format format>
SHOAL_INLINE Vec load_dense(const uint8_t* p) {
  if constexpr (format == Format::kF32) return Vec::load(reinterpret_cast<const float*>(p));
  if constexpr (format == Format::kF16) return Vec::load_half(reinterpret_cast<const uint16_t*>(p));
  return Vec::load_bf16(reinterpret_cast<const uint16_t*>(p));
}

template <Format format, int R>
void multiply_dense_rows(const GemmArgs& args, int64_t tile, int64_t row) {
  constexpr int64_t kStep = kTile * (format == Format::kF32 ? 4 : 2);
  const uint8_t* w[2] = {args.w->tile(tile), args.w->tile(tile + 1)};
  const float* x = args.dense + row * args.dense_stride;
  Vec acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Vec::zero();
  for (int64_t k = 0; k < args.w->inputs; ++k) {
    const Vec w0 = load_dense<format>(w[0] + k * kStep), w1 = load_dense<format>(w[1] + k * kStep);
    for (int r = 0; r < R; ++r) {
      const Vec xs = Vec::broadcast(x[r * args.dense_stride + k]);
      acc[r][0] = fma(w0, xs, acc[r][0]);
      acc[r][1] = fma(w1, xs, acc[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_first(acc[r][c], args.y + (row + r) * args.y_stride + column,
                  args.w->outputs - column);
    }
  }
}

template <Format format>
void gemm_dense(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    int64_t row = args.row_begin;
    for (; row + kRowBlock <= args.row_end; row += kRowBlock) {
      multiply_dense_rows<format, kRowBlock>(args, tile, row);
    }
    for (; row < args.row_end; ++row) multiply_dense_rows<format, 1>(args, tile, row);
  }
}

// X as int16: [rows][groups][32].
struct WordLayout {
  SHOAL_INLINE static void store(Vec x, const PackedMatrix& w, const QuantizedRows& out,
                                 int64_t row, int64_t column) {
    x.store_int16(reinterpret_cast<int16_t*>(out.x) + row * w.groups * kGroup + column);
  }
};

// One row and segment: scale = max|x| / kActivationLevels, X rounded to nearest even. Layout::store
// rounds sixteen columns and puts them in place. A column that is not finite makes the scale NaN.
template <typename Layout>
SHOAL_INLINE void quantize_segment(const float* x, const PackedMatrix& w, int64_t row,
                                   int64_t segment, const QuantizedRows& out) {
  constexpr float kLevels = kActivationLevels;
  constexpr float kSmallest = 1e-30f;  // below it levels / x could overflow
  const int64_t begin = w.first_group(segment) * kGroup;
  const int64_t end = w.end_group(segment) * kGroup < w.inputs ? w.end_group(segment) * kGroup
                                                               : w.inputs;
  Vec highest = Vec::zero(), poison = Vec::zero();
  for (int64_t column = begin; column < end; column += kLanes) {
    const Vec v = Vec::load(x + column);
    highest = max(abs(v), highest);
    poison = fma(v, Vec::zero(), poison);
  }
  const float largest = reduce_max(highest);
  const bool is_zero = !(largest > kSmallest);
  out.scales[row * w.segments + segment] =
      (is_zero ? 0.0f : largest / kLevels) + reduce_add(poison);
  const Vec inverse = Vec::broadcast(is_zero ? 0.0f : kLevels / largest);
  for (int64_t column = begin; column < end; column += kLanes) {
    Layout::store(Vec::load(x + column) * inverse, w, out, row, column);
  }
}

template <typename Layout>
void quantize_rows(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                   const PackedMatrix& w, const QuantizedRows& out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t segment = 0; segment < w.segments; ++segment) {
      quantize_segment<Layout>(x + row * x_stride, w, row, segment, out);
    }
  }
}

inline constexpr LinearKernels kLinearKernels = {
    &quantize_rows<WordLayout>,
    {&gemm_quantized<Nibbles>, &gemm_quantized<Nibbles>, &gemm_quantized<Bytes>,
     &gemm_quantized<Nibbles>, &gemm_quantized<Bytes>, &gemm_quantized<HalfBytes>,
     &gemm_dense<Format::kF32>, &gemm_dense<Format::kF16>, &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE
