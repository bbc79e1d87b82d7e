// Attention on AMX bf16 tiles: up to 32 rows to one chunk of 256 keys at a time.
//
// Keys and values lie in the KV buffer as B operands of the tile unit (write_kv_tiles). Its arithmetic
// differs from that of attention_kernels.h, but a row's still depends on that row and its own keys
// alone: a product adds, in fp32, 32 terms at absolute places, dimensions for scores and keys for
// values. A key that a row doesn't see weighs exactly zero, and a product of zeros changes no
// accumulator, so it doesn't matter how far the other rows of a tile see. Weights are rounded to bf16,
// and the sum is of the rounded ones, by the tile unit: as if of values that are all one.
#pragma once

#include "attention_kernels.h"

#if defined(__AMX_BF16__)

namespace shoal::SHOAL_ISA_NAMESPACE {

inline constexpr int kTileQueries = 16;    // rows of a tile
inline constexpr int kDepth = 2 * kLanes;  // terms of a product; also bf16 of a line of a B tile
inline constexpr int kTileHalves = kLanes * kDepth;

SHOAL_INLINE __m256i to_bf16(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)); }
SHOAL_INLINE __m512i to_bf16(Vec low, Vec high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

// A block holds, for one KV head, K as [head_dim / 2][16 tokens][2 dimensions] and V as
// [head_dim / 16][8][16 dimensions][2 tokens]: lines of B tiles of 16 columns.
inline void write_kv_tiles(const float* k, const float* v, uint16_t* block, int64_t offset,
                           int64_t head_dim) {
  uint16_t* values = block + kLanes * head_dim + offset / 2 * kDepth;
  const __mmask32 tokens = offset % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    alignas(32) uint32_t pairs[kLanes / 2];
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), to_bf16(Vec::load(k + d)));
    for (int i = 0; i < kLanes / 2; ++i) {
      __builtin_memcpy(block + (d / 2 + i) * kDepth + 2 * offset, &pairs[i], sizeof pairs[i]);
    }
    const __m512i value = _mm512_cvtepu16_epi32(to_bf16(Vec::load(v + d)));
    const __m512i twice = _mm512_or_si512(value, _mm512_slli_epi32(value, 16));
    _mm512_mask_storeu_epi16(values + d * kLanes, tokens, twice);
  }
}

// Layout of Intel's tile configuration, palette 1. Registers 0 to 3 accumulate; A is in 4 and 5, B in 6
// and 7. Up to 16 rows fill four accumulators side by side; more take two rows of two.
struct alignas(64) AttentionTileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit AttentionTileConfig(int64_t queries) {
    const bool one = queries <= kTileQueries;
    const auto upper = static_cast<uint8_t>(one ? queries : kTileQueries);
    const auto lower = static_cast<uint8_t>(one ? queries : queries - kTileQueries);
    rows[0] = rows[1] = rows[4] = upper;
    rows[2] = rows[3] = rows[5] = lower;
    rows[6] = rows[7] = 16;
  }
  SHOAL_INLINE void load() const {
    // GCC 12 believes that the intrinsic reads 8 bytes only and would drop the stores to the rest.
    asm volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// kRowTiles x kColumns accumulators. a and out have the rows one below the other, the given number of
// bytes apart; b(i) is a B tile for column i; columns are side by side in `out`.
template <int kRowTiles, int kColumns>
struct Accumulators;

template <int kColumns>
struct Accumulators<1, kColumns> {
  static SHOAL_INLINE void clear() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 2) _tile_zero(2);
    if constexpr (kColumns > 3) _tile_zero(3);
  }
  template <typename B>
  static SHOAL_INLINE void add(const uint16_t* a, int64_t a_bytes, B&& b) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b(0), 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b(1), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kColumns > 2) {
      _tile_loadd(6, b(2), 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kColumns > 3) {
      _tile_loadd(7, b(3), 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  static SHOAL_INLINE void store(float* out, int64_t out_bytes) {
    _tile_stored(0, out, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(1, out + kLanes, out_bytes);
    if constexpr (kColumns > 2) _tile_stored(2, out + 2 * kLanes, out_bytes);
    if constexpr (kColumns > 3) _tile_stored(3, out + 3 * kLanes, out_bytes);
  }
};

template <int kColumns>
struct Accumulators<2, kColumns> {
  static SHOAL_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 1) _tile_zero(3);
  }
  template <typename B>
  static SHOAL_INLINE void add(const uint16_t* a, int64_t a_bytes, B&& b) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b(0), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + kTileQueries * a_bytes / 2, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b(1), 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static SHOAL_INLINE void store(float* out, int64_t out_bytes) {
    float* const lower = out + kTileQueries * out_bytes / 4;
    _tile_stored(0, out, out_bytes);
    _tile_stored(2, lower, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(1, out + kLanes, out_bytes);
    if constexpr (kColumns > 1) _tile_stored(3, lower + kLanes, out_bytes);
  }
};

// Calls step.operator()<Accumulators>(i) for the columns [begin, end), as many at once as there are
// accumulators.
template <int kRowTiles, typename Step>
SHOAL_INLINE void for_columns(int64_t begin, int64_t end, Step&& step) {
  constexpr int kMost = 4 / kRowTiles;
  int64_t i = begin;
  for (; i + kMost <= end; i += kMost) step.template operator()<Accumulators<kRowTiles, kMost>>(i);
  if constexpr (kRowTiles == 1) {
    if (end - i == 3) step.template operator()<Accumulators<1, 3>>(i);
    if (end - i == 2) step.template operator()<Accumulators<1, 2>>(i);
  }
  if (end - i == 1) step.template operator()<Accumulators<kRowTiles, 1>>(i);
}

// 2^x for x <= 0, with a relative error of 7.5e-5 before rounding to bf16; 0 for -inf.
SHOAL_INLINE Vec exp2_of_negative(Vec x) {
  const Vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
  Vec p = fma(Vec::broadcast(0.078024523f), r, Vec::broadcast(0.22606716f));
  p = fma(p, r, Vec::broadcast(0.69583354f));
  p = fma(p, r, Vec::broadcast(0.99992522f));
  return {_mm512_scalef_ps(p.v, x.v)};  // p 2^floor(x)
}

// Scores of one row and the keys [first, last) of the chunk that it sees. Its weights replace them from
// the first on, in half the space.
struct ScoreRow {
  float* scores;  // [kChunkTokens]
  int64_t first, last;

  int64_t first_pair() const { return first / kDepth; }  // of blocks
  int64_t end_pair() const { return (last + kDepth - 1) / kDepth; }

  // Replaces what the row doesn't see, and what may never have been computed, in the pairs at the ends.
  void mask() const {
    mask_pair(first_pair());
    if (end_pair() > first_pair() + 1) mask_pair(end_pair() - 1);
  }
  void mask_pair(int64_t pair) const {
    const int64_t begin = pair * kDepth;
    const uint32_t above = first > begin ? ~0u << (first - begin) : ~0u;
    const uint32_t below = last < begin + kDepth ? ~(~0u << (last - begin)) : ~0u;
    const uint32_t seen = above & below;
    if (seen == ~0u) return;
    float* s = scores + begin;
    const __m512 masked = _mm512_set1_ps(kMasked);
    _mm512_storeu_ps(s, _mm512_mask_loadu_ps(masked, static_cast<__mmask16>(seen), s));
    _mm512_storeu_ps(s + kLanes,
                     _mm512_mask_loadu_ps(masked, static_cast<__mmask16>(seen >> 16), s + kLanes));
  }

  void cap(float scale, float soft_cap) const {
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kLanes) {
      cap_scores(Vec::load(scores + i) * Vec::broadcast(scale), soft_cap).store(scores + i);
    }
  }

  // The maximum, and zero, or NaN if any score is not finite.
  void summarize(float& maximum, float& poison) const {
    Vec highest[2] = {Vec::broadcast(kMasked), Vec::broadcast(kMasked)};
    Vec zeros[2] = {Vec::zero(), Vec::zero()};
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kDepth) {
      for (int half = 0; half < 2; ++half) {
        const Vec score = Vec::load(scores + i + half * kLanes);
        highest[half] = max(highest[half], score);
        zeros[half] = fma(score, Vec::zero(), zeros[half]);
      }
    }
    maximum = reduce_max(max(highest[0], highest[1]));
    const __m512 sum = (zeros[0] + zeros[1]).v;
    poison = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) == 0 ? 0.0f : __builtin_nanf("");
  }

  // Replaces the scores of the pairs [begin, end) by the weights exp((score - maximum) * scale).
  void weigh(float maximum, float scale, int64_t begin, int64_t end) const {
    const float log2_scale = scale * 1.44269504f;
    const Vec factor = Vec::broadcast(log2_scale), offset = Vec::broadcast(-maximum * log2_scale);
    auto* const weights = reinterpret_cast<uint16_t*>(scores);
    clear(begin, first_pair());
    for (int64_t i = first_pair() * kDepth; i < end_pair() * kDepth; i += kDepth) {
      const Vec low = fma(Vec::load(scores + i), factor, offset);
      const Vec high = fma(Vec::load(scores + i + kLanes), factor, offset);
      _mm512_storeu_si512(weights + i, to_bf16(exp2_of_negative(low), exp2_of_negative(high)));
    }
    clear(end_pair(), end);
  }

  void clear(int64_t begin, int64_t end) const {
    auto* const weights = reinterpret_cast<uint16_t*>(scores);
    for (int64_t pair = begin; pair < end; ++pair) {
      _mm512_storeu_si512(weights + pair * kDepth, _mm512_setzero_si512());
    }
  }
};

struct alignas(64) OnesTile {
  uint16_t halves[kTileHalves];

  constexpr OnesTile() : halves{} {
    for (uint16_t& half : halves) half = 0x3f80;
  }
};
inline constexpr OnesTile kOnes;

// One tile of queries and one chunk of keys on the tile unit.
class TileAttention {
 public:
  TileAttention(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                const AttentionScratch& scratch)
      : chunk_{shape, tile, {}, index * kChunkTokens, 0, 0, scratch.scores},
        rows_(tile.num_queries * shape.group),
        first_(chunk_.first_key(0)),
        last_(chunk_.last_key(rows_ - 1)),
        depth_((shape.head_dim + kDepth - 1) / kDepth * kDepth),
        values_(reinterpret_cast<uint16_t*>(scratch.blocks)),
        queries_(values_ + kChunkTokens * shape.head_dim),
        key_tails_(queries_ + kMostRows * depth_) {
    chunk_.first_block = first_ / kLanes;
    chunk_.last_block = (last_ + kLanes - 1) / kLanes;
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      chunk_.blocks[b] = tile.kv + tile.block_table[index * kChunkBlocks + b] * shape.block_halves;
    }
  }

  // Whether the states are right: with a value that isn't finite those rows that don't see it, but share
  // a tile with a row that does, are not (0 * NaN is NaN).
  bool run(float* states) {
    load_key_tails();
    const bool finite = load_values() || chunk_.tile.num_queries == 1;
    int64_t configured = 0;
    for (int64_t row = 0; finite && row < rows_; row += kMostRows) {
      const int64_t rows = rows_ - row < kMostRows ? rows_ - row : kMostRows;
      if (rows != configured) AttentionTileConfig(rows).load();
      configured = rows;
      if (rows > kTileQueries) {
        attend<2>(row, rows, states + row * chunk_.shape.state_floats());
      } else {
        attend<1>(row, rows, states + row * chunk_.shape.state_floats());
      }
    }
    _tile_release();
    return finite;
  }

 private:
  static constexpr int64_t kMostRows = 2 * kTileQueries;

  template <int kRowTiles>
  void attend(int64_t row, int64_t rows, float* states) {
    const int64_t first_block = chunk_.first_key(row) / kLanes;
    const int64_t end_block = (chunk_.last_key(row + rows - 1) + kLanes - 1) / kLanes;
    const int64_t first_pair = first_block / 2, end_pair = (end_block + 1) / 2;
    float maxima[kMostRows], poisons[kMostRows];
    load_queries(row, rows);
    score<kRowTiles>(first_block, end_block);
    for (int64_t r = 0; r < rows; ++r) weigh(row, r, first_pair, end_pair, maxima[r], poisons[r]);
    accumulate<kRowTiles>(first_pair, end_pair, states);
    for (int64_t r = 0; r < rows; ++r, states += chunk_.shape.state_floats()) {
      states[0] = maxima[r];
      states[1] += poisons[r];
    }
  }

  void load_queries(int64_t row, int64_t rows) {
    uint16_t* out = queries_;
    for (int64_t r = row; r < row + rows; ++r, out += depth_) {
      const float* q = chunk_.query(r);
      const auto store = [&](int64_t d, __m256i x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), x);
      };
      int64_t d = 0;
      for (; d < chunk_.shape.head_dim; d += kLanes) store(d, to_bf16(Vec::load(q + d)));
      if (d < depth_) store(d, _mm256_setzero_si256());
    }
  }

  // Fills the last 16 dimensions of an odd multiple up with zeros: what follows them in a block are
  // values, and those not written yet may be NaN.
  void load_key_tails() {
    const int64_t head_dim = chunk_.shape.head_dim;
    if (head_dim == depth_) return;
    for (int64_t b = chunk_.first_block; b < chunk_.last_block; ++b) {
      const uint16_t* const from = chunk_.blocks[b] + (head_dim - kLanes) * kLanes;
      uint16_t* const to = key_tails_ + b * kTileHalves;
      for (int i = 0; i < kTileHalves / 2; i += kDepth) {
        _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
        _mm512_storeu_si512(to + kTileHalves / 2 + i, _mm512_setzero_si512());
      }
    }
  }

  template <int kRowTiles>
  void score(int64_t first_block, int64_t end_block) {
    const int64_t whole = chunk_.shape.head_dim / kDepth * kDepth;
    for_columns<kRowTiles>(first_block, end_block, [&]<typename C>(int64_t block) {
      const uint16_t* const* k = chunk_.blocks + block;
      C::clear();
      for (int64_t d = 0; d < whole; d += kDepth) {
        C::add(queries_ + d, 2 * depth_, [&](int i) { return k[i] + d * kLanes; });
      }
      if (whole < depth_) {
        const uint16_t* const tails = key_tails_ + block * kTileHalves;
        C::add(queries_ + whole, 2 * depth_, [&](int i) { return tails + i * kTileHalves; });
      }
      C::store(chunk_.scores + block * kLanes, kScoreBytes);
    });
  }

  // Turns the scores of row + r into weights for the pairs of blocks [first_pair, end_pair).
  void weigh(int64_t row, int64_t r, int64_t first_pair, int64_t end_pair, float& maximum,
             float& poison) {
    const AttentionShape& shape = chunk_.shape;
    const ScoreRow scores{chunk_.scores + r * kChunkTokens, chunk_.first_key(row + r),
                          chunk_.last_key(row + r)};
    if (scores.first >= scores.last) {
      maximum = kMasked;
      poison = 0.0f;
      return scores.clear(first_pair, end_pair);
    }
    const bool capped = shape.soft_cap > 0.0f;
    const float scale = capped ? 1.0f : shape.scale;
    if (capped) scores.cap(shape.scale, shape.soft_cap);
    scores.mask();
    scores.summarize(maximum, poison);
    scores.weigh(maximum, scale, first_pair, end_pair);
    maximum *= scale;
  }

  // Copies the values of each two blocks into B tiles of full depth; those that no row sees are zero,
  // whatever lies there. Returns whether all are finite.
  bool load_values() {
    __m512i largest = _mm512_setzero_si512();
    const int64_t pair_halves = kDepth * chunk_.shape.head_dim;
    for (int64_t block = chunk_.first_block / 2 * 2; block < chunk_.last_block; block += 2) {
      uint16_t* const pair = values_ + block / 2 * pair_halves;
      largest = _mm512_max_epu16(largest, load_block_values(block, pair));
      largest = _mm512_max_epu16(largest, load_block_values(block + 1, pair + kTileHalves / 2));
    }
    const __m512i infinity = _mm512_set1_epi16(static_cast<int16_t>(0x7f80 << 1));
    return _mm512_cmpge_epu16_mask(largest, infinity) == 0;
  }

  // Returns in each lane the largest magnitude, as twice its bits.
  __m512i load_block_values(int64_t block, uint16_t* out) {
    const int64_t begin = block * kLanes, end = begin + kLanes;
    if (end <= first_ || last_ <= begin) return clear_values(out);
    if (first_ <= begin && end <= last_) {
      return copy_values(chunk_.blocks[block], out, [](int) { return ~0u; });
    }
    return copy_values(chunk_.blocks[block], out, [&](int line) {
      const int64_t token = begin + 2 * line;
      const bool even = first_ <= token && token < last_;
      const bool odd = first_ <= token + 1 && token + 1 < last_;
      return (even ? 0x55555555u : 0u) | (odd ? 0xaaaaaaaau : 0u);
    });
  }

  __m512i clear_values(uint16_t* out) const {
    for (int64_t d = 0; d < chunk_.shape.head_dim; d += kLanes, out += kTileHalves) {
      for (int line = 0; line < 8; ++line) {
        _mm512_storeu_si512(out + line * kDepth, _mm512_setzero_si512());
      }
    }
    return _mm512_setzero_si512();
  }

  // Copies a block's lines of V; tokens(line) has the lanes that a row sees.
  template <typename Tokens>
  SHOAL_INLINE __m512i copy_values(const uint16_t* block, uint16_t* out, Tokens&& tokens) const {
    __m512i largest = _mm512_setzero_si512();
    const uint16_t* v = block + kLanes * chunk_.shape.head_dim;
    for (int64_t d = 0; d < chunk_.shape.head_dim; d += kLanes, out += kTileHalves) {
      for (int line = 0; line < 8; ++line, v += kDepth) {
        const __m512i x = _mm512_maskz_loadu_epi16(tokens(line), v);
        _mm512_storeu_si512(out + line * kDepth, x);
        largest = _mm512_max_epu16(largest, _mm512_add_epi16(x, x));
      }
    }
    return largest;
  }

  // Weights times ones, for the sums, then times values.
  template <int kRowTiles>
  void accumulate(int64_t first_pair, int64_t end_pair, float* states) {
    const AttentionShape& shape = chunk_.shape;
    const auto* const weights = reinterpret_cast<const uint16_t*>(chunk_.scores);
    for_columns<kRowTiles>(0, 1 + shape.head_dim / kLanes, [&]<typename C>(int64_t column) {
      C::clear();
      for (int64_t pair = first_pair; pair < end_pair; ++pair) {
        const uint16_t* const v = values_ + pair * kDepth * shape.head_dim;
        C::add(weights + pair * kDepth, kScoreBytes, [&](int i) {
          return column + i == 0 ? kOnes.halves : v + (column + i - 1) * kTileHalves;
        });
      }
      C::store(states + column * kLanes, shape.state_floats() * sizeof(float));
    });
  }

  static constexpr int64_t kScoreBytes = kChunkTokens * sizeof(float);

  Chunk<uint16_t> chunk_;
  int64_t rows_;
  int64_t first_, last_;  // keys that any row sees
  int64_t depth_;         // head_dim, rounded up to whole products
  uint16_t* values_;      // [pairs of blocks][head_dim / 16][16][16 dimensions][2 tokens]
  uint16_t* queries_;     // [32][depth_]
  uint16_t* key_tails_;   // [blocks][16][16 tokens][2 dimensions]
};

inline void attend_chunk_tiles(const AttentionShape& shape, const AttentionTile& tile, int64_t index,
                               const AttentionScratch& scratch, float* states) {
  if (TileAttention(shape, tile, index, scratch).run(states)) return;
  // Rows of one query see the same keys, so none suffers from what another sees.
  AttentionTile query = tile;
  query.num_queries = 1;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    TileAttention(shape, query, index, scratch).run(states);
    query.q += tile.q_stride;
    query.first_position += 1;
    states += shape.group * shape.state_floats();
  }
}

}  // namespace shoal::SHOAL_ISA_NAMESPACE

#endif
