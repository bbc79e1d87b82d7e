// Matrix products over packed weights, written once on Vec; compiled for each instruction set.
//
// Canonical arithmetic of one output, whatever the kernel: for each group g of 32 columns ascending,
//   acc = fma(float(sum_k (q_w - zero) q_x), d_w * s_x, acc)   (per half group for Q6_K)
//   acc = fma(m_w, s_x * sum_k q_x, acc)                       (formats with a min)
// with the integer sums exact. Dense formats: acc = fma(w_k, x_k, acc), k ascending.
#pragma once

#include "linear_table.h"
#include "vec.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

// Traits of a quantised format: w = d * (q - kZero) + m.
template <int bits, int zero, bool has_min, bool half_scales, int halves>
struct Quantized {
  static constexpr int kBits = bits;
  static constexpr int kZero = zero;
  static constexpr bool kHasMin = has_min;
  static constexpr bool kHalfScales = half_scales;
  static constexpr int kHalves = halves;  // scales per group
};
using Q4_1 = Quantized<4, 0, true, true, 1>;
using Q4_0 = Quantized<4, 8, false, true, 1>;
using Q8_0 = Quantized<8, 128, false, true, 1>;
using Q4_K = Quantized<4, 0, true, false, 1>;
using Q5_K = Quantized<8, 0, true, false, 1>;
using Q6_K = Quantized<8, 32, false, false, 2>;

// Sixteen int32 lanes, and the 16 x 4 bytes that one multiply-accumulate takes from the weights.
#if defined(__AVX512F__)

using Bytes = __m512i;
struct Int {
  __m512i v;
  static SHOAL_INLINE Int broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
  SHOAL_INLINE Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
SHOAL_INLINE void store_bytes(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }
SHOAL_INLINE Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(0x0f)); }
SHOAL_INLINE Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
// acc[i] += sum of w[4i + j] * x[j] over the four bytes at x.
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, Bytes w, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  return {_mm512_dpbusd_epi32(acc.v, w, _mm512_set1_epi32(quad))};
}
inline constexpr int kRowBlock = 6;

#elif defined(__AVX2__)

struct Bytes {
  __m256i lo, hi;
};
struct Int {
  __m256i lo, hi;
  static SHOAL_INLINE Int broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  SHOAL_INLINE Vec to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
SHOAL_INLINE void store_bytes(uint8_t* p, Bytes b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), b.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), b.hi);
}
SHOAL_INLINE __m256i and_bytes(__m256i b, int mask) {
  return _mm256_and_si256(b, _mm256_set1_epi8(static_cast<char>(mask)));
}
SHOAL_INLINE Bytes low_nibbles(Bytes b) { return {and_bytes(b.lo, 0x0f), and_bytes(b.hi, 0x0f)}; }
SHOAL_INLINE Bytes high_nibbles(Bytes b) {
  return {and_bytes(_mm256_srli_epi16(b.lo, 4), 0x0f), and_bytes(_mm256_srli_epi16(b.hi, 4), 0x0f)};
}
// Exact while two products of w and x fit int16: w <= 127.
SHOAL_INLINE __m256i dot4_small(__m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
template <int kBits>
SHOAL_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
  if constexpr (kBits <= 4) return _mm256_add_epi32(acc, dot4_small(w, x));
  // A byte is 128 * its top bit + the rest, so that neither part can saturate.
  const __m256i top = and_bytes(_mm256_srli_epi16(w, 7), 0x01);
  const __m256i rest = dot4_small(and_bytes(w, 0x7f), x);
  return _mm256_add_epi32(acc, _mm256_add_epi32(rest, _mm256_slli_epi32(dot4_small(top, x), 7)));
}
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, Bytes w, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  const __m256i xs = _mm256_set1_epi32(quad);
  return {dot4_half<kBits>(acc.lo, w.lo, xs), dot4_half<kBits>(acc.hi, w.hi, xs)};
}
inline constexpr int kRowBlock = 2;

#else

struct Bytes {
  uint8_t b[4 * kTile];
};
struct Int {
  int32_t lane[kLanes];
  static SHOAL_INLINE Int broadcast(int32_t x) {
    Int r;
    for (int32_t& lane : r.lane) lane = x;
    return r;
  }
  SHOAL_INLINE Vec to_float() const {
    return Vec::each([this](int i) { return static_cast<float>(lane[i]); });
  }
};
SHOAL_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  __builtin_memcpy(r.b, p, sizeof r.b);
  return r;
}
SHOAL_INLINE void store_bytes(uint8_t* p, const Bytes& w) { __builtin_memcpy(p, w.b, sizeof w.b); }
SHOAL_INLINE Bytes low_nibbles(Bytes w) {
  for (uint8_t& b : w.b) b &= 0x0f;
  return w;
}
SHOAL_INLINE Bytes high_nibbles(Bytes w) {
  for (uint8_t& b : w.b) b >>= 4;
  return w;
}
template <int kBits>
SHOAL_INLINE Int dot4(Int acc, const Bytes& w, const int8_t* x) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) acc.lane[i] += w.b[4 * i + j] * x[j];
  }
  return acc;
}
inline constexpr int kRowBlock = 2;

#endif

template <bool kHalf>
SHOAL_INLINE Vec load_scale(const uint8_t* base, int64_t index) {
  if constexpr (kHalf) return Vec::load_half(reinterpret_cast<const uint16_t*>(base) + index * kTile);
  return Vec::load(reinterpret_cast<const float*>(base) + index * kTile);
}

// A tile read as it is packed: for few rows, where the weights' bytes are what costs.
template <typename F>
struct PackedTile {
  const uint8_t* quants;
  const uint8_t* scales;
  const uint8_t* mins;

  SHOAL_INLINE PackedTile(const PackedMatrix& w, int64_t tile)
      : quants(w.tile(tile)), scales(quants + w.scale_offset), mins(quants + w.min_offset) {}
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    if constexpr (F::kBits == 4) {
      const Bytes both = load_bytes(quants + (4 * g + j) * 64);
      *low = low_nibbles(both);
      *high = high_nibbles(both);
    } else {
      *low = load_bytes(quants + (8 * g + j) * 64);
      *high = load_bytes(quants + (8 * g + j + 4) * 64);
    }
  }
  SHOAL_INLINE Vec scale(int64_t g, int half) const {
    return load_scale<F::kHalfScales>(scales, g * F::kHalves + half);
  }
  SHOAL_INLINE Vec min(int64_t g) const { return load_scale<F::kHalfScales>(mins, g); }
};

// A tile unpacked to bytes and fp32 scales in the caches: for many rows.
template <typename F>
struct UnpackedTile {
  const uint8_t* quants;  // [groups][8][16][4]
  float* scales;          // [groups][kHalves][16]
  float* mins;            // [groups][16]

  // Unpacks into `scratch` (half of gemm_scratch_bytes); quants of 8 bits stay where they are.
  UnpackedTile(const PackedMatrix& w, int64_t tile, uint8_t* scratch) {
    const PackedTile<F> packed(w, tile);
    const int64_t groups = w.groups();
    quants = F::kBits == 4 ? scratch : packed.quants;
    scales = reinterpret_cast<float*>(scratch + w.inputs * kTile);
    mins = scales + groups * F::kHalves * kTile;
    for (int64_t g = 0; g < groups; ++g) {
      if constexpr (F::kBits == 4) {
        for (int j = 0; j < 4; ++j) {
          Bytes low, high;
          packed.chunks(g, j, &low, &high);
          store_bytes(scratch + (8 * g + j) * 64, low);
          store_bytes(scratch + (8 * g + j + 4) * 64, high);
        }
      }
      for (int half = 0; half < F::kHalves; ++half) {
        packed.scale(g, half).store(scales + (g * F::kHalves + half) * kTile);
      }
      if constexpr (F::kHasMin) packed.min(g).store(mins + g * kTile);
    }
  }
  SHOAL_INLINE void chunks(int64_t g, int j, Bytes* low, Bytes* high) const {
    *low = load_bytes(quants + (8 * g + j) * 64);
    *high = load_bytes(quants + (8 * g + j + 4) * 64);
  }
  SHOAL_INLINE Vec scale(int64_t g, int half) const {
    return Vec::load(scales + (g * F::kHalves + half) * kTile);
  }
  SHOAL_INLINE Vec min(int64_t g) const { return Vec::load(mins + g * kTile); }
};

SHOAL_INLINE void store_tile(Vec acc, float* y, int64_t columns) {
  if (columns >= kTile) {
    acc.store(y);
    return;
  }
  float lanes[kTile];
  acc.store(lanes);
  for (int64_t i = 0; i < columns; ++i) y[i] = lanes[i];
}

// Where the sum over a group starts: it corrects for the zero point of the weights.
template <typename F>
SHOAL_INLINE int32_t zero_correction(const GroupFactors& factors, int64_t lane, int half) {
  if constexpr (F::kHalves == 2) {
    return -F::kZero * (half == 0 ? factors.low_sum[lane] : factors.high_sum[lane]);
  }
  return -F::kZero * (factors.low_sum[lane] + factors.high_sum[lane]);
}

// R rows from `row` on times two neighbouring tiles.
template <typename F, int R, typename Tile>
void multiply_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  constexpr int H = F::kHalves;
  const int64_t groups = args.w->groups(), inputs = args.w->inputs;
  const int8_t* x = args.x.q + row * inputs;
  const GroupFactors* factors[R];
  int64_t lane[R];
  for (int r = 0; r < R; ++r) {
    factors[r] = args.x.factors + (row + r) / kRowPadding * groups;
    lane[r] = (row + r) % kRowPadding;
  }
  Vec acc[R][2];
  for (auto& a : acc) a[0] = a[1] = Vec::zero();
  for (int64_t g = 0; g < groups; ++g) {
    Int dot[R][2][H];
    for (int r = 0; r < R; ++r) {
      for (int h = 0; h < H; ++h) {
        const int32_t start =
            F::kZero == 0 ? 0 : zero_correction<F>(factors[r][g], lane[r], h);
        dot[r][0][h] = dot[r][1][h] = Int::broadcast(start);
      }
    }
    for (int j = 0; j < 4; ++j) {
      for (int c = 0; c < 2; ++c) {
        Bytes low, high;
        w[c].chunks(g, j, &low, &high);
        for (int r = 0; r < R; ++r) {
          const int8_t* xs = x + r * inputs + g * kGroup + 4 * j;
          dot[r][c][0] = dot4<F::kBits>(dot[r][c][0], low, xs);
          dot[r][c][H - 1] = dot4<F::kBits>(dot[r][c][H - 1], high, xs + 16);
        }
      }
    }
    for (int c = 0; c < 2; ++c) {
      for (int r = 0; r < R; ++r) {
        const Vec s = Vec::broadcast(factors[r][g].scale[lane[r]]);
        for (int h = 0; h < H; ++h) {
          acc[r][c] = fma(dot[r][c][h].to_float(), w[c].scale(g, h) * s, acc[r][c]);
        }
        if constexpr (F::kHasMin) {
          const Vec sum = Vec::broadcast(factors[r][g].scaled_sum[lane[r]]);
          acc[r][c] = fma(w[c].min(g), sum, acc[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2; ++c) {
      const int64_t column = (tile + c) * kTile;
      if (column >= args.w->outputs) continue;
      store_tile(acc[r][c], args.y + (row + r) * args.y_stride + column, args.w->outputs - column);
    }
  }
}

template <typename F, int R, typename Tile>
void multiply_tail(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) {
      multiply_rows<F, R>(args, w, tile, row);
    } else {
      multiply_tail<F, R - 1>(args, w, tile, row, rows);
    }
  }
}

template <typename F, typename Tile>
void multiply_all_rows(const GemmArgs& args, const Tile* w, int64_t tile, int64_t row) {
  for (; row + kRowBlock <= args.row_end; row += kRowBlock) {
    multiply_rows<F, kRowBlock>(args, w, tile, row);
  }
  multiply_tail<F, kRowBlock - 1>(args, w, tile, row, args.row_end - row);
}

template <typename F>
void gemm_quantized(const GemmArgs& args) {
  for (int64_t tile = args.tile_begin; tile < args.tile_end; tile += 2) {
    if (args.row_end - args.row_begin <= kRowBlock) {
      const PackedTile<F> w[2] = {{*args.w, tile}, {*args.w, tile + 1}};
      multiply_all_rows<F>(args, w, tile, args.row_begin);
    } else {
      const UnpackedTile<F> w[2] = {
          {*args.w, tile, args.scratch},
          {*args.w, tile + 1, args.scratch + gemm_scratch_bytes(args.w->inputs) / 2}};
      multiply_all_rows<F>(args, w, tile, args.row_begin);
    }
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
      store_tile(acc[r][c], args.y + (row + r) * args.y_stride + column, args.w->outputs - column);
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

// x = scale * q with scale = max|x| / 127 over each group of 32, q rounded to nearest even.
static void quantize_rows(const float* x, int64_t x_stride, int64_t row_begin, int64_t row_end,
                          int64_t inputs, const QuantizedRows& out) {
  constexpr float kSmallest = 1e-30f;  // below it 127 / x could overflow
  const int64_t groups = inputs / kGroup;
  const Vec shift = Vec::broadcast(0x1.8p23f);  // adding and subtracting it rounds to an integer
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      const float* in = x + row * x_stride + g * kGroup;
      const Vec low = Vec::load(in), high = Vec::load(in + kLanes);
      const float largest = reduce_max(max(abs(low), abs(high)));
      const float scale = largest > kSmallest ? largest / 127.0f : 0.0f;
      const Vec inverse = Vec::broadcast(largest > kSmallest ? 127.0f / largest : 0.0f);
      const Vec q_low = (low * inverse + shift) - shift, q_high = (high * inverse + shift) - shift;
      int8_t* q = out.q + row * inputs + g * kGroup;
      q_low.store_int8(q);
      q_high.store_int8(q + kLanes);
      const float sum_low = reduce_add(q_low), sum_high = reduce_add(q_high);
      GroupFactors& factors = out.factors[row / kRowPadding * groups + g];
      const int64_t lane = row % kRowPadding;
      factors.scale[lane] = scale;
      factors.scaled_sum[lane] = scale * (sum_low + sum_high);
      factors.low_sum[lane] = static_cast<int32_t>(sum_low);
      factors.high_sum[lane] = static_cast<int32_t>(sum_high);
    }
  }
}

inline constexpr LinearKernels kLinearKernels = {
    &quantize_rows,
    {&gemm_quantized<Q4_1>, &gemm_quantized<Q4_0>, &gemm_quantized<Q8_0>, &gemm_quantized<Q4_K>,
     &gemm_quantized<Q5_K>, &gemm_quantized<Q6_K>, &gemm_dense<Format::kF32>,
     &gemm_dense<Format::kF16>, &gemm_dense<Format::kBF16>}};

}  // namespace shoal::SHOAL_ISA_NAMESPACE
